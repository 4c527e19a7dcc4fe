"""What clients do wrong is a 400 that names the field, in each API's shape, and the next request works."""
import concurrent.futures
import json
import socket
import threading
import time

import pytest
from pydantic import ValidationError

from hetero.engine.scheduler import Limits
from hetero.engine.scripted import Script
from hetero.errors import EngineFailed
from hetero.serve.anthropic import MessagesRequest
from hetero.serve.app import Desk
from hetero.serve.door import Settings
from hetero.serve.reading import LARGE_BYTES
from hetero.wire.schema import ChatRequest, CompletionRequest, DetokenizeRequest, fault

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def refused(r, status=400, param=None, words=""):
    assert r.status_code == status, r.text
    e = r.json()["error"]
    assert e.keys() == {"message", "type", "param", "code"} and "Traceback" not in e["message"] and "hetero." not in e["message"]
    assert (param is None or e["param"] == param) and words in e["message"], e
    return e


@pytest.mark.parametrize("body, param", [
    ({"logit_bias": {"999999999": -100}}, "logit_bias"), ({"logit_bias": {"-1": 5}}, "logit_bias"), ({"logit_bias": {"abc": 1}}, "logit_bias"), ({"logit_bias": {"5": 1e9}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"), ({"temperature": -1}, "temperature"), ({"temperature": "0.7"}, "temperature"), ({"top_p": 1.1}, "top_p"), ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"), ({"repetition_penalty": 0}, "repetition_penalty"), ({"seed": 2**70}, "seed"), ({"seed": "x"}, "seed"), ({"n": 0}, "n"), ({"n": 100000}, "n"), ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": True}, "max_tokens"), ({"stop": ""}, "stop"), ({"stop": [""]}, "stop"), ({"stop": ["x"] * 17}, "stop"), ({"stop": ["x" * 600]}, "stop"), ({"stop": 3}, "stop"),
    ({"top_logprobs": 3}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"logprobs": 3}, "logprobs"), ({"stream_options": {}}, "stream_options"), ({"min_tokens": 10**9}, "min_tokens"),
    ({"messages": []}, "messages"), ({"messages": None}, "messages"), ({"messages": "hi"}, "messages"), ({"messages": [{"role": "god", "content": "x"}]}, "messages"), ({"messages": [{"content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"), ({"messages": [{"role": "user", "content": 3}]}, "messages"),
    ({"messages": [{"role": "user", "content": []}]}, "messages"), ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ({"messages": [{"role": "system"}, *HI]}, "messages"), ({"messages": [{"role": "assistant", "content": []}, *HI]}, "messages"),
    ({"messages": [*HI, {"role": "system", "content": "x"}]}, "messages"), ({"tools": [{"type": "function"}]}, "tools"), ({"tools": [{"type": "web"}]}, "tools"), ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"), ({"tool_choice": "perhaps"}, "tool_choice"),
    ({"response_format": {"type": "json_schema"}}, "response_format"), ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "(("}}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}}, "response_format"), ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "regex", "pattern": "a" * 300_000}}, "response_format"), ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://localhost:1/x"}}}}, "response_format"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"), ({"priority": 10**6}, "priority"), ({"continue_final_message": True}, "messages")])
def test_a_wrong_field_is_named(stage, body, param):
    refused(stage.chat(**body), param=param)
    assert stage.chat().json()["choices"][0]["message"]["content"] == "Hello there."


@pytest.mark.parametrize("body", [
    {}, {"temperature": None, "top_p": None, "seed": None, "stop": None, "tools": None, "tool_choice": None}, {"temperature": 0}, {"temperature": 1e-8}, {"temperature": 2}, {"top_p": 0}, {"top_k": -1}, {"top_k": 10**6},
    {"min_p": 1}, {"seed": -1}, {"tools": []}, {"tools": [TOOL]}, {"tools": [{"type": "function", "function": {"name": "f", "strict": None, "description": None, "parameters": None}}]}, {"tool_choice": "none"}, {"max_tokens": 10**9},
    {"unknown_field": {"x": 1}}, {"messages": [{"role": "user", "content": ""}]}, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, {"user": "me"}, {"response_format": {"type": "text"}},
    {"messages": [{"role": "developer", "content": "x"}, *HI]}])
