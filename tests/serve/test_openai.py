"""OpenAI's API over a scripted engine: streams equal whole answers, shapes are what clients expect."""
import json

import pytest

from hetero.engine.scheduler import Limits

TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
CALL = '<tool_call>{"name": "get", "arguments": {"city": "Zürich 😀"}}</tool_call>'


def joined(events):
    """A stream's chunks as one message, as a client adds them up."""
    content, reasoning, calls, finish = "", "", [], None
    for e in events[:-1]:
        for c in e["choices"]:
            d = c["delta"]
            content += d.get("content") or ""
            reasoning += d.get("reasoning_content") or ""
            finish = c["finish_reason"] or finish
            for t in d.get("tool_calls", ()):
                if "id" in t:
                    calls.append({"name": t["function"]["name"], "arguments": ""})
                calls[t["index"]]["arguments"] += t["function"]["arguments"]
    return content, reasoning, calls, finish


def whole(r):
    c = r.json()["choices"][0]
    m = c["message"]
    return m["content"] or "", m.get("reasoning_content", ""), [{"name": t["function"]["name"], "arguments": t["function"]["arguments"]} for t in m.get("tool_calls", ())], c["finish_reason"]


@pytest.mark.parametrize("says, more", [
    ("Hello there 😀é漢!", {}), ("DEF GHI one two", {"stop": ["HI one"]}), ("One\nUser: x", {"stop": "\nUser:"}),
    (f"Let me see. {CALL}{CALL}", {"tools": TOOLS}), ('Hello <tool_call>{"name": "f', {"tools": TOOLS, "stop": ['"f']}), ("why</think>so", {"chat_template_kwargs": {"think": True}}),
    ("why</think>\n\nso b,c d", {"chat_template_kwargs": {"think": True}, "stop": ["b,c"]}), ("only thoughts", {"chat_template_kwargs": {"think": True}}), ("", {})])
def test_a_stream_is_the_whole_answer_for_every_max_tokens(stage, says, more):
    stage.says = says
    for most in (1, 2, 3, 5, 8, 13, 40, None):
        a, b = whole(stage.chat(max_tokens=most, **more)), joined(stage.events(max_tokens=most, **more))
        assert a == b
        assert a[3] == "length" or most is None or most > 3 or not says
    if CALL in says:
        assert a[2] == [{"name": "get", "arguments": '{"city": "Zürich 😀"}'}] * 2 and a[3] == "tool_calls" and a[0] == "Let me see."
    elif "thoughts" in says:
        assert a[:2] == ("", "only thoughts") and stage.chat(**more).json()["choices"][0]["message"]["content"] is None
    elif "stop" in more and "think" not in says:
        assert a[3] == "stop" and all(s not in a[0] for s in ([more["stop"]] if isinstance(more["stop"], str) else more["stop"]))


def test_chunks_have_the_shape_that_clients_expect(stage):
    for ask_usage in (False, True):
        events = stage.events(**({"stream_options": {"include_usage": True}} if ask_usage else {}))
        assert events[-1] == "[DONE]"
        chunks = events[:-1]
        assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in c["choices"][0]["delta"] for c in chunks[1:] if c["choices"])
        last = chunks[-2] if ask_usage else chunks[-1]
        assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "stop" and last["timings"]["tokens"] == 4
        if ask_usage:
            assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 4 and chunks[-1]["usage"]["prompt_tokens"] > 5
            assert all(c["usage"] is None for c in chunks[:-1])
        else:
            assert all("usage" not in c for c in chunks)


def test_logprobs_and_text_are_the_same_tokens(stage):
    for says, stop in (("Hi 😀é there", None), ("One two three", ["wo th"])):
        stage.says = says
        r = stage.chat(logprobs=True, top_logprobs=2, stop=stop).json()["choices"][0]
        entries = r["logprobs"]["content"]
        assert b"".join(bytes(e["bytes"]) for e in entries).decode() == r["message"]["content"]
        assert all(len(e["top_logprobs"]) == 2 for e in entries)
        streamed = [e for c in stage.events(logprobs=True, top_logprobs=2, stop=stop)[:-1] for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert [e["bytes"] for e in streamed] == [e["bytes"] for e in entries]


def test_n_answers_have_their_own_index(stage):
    r = stage.chat(n=3).json()
    assert [c["index"] for c in r["choices"]] == [0, 1, 2] and {c["message"]["content"] for c in r["choices"]} == {"Hello there."}
    assert r["usage"]["completion_tokens"] == 12 and r["usage"]["prompt_tokens"] < 30
    assert sorted({c["choices"][0]["index"] for c in stage.events(n=3)[:-1]}) == [0, 1, 2]


def test_calls_have_ids_names_and_json_arguments(stage):
    stage.says = CALL + CALL
    calls = stage.chat(tools=TOOLS).json()["choices"][0]["message"]["tool_calls"]
    assert len({c["id"] for c in calls}) == 2 and all(c["id"].startswith("call_") and c["type"] == "function" for c in calls)
    deltas = [t for e in stage.events(tools=TOOLS)[:-1] for t in e["choices"][0]["delta"].get("tool_calls", ())]
    assert [t["index"] for t in deltas if "id" in t] == [0, 1] and len(deltas) > 4
    # what was given is taken back
    again = stage.chat(tools=TOOLS, messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": calls},
                                              {"role": "tool", "tool_call_id": calls[0]["id"], "content": "sunny"}, {"role": "assistant"}])
    assert again.status_code == 200


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get"}}])
def test_a_forced_call_is_a_call_that_validates(stage, choice):
    stage.says = lambda request: lambda *_: [0.0] * stage.tok.size          # a model that would say anything
    r = stage.chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=300, seed=4, temperature=1.0, logit_bias={str(stage.tok.id_of('"')): 9}).json()
    c = r["choices"][0]
    if c["finish_reason"] == "tool_calls":
        assert isinstance(json.loads(c["message"]["tool_calls"][0]["function"]["arguments"])["city"], str)
    assert c["message"]["tool_calls"][0]["function"]["name"] == "get"