def test_what_may_be_asked_is_answered(stage, body):
    assert stage.chat(**body).json()["choices"][0]["message"]["content"] == "Hello there."


@pytest.mark.parametrize("content, kind", [
    (b"[]", "application/json"), (b'"x"', "application/json"), (b"null", "application/json"), (b"{", "application/json"), (b"", "application/json"), (b"[" * 500_000, "application/json"),
    (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}', "application/json"), (b'{"messages": [{"role": "user", "content": "hi"}]}', "text/plain"), (b"\xff\xfe", "application/json"),
    (b'{"messages": ' + b'[{"a":' * 2000 + b"1" + b"}]" * 2000 + b"}", "application/json")])
def test_a_body_that_is_no_request_is_a_400(stage, content, kind):
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize"):
        if path == "/tokenize" and b"NaN" in content:
            continue                                 # a field that it does not know
        r = stage.http.post(path, content=content, headers={"content-type": kind})
        assert r.status_code == 400, (path, r.status_code, r.text[:200])
        assert r.json()["error"]["message"] and "Traceback" not in r.text


@pytest.mark.parametrize("prompt", [[0, 2**40], [-1], [], [[1], []], [1, "a"], None, {"a": 1}, [[]], "", [True]])
def test_prompts_of_wrong_ids_are_refused(stage, prompt):
    refused(stage.post("/v1/completions", prompt=prompt), param="prompt")


def test_a_prompt_over_the_context_is_refused_with_the_numbers(make_stage):
    stage = make_stage(context=64)
    for n in (63, 64, 65, 1000):
        r = stage.post("/v1/completions", prompt=[5] * n, max_tokens=10**9)
        if n < 64:
            assert r.json()["choices"][0]["finish_reason"] in ("length", "stop")
        else:
            e = refused(r, param="prompt", words=str(n))
            assert e["code"] == "context_length_exceeded" and "64" in e["message"]
    secret = "The word is swordfish. " + "x " * 200
    assert refused(stage.chat(messages=[{"role": "user", "content": secret}]))["code"] == "context_length_exceeded"