def test_structured_answers_are_enforced_also_after_reasoning(stage):
    stage.says = lambda request: lambda *_: [0.0] * stage.tok.size
    form = {"type": "choice", "choices": ["yes", "no"]}
    assert stage.chat(response_format=form, seed=1).json()["choices"][0]["message"]["content"] in ("yes", "no")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}}}
    assert json.loads(stage.chat(response_format=schema, seed=1).json()["choices"][0]["message"]["content"])["a"] in (1, 2)
    thought = [*stage.tok.encode("so {x}</think>"), *stage.tok.encode("zzz")]

    def after(request):
        def logits(request, index, said):
            row = [0.0] * stage.tok.size
            row[thought[min(len(said), len(thought) - 1)]] = 50.0
            return row
        return logits
    stage.says = after
    m = stage.chat(response_format=schema, chat_template_kwargs={"think": True}, seed=1).json()["choices"][0]["message"]
    assert m["reasoning_content"] == "so {x}" and json.loads(m["content"])["a"] in (1, 2)


def rambling(stage, *said):
    """A model that says these texts in order, as far as it is let."""
    tokens = [*(i for text in said for i in stage.tok.encode(text)), 2]

    def logits(request, index, so_far):
        row = [0.0] * stage.tok.size
        row[tokens[min(len(so_far), len(tokens) - 1)]] = 30.0
        row[stage.tok.id_of("x")] = 5.0
        row[stage.tok.id_of('"')] = 10.0
        return row
    return lambda request: logits


STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True, "parameters": {**TOOLS[0]["function"]["parameters"], "additionalProperties": False}}}]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_strict_tool_is_held_to_its_schema_when_the_model_chooses_to_call(stage, streamed):
    """Free text first; the call that the model then garbles comes out as one that validates. Without strict it is what the model said."""
    stage.says = rambling(stage, "Let me look. <tool_call>", '\n{"name": "got", "arguments": {"town": 5}}\n</tool_call>')

    def ask(**more):
        more |= {"max_tokens": 120, "seed": 3, "temperature": 0}
        return joined(stage.events(**more)) if streamed else whole(stage.chat(**more))
    content, _, calls, _ = ask(tools=STRICT)
    assert content == "Let me look." and calls[0]["name"] == "get"
    if calls[0]["arguments"].endswith("}"):
        assert isinstance(json.loads(calls[0]["arguments"])["city"], str)
    assert ask(tools=TOOLS)[2] == [{"name": "got", "arguments": '{"town": 5}'}]
    stage.says = "Nothing to call."
    assert ask(tools=STRICT)[0] == "Nothing to call."


def test_one_call_at_most_when_parallel_calls_are_off(stage):
    canonical = '<tool_call>\n{"name": "get", "arguments": {"city": "Ulm"}}\n</tool_call>'
    stage.says = rambling(stage, f"So. {canonical}", canonical)
    _, _, calls, finish = whole(stage.chat(tools=TOOLS, parallel_tool_calls=False, temperature=0, max_tokens=200))
    assert calls == [{"name": "get", "arguments": '{"city": "Ulm"}'}] and finish == "tool_calls"


def test_calls_come_before_a_response_format_and_beside_it(stage):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}}}
    stage.says = rambling(stage, '{"a": 2}')
    assert whole(stage.chat(tools=TOOLS, response_format=form, temperature=0, max_tokens=60))[0].startswith('{"a": 2')
    stage.says = rambling(stage, '<tool_call>\n{"name": "get", "arguments": {"city": "Ulm"}}\n</tool_call>')
    for more in ({}, {"tool_choice": "required"}):
        assert whole(stage.chat(tools=TOOLS, response_format=form, temperature=0, max_tokens=100, **more))[2][0]["name"] == "get"