def test_large_bodies_and_wrong_keys_are_refused_before_they_are_read(make_stage):
    stage = make_stage(settings=Settings(keys=("secret", "other"), max_body_bytes=10_000))
    refused(stage.chat(), 401, words="API key")
    refused(stage.http.post("/v1/chat/completions", json={}, headers={"Authorization": "Bearer wrong"}), 401)
    for headers in ({"Authorization": "Bearer secret"}, {"x-api-key": "other"}):
        assert stage.http.post("/v1/chat/completions", json={"messages": HI}, headers=headers).status_code == 200
    key = {"Authorization": "Bearer secret"}
    refused(stage.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x" * 20_000}]}, headers=key), 413)
    chunks = (b"x" * 1000 for _ in range(100))
    refused(stage.http.post("/v1/chat/completions", content=chunks, headers=key), 413)
    assert stage.http.get("/health").status_code == 200 and stage.http.get("/metrics").status_code == 401
    assert stage.http.post("/v1/messages", json={}).json() == {"type": "error", "error": {"type": "authentication_error", "message": "a valid API key is needed: Authorization: Bearer KEY, or x-api-key"}}


def test_a_template_s_refusals_do_not_hurt_others(stage):
    bad = [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]
    for _ in range(50):
        assert "System message must come first." in refused(stage.chat(messages=bad))["message"]
    assert stage.chat().status_code == 200 and stage.http.get("/v1/models").status_code == 200
    stage.until_idle()


def test_repairs_of_conversations_are_asked_for(make_stage):
    stage = make_stage(settings=Settings(merge=frozenset({"system", "consecutive"})))
    r = stage.chat(messages=[{"role": "user", "content": "a"}, {"role": "system", "content": "s"}, {"role": "user", "content": "b"}])
    assert r.status_code == 200
    assert stage.tok.decode(stage.asked[-1].prompt, True).startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na\n\nb<|im_end|>")


def test_a_full_house_is_a_429_at_once(make_stage):
    stage = make_stage(limits=Limits(max_batch=1), most=3)
    stage.says = Script((*stage.tok.encode("a b c d e f"), 2), delay_s=0.1)
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        found = list(pool.map(lambda _: stage.chat(), range(10)))
    full = [r for r in found if r.status_code == 429]
    assert len(full) == 7 and all(r.headers["retry-after"] and r.elapsed.total_seconds() < 3 for r in full)
    assert sum(r.status_code == 200 for r in found) == 3
    stage.until_idle()


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_frees_its_place(make_stage, streamed):
    stage = make_stage(limits=Limits(max_batch=1))
    stage.says = Script((*stage.tok.encode("a b c d e f g h i j k l m n o p q r s t u v w x y z"), 2), delay_s=0.05)
    body = json.dumps({"messages": HI, "stream": streamed, "ignore_eos": True, "max_tokens": 400}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    clients = [socket.create_connection(("127.0.0.1", stage.port)) for _ in range(3)]        # one decodes, two wait
    for c in clients:
        c.sendall(head + body)
    end = time.monotonic() + 10
    while stage.relay.active < 3 or not stage.asked:
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.3)
    for c in clients:
        c.close()
    stage.until_idle(3)
    assert stage.engine.stats().aborted == 3 and stage.engine.stats().pages_held == 0


def test_nan_ends_one_request_and_not_the_others(stage):
    def says(request):
        if request.sampling.seed == 666:
            return Script((5, 6, 7, 2), fault_at=2)
        return Script((*stage.tok.encode("Hello there."), 2))
    stage.says = says
    assert stage.chat(seed=666).status_code == 503
    events = stage.events(seed=666)
    assert "error" in events[-2] and events[-1] == "[DONE]"
    assert stage.chat().json()["choices"][0]["message"]["content"] == "Hello there."


def test_a_failed_engine_is_told_by_health(make_stage):
    stage = make_stage()
    stage.says = Script((5, 6, 2), fault_at=1, fault=EngineFailed("the team is lost", layer=3))
    assert stage.chat().status_code == 503
    end = time.monotonic() + 5
    while stage.http.get("/health").status_code == 200:
        assert time.monotonic() < end
    assert "team is lost" in stage.http.get("/health").json()["error"]["message"]
    refused(stage.chat(), 503)


def test_health_answers_while_others_misbehave(stage):
    """Two megabytes to tokenize, a large enum, many stops, deep nesting: beside them the loop keeps answering."""
    bodies = [{"messages": [{"role": "user", "content": "word " * 400_000}]}, {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [str(i) for i in range(10_000)]}}}},
              {"messages": HI, "stop": ["x"] * 10_000}, {"messages": HI, "n": 100_000}, {"messages": HI, "response_format": {"type": "regex", "pattern": "(a*)*b" * 1000}},
              {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "array", "minItems": 10**6, "items": {"type": "object"}}}}}]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(stage.chat, max_tokens=2, **b) for b in bodies]
        asked = 0
        while not all(j.done() for j in jobs):
            assert stage.http.get("/health").status_code == 200
            asked += 1
    assert asked > 10 and all(j.result().status_code in (200, 400) for j in jobs), [j.result().text[:200] for j in jobs]


def test_schemas_that_compile_slowly_do_not_hold_up_a_plain_request(make_stage, monkeypatch):
    """More of them than there are threads, none of which ends before the plain request has its answer."""
    stage, gate = make_stage(), threading.Event()
    monkeypatch.setattr(stage.seat.loaded.texts.checker, "check", lambda *_: gate.wait(60))
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        jobs = [pool.submit(stage.chat, response_format={"type": "json_object"}, max_tokens=1) for _ in range(5)]
        try:
            assert stage.chat().json()["choices"][0]["message"]["content"] == "Hello there."
            assert not any(j.done() for j in jobs)
        finally:
            gate.set()
        assert all(j.result().status_code == 200 for j in jobs)


def test_a_client_that_leaves_while_its_prompt_is_read_frees_its_place(make_stage, monkeypatch):
    stage = make_stage(limits=Limits(max_batch=2, chunk_tokens=8))
    run = stage.engine.runner.run

    def slow(work):
        time.sleep(0.02)
        return run(work)
    monkeypatch.setattr(stage.engine.runner, "run", slow)
    body = json.dumps({"prompt": [300 + i for i in range(400)], "max_tokens": 5}).encode()
    with socket.create_connection(("127.0.0.1", stage.port)) as client:
        client.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        end = time.monotonic() + 20
        while not stage.engine.count.prefill_tokens:
            assert time.monotonic() < end
            time.sleep(0.01)
    stage.until_idle(20)
    stats = stage.engine.stats()
    assert stats.aborted == 1 and stats.pages_held == 0 and 0 < stats.prefill_tokens < 400 and stats.decode_tokens == 0