def test_a_prompt_s_progress_is_told_when_asked_for(make_stage):
    stage = make_stage(limits=Limits(max_batch=2, chunk_tokens=32))
    ids = [300 + i for i in range(100)]
    for path, body in (("/v1/completions", {"prompt": ids, "messages": None}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 90}]})):
        assert not any("prompt_progress" in e for e in stage.events(path, **body)[:-1])
        events = stage.events(path, **body, return_progress=True, cache_prompt=False)[:-1]
        told = [e["prompt_progress"] for e in events if "prompt_progress" in e]
        assert len(told) >= 3 and [t["processed"] for t in told] == sorted({t["processed"] for t in told}) and told[-1]["processed"] == told[-1]["total"]
        assert {t["cache"] for t in told} == {0} and all(e["choices"][0]["finish_reason"] is None for e in events if "prompt_progress" in e)
    assert stage.chat(return_progress=True).json()["error"]["param"] == "return_progress"


def test_completions_echo_and_score(stage):
    r = stage.post("/v1/completions", prompt="Once upon", max_tokens=3, echo=True, logprobs=1).json()["choices"][0]
    assert r["text"] == "Once uponHello there." and r["logprobs"]["token_logprobs"][0] is None
    assert "".join(r["logprobs"]["tokens"]) == r["text"] and all(v is not None for v in r["logprobs"]["token_logprobs"][1:])
    assert [r["text"][o:].startswith(t) for o, t in zip(r["logprobs"]["text_offset"], r["logprobs"]["tokens"], strict=True)] == [True] * len(r["logprobs"]["tokens"])
    silent = stage.post("/v1/completions", prompt=[5, 6, 7], max_tokens=0, echo=True, logprobs=0).json()["choices"][0]
    assert len(silent["logprobs"]["tokens"]) == 3
    many = stage.post("/v1/completions", prompt=["a", "b"], n=2, max_tokens=2).json()
    assert [c["index"] for c in many["choices"]] == [0, 1, 2, 3] and many["usage"]["completion_tokens"] == 8
    events = stage.events("/v1/completions", prompt="a", max_tokens=2, messages=None)
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == stage.post("/v1/completions", prompt="a", max_tokens=2).json()["choices"][0]["text"]


def test_assistant_words_are_continued(stage):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure, "}]
    assert stage.chat(messages=messages, continue_final_message=True, add_generation_prompt=False).status_code == 200
    assert stage.tok.decode(stage.asked[-1].prompt, True).endswith("<|im_start|>assistant\nSure, ")
    assert stage.chat(messages=messages, continue_final_message=True, add_generation_prompt=True).status_code == 400


def test_looking_at_tokens_and_templates(stage):
    made = stage.post("/apply-template", messages=[{"role": "user", "content": "a<|im_end|>"}]).json()
    assert made["prompt"].startswith("<|im_start|>user\na<|im_end|><|im_end|>") and made["tokens"].count(2) == 1
    ids = stage.post("/tokenize", content="a<|im_end|>").json()
    assert ids["tokens"][-1] == 2 and ids["count"] == len(ids["tokens"])
    assert stage.post("/detokenize", tokens=ids["tokens"]).json()["content"] == "a<|im_end|>"
    assert stage.post("/detokenize", tokens=[10**9]).status_code == 400
    assert stage.post("/tokenize", messages=[{"role": "user", "content": "x"}]).json()["tokens"][0] == 1


def test_the_state_is_told(stage):
    get = stage.http.get
    assert get("/health").json() == {"status": "ok"} and get("/ready").json() == {"status": "ready"}
    props = get("/props").json()
    assert props["sampling"]["temperature"] == {"value": 0.7, "source": "generation_config.json"} and props["format"] == "hermes" and props["context"] == 512
    assert get("/v1/models").json()["data"][0]["id"] == "demo" and get("/v1/models/demo").status_code == 200 and get("/v1/models/other").status_code == 404
    assert get("/v1/report").json() == {"model": "demo", "layers": []}
    stage.chat()
    text = get("/metrics").text
    assert "hetero_up 1" in text and "hetero_ttft_seconds_count" in text and "hetero_requests_total" in text and "hetero_kv_usage_ratio" in text
    assert "hetero_pcie_gb_per_s 40\n" in text and "hetero_pcie_share_of_ceiling 0.8\n" in text
    assert "hetero_decode_tok_per_s 5" in text and "hetero_prefix_cache_hit_ratio" in text and 'hetero_prefix_cache_misses_total{reason="' in text
    assert get("/v1/report", headers={"accept": "text/html"}).text == "demo: no layers"
    assert "<title>hetero</title>" in get("/").text
    assert get("/openapi.json").json()["paths"]["/v1/chat/completions"]["post"]