def test_each_of_several_ends_is_in_the_count_and_in_no_text(stage):
    """Tokens, log-probabilities and text stay in step at whichever id ends the answer."""
    for last in (stage.tok.encode("a")[0], stage.tok.encode("b")[0], 2):
        stage.says = Script((*stage.tok.encode("Hi 😀"), last))
        body = {"stop_token_ids": [stage.tok.encode("a")[0], stage.tok.encode("b")[0]], "logprobs": True, "max_tokens": 30}
        r = stage.chat(**body).json()
        entries = r["choices"][0]["logprobs"]["content"]
        assert r["choices"][0]["message"]["content"] == "Hi 😀" and r["choices"][0]["finish_reason"] == "stop" and r["usage"]["completion_tokens"] == len(entries)
        assert b"".join(bytes(e["bytes"]) for e in entries).decode() == "Hi 😀"
        streamed = [e for c in stage.events(**body)[:-1] for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert [e["bytes"] for e in streamed] == [e["bytes"] for e in entries]


@pytest.mark.parametrize("form, body, text", [
    (CompletionRequest, {"prompt": 3}, "prompt: Input should be a valid string, or Input should be a valid list"),
    (CompletionRequest, {"prompt": "x", "stop": 5}, "stop: Input should be a valid string, or Input should be a valid list"),
    (ChatRequest, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content: Input should be a valid string, or Input should be a valid list"),
    (ChatRequest, {"messages": HI, "tool_choice": 5}, "tool_choice: Input should be 'none', 'auto' or 'required', or Input should be a valid dictionary"),
])
def test_what_is_wrong_is_said_by_field_without_names_of_ours(form, body, text):
    with pytest.raises(ValidationError) as found:
        form.model_validate(body)
    assert str(fault(found.value.errors())).startswith(text)


@pytest.mark.parametrize("form, body", [
    (CompletionRequest, {"prompt": ["a", 1] * 5000}), (CompletionRequest, {"prompt": [[1, "a", "b"] * 5000] * 9}), (DetokenizeRequest, {"tokens": ["a"] * 5000}),
    (ChatRequest, {"messages": [{}] * 5000}), (ChatRequest, {"messages": [{"role": "user", "content": [3] * 4000}]}),
    (MessagesRequest, {"max_tokens": 1, "messages": [{"role": "user", "content": [3] * 5000}] * 9}),
])
def test_a_body_of_millions_of_faults_is_refused_at_the_first(form, body):
    """All of them were listed, on the event loop: three seconds for 14 MiB."""
    with pytest.raises(ValidationError) as caught:
        form.model_validate(body)
    assert caught.value.error_count() <= 8


@pytest.mark.parametrize("path, body", [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}), ("/v1/completions", {"prompt": "Once", "echo": True}),
    ("/v1/messages", {"messages": HI, "max_tokens": 9, "system": [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}]}),
    ("/v1/responses", {"input": [{"role": "user", "content": "hi"}], "instructions": "be kind", "metadata": {"a": "b"}}), ("/tokenize", {"content": "one two"}), ("/detokenize", {"tokens": [5, 6]}),
    ("/apply-template", {"messages": HI}), ("/v1/messages/count_tokens", {"messages": HI}),
    ("/v1/chat/completions", {"messages": HI, "temperature": -1}), ("/v1/chat/completions", {"messages": HI, "model": "other"}), ("/v1/completions", {"prompt": [1, "a"]}), ("/tokenize", {}),
    ("/v1/chat/completions", {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}}),
])
def test_a_large_body_is_answered_as_a_small_one(stage, path, body):
    """Read in a process of its own; only ids and times differ. White space makes it large."""
    def timeless(found):
        drop = {"id", "created", "created_at", "timings", "cache_miss", "prompt_tokens_details", "seed", "usage"}
        return {k: timeless(v) for k, v in found.items() if k not in drop} if isinstance(found, dict) else [timeless(v) for v in found] if isinstance(found, list) else found
    small = stage.http.post(path, json=body)
    large = stage.http.post(path, content=json.dumps(body).encode() + b" " * LARGE_BYTES, headers={"content-type": "application/json"})
    assert (large.status_code, timeless(large.json())) == (small.status_code, timeless(small.json()))
    if small.status_code == 200 and path.startswith("/v1/") and "count" not in path:
        streams = [stage.http.post(path, content=json.dumps({**body, "stream": True}).encode() + b" " * more, headers={"content-type": "application/json"}).text for more in (0, LARGE_BYTES)]
        kinds = [[list(json.loads(line[6:])) for line in s.splitlines() if line.startswith("data: {")] for s in streams]
        assert kinds[0] == kinds[1]


@pytest.mark.parametrize("content", [b"{" + b" " * LARGE_BYTES, b"[" * 500_000, b"\xff" * 500_000, b"[" + b"{}," * 100_000 + b"{}]"])
def test_a_large_body_that_is_no_request_is_a_400(stage, content):
    for path in ("/v1/chat/completions", "/v1/messages", "/tokenize"):
        r = stage.http.post(path, content=content, headers={"content-type": "application/json"})
        assert r.status_code == 400 and r.json()["error"]["message"] and "Traceback" not in r.text, r.text[:200]


def test_a_body_without_a_length_is_as_long_as_it_is(stage, monkeypatch):
    """Chunked, 100 kB: it is prepared where long ones are, and one of a megabyte is read apart."""
    seen = []
    off = Desk.off

    async def noted(self, work, *args, pool=None):
        seen.append(pool)
        return await off(self, work, *args, pool=pool)
    monkeypatch.setattr(Desk, "off", noted)
    for size, pool in ((10, "prepare"), (100_000, "prepare-long"), (1_000_000, "read")):
        body = json.dumps({"messages": HI, "unknown": "x" * size}).encode()
        assert stage.http.post("/v1/chat/completions", content=iter([body[:50], body[50:]]), headers={"content-type": "application/json"}).status_code == 200
        assert seen.pop(0)._thread_name_prefix == pool
        seen.clear()


def test_the_loop_is_free_while_large_bodies_are_read(stage):
    """Held here while the body is being read: it was the loop that read it. Bodies of 14 MiB, valid and in millions of items."""
    bodies = [{"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 400}] * 1000}, {"prompt": [5] * 4_500_000}]
    for body, path in zip(bodies, ("/v1/chat/completions", "/v1/completions"), strict=True):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            job, asked = pool.submit(stage.http.post, path, json=body), 0
            while not job.done():
                assert stage.http.get("/health").status_code == 200
                asked += 1
        assert job.result().status_code == 400 and asked > 20
    assert "400000 content parts" in stage.post("/v1/chat/completions", **bodies[0]).json()["error"]["message"]


def test_too_many_large_bodies_at_once_are_a_429(stage, monkeypatch):
    monkeypatch.setattr("hetero.serve.app.MOST_LARGE", 0)
    assert refused(stage.chat(unknown="x" * LARGE_BYTES), 429)["type"] == "rate_limit_error"


@pytest.mark.parametrize("body, text", [
    ({"prompt": [1, "a"]}, "prompt.1: Input should be a valid integer"), ({"prompt": ["a", 1]}, "prompt.1: Input should be a valid string"), ({"prompt": [[1], [2, "x"]]}, "prompt.1.1: Input should be a valid integer"),
    ({"prompt": [[1], "x"]}, "prompt.1: Input should be a valid list"), ({"prompt": {"a": 1}}, "prompt: Input should be a valid string, or"), ({"prompt": [[1], [5, 2**40]]}, "prompt.1: "),
    ({"prompt": ["a", ""]}, "prompt.1: ")])
def test_a_prompt_that_is_wrong_in_every_form_names_the_item(stage, body, text):
    assert refused(stage.post("/v1/completions", **body), param="prompt")["message"].startswith(text)


def test_a_body_that_is_no_json_says_where(stage):
    for size in (0, LARGE_BYTES):
        r = stage.http.post("/v1/completions", content=b'{"prompt": ' + b" " * size + b"}", headers={"content-type": "application/json"})
        assert refused(r, words=f"from character {11 + size} on")["param"] is None
