"""Reasoning and calls of every family, whole and in any pieces, cut anywhere: the same message, nothing lost."""
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.errors import BadOption
from hetero.text import formats
from hetero.text.formats import FORMATS, detect
from hetero.text.parse import open_header, opens_thinking, parser
from hetero.text.stream import Stream

TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}, "deep": {"type": "object"}}}}},
         {"type": "function", "function": {"name": "stop"}}]
ARGS = {"city": 'Zür"ich\n</x>😀', "n": 3, "deep": {"a": ["}", {"b": None}]}}
J = json.dumps(ARGS, ensure_ascii=False)
DS, KI = formats.DEEPSEEK, formats.KIMI


def xml(f):
    c = FORMATS[f].calls
    return "".join(f"{c.key}{k}{c.key_end}{c.value}" + (v if isinstance(v, str) else json.dumps(v)) + c.value_end for k, v in ARGS.items())


# format -> (an answer with reasoning, content, and two calls)
ANSWERS = {
    "hermes": f'<think>\nwhy "x"\n</think>\n\nLet me see.\n<tool_call>\n{{"name": "get", "arguments": {J}}}\n</tool_call>\n<tool_call>\n{{"arguments": {{}}, "name": "stop"}}\n</tool_call>',
    "json": '<think>why "x"</think>Let me see.',
    "qwen3_coder": f'<think>\nwhy "x"\n</think>\nLet me see.\n\n<tool_call>\n<function=get>\n{xml("qwen3_coder")}</function>\n</tool_call>\n<tool_call>\n<function=stop>\n</function>\n</tool_call>',
    "glm4": f'\n<think>why "x"</think>\nLet me see.\n<tool_call>get\n{xml("glm4")}</tool_call>\n<tool_call>stop\n</tool_call>',
    "deepseek_v3": f'<think>why "x"</think>Let me see.{DS[0]}{DS[1]}function{DS[2]}get\n```json\n{J}\n```{DS[3]}\n{DS[1]}function{DS[2]}stop\n```json\n{{}}\n```{DS[3]}{DS[4]}',
    "deepseek_v31": f'<think>why "x"</think>Let me see.{DS[0]}{DS[1]}get{DS[2]}{J}{DS[3]}{DS[1]}stop{DS[2]}{{}}{DS[3]}{DS[4]}',
    "kimi_k2": f'<think>why "x"</think>Let me see.{KI[0]}{KI[1]}functions.get:0{KI[2]}{J}{KI[3]}{KI[1]}functions.stop:1{KI[2]}{{}}{KI[3]}{KI[4]}',
    "harmony": f'<|channel|>analysis<|message|>why "x"<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>{J}<|call|><|start|>assistant to=functions.stop<|channel|>commentary<|message|>{{}}<|call|>',
    "mistral": f'[THINK]why "x"[/THINK]Let me see.[TOOL_CALLS]get[ARGS]{J}[TOOL_CALLS]stop[ARGS]{{}}',
    "minimax_m2": f'<think>\nwhy "x"\n</think>\n\nLet me see.\n<minimax:tool_call>\n<invoke name="get">\n{xml("minimax_m2")}</invoke>\n<invoke name="stop">\n</invoke>\n</minimax:tool_call>',
}


@pytest.fixture(scope="module")
def toks(make_tok):
    """One tokenizer per format whose markers are special, and one where they are plain text."""
    return {name: (make_tok(specials=formats.markers(f)), make_tok(specials=["<|im_end|>"])) for name, f in FORMATS.items()}


def parse(tok, name, text, cuts=(), tools=TOOLS, prompt="", finish="stop"):
    """The message, and the events, of a text given in pieces."""
    machine, stream, ids = parser(tok, FORMATS[name], prompt, tools), Stream(tok), tok.encode(text)
    events = []
    for n, i in enumerate(ids):
        stream.see(i)
        if n in cuts or not cuts:
            events += machine.feed(stream.take())
    events += machine.feed(stream.take() + stream.finish()) + machine.finish()
    return machine.message, events


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("name", ANSWERS)
def test_every_family_s_answer_is_understood(toks, name, special):
    message, events = parse(toks[name][not special], name, ANSWERS[name])
    assert message.reasoning == 'why "x"' and message.content == "Let me see."
    if name == "json":
        return
    assert [(c.name, json.loads(c.arguments), c.whole) for c in message.calls] == [("get", ARGS, True), ("stop", {}, True)]
    assert message.finish_reason("stop") == "tool_calls" and message.finish_reason("length") == "length"
    assert len({c.id for c in message.calls}) == 2 and all(c.id for c in message.calls)
    assert [e.index for e in events if e.kind == "call"] == [0, 1]
    if name not in ("json",):
        assert sum(e.kind == "arguments" and e.index == 0 for e in events) > 3           # arguments arrive in parts


@given(data=st.data())
def test_any_pieces_and_any_end_give_one_message(toks, data):
    name = data.draw(st.sampled_from(sorted(ANSWERS)))
    tok = toks[name][data.draw(st.booleans())]
    text = ANSWERS[name][: data.draw(st.integers(0, len(ANSWERS[name])))]
    cuts = data.draw(st.frozensets(st.integers(0, len(text)), max_size=8)) or {-1}
    whole, _ = parse(tok, name, text, cuts={-1})
    message, events = parse(tok, name, text, cuts=cuts)
    strip = lambda m: (m.reasoning, m.content, [(c.name, c.arguments, c.whole) for c in m.calls])  # noqa: E731
    assert strip(message) == strip(whole)
    if any(not c.whole for c in message.calls):
        assert message.finish_reason("stop") == "stop"
    sum_ = type(message)()
    sum_.add(events)
    assert strip(sum_) == strip(message)


@pytest.mark.parametrize("name, text, calls, content", [
    ("hermes", 'Hello <tool_call>{"name": "', [], 'Hello <tool_call>{"name": "'),
    ("hermes", 'a <tool_call>not json</tool_call> b', [], 'a <tool_call>not json</tool_call> b'),
    ("hermes", '<tool_call>{"name": "get", "arguments": {"n": 1', [("get", '{"n": 1', False)], ""),
    ("hermes", '<tool_call>{"name": "get", "arguments": "{\\"n\\": 1}"}</tool_call>', [("get", '{"n": 1}', True)], ""),
    ("hermes", '<tool_call>{"name": "get", "arguments": {"n": 1}}<tool_call>{"name": "stop"}</tool_call>', [("get", '{"n": 1}', True), ("stop", "{}", True)], ""),
    ("json", '{"name": "get", "parameters": {"n": 1}}', [("get", '{"n": 1}', True)], ""),
    ("json", ' [{"name": "get", "arguments": {"n": 1}}, {"name": "stop"}]', [("get", '{"n": 1}', True), ("stop", "{}", True)], ""),
    ("json", '{"nam', [], '{"nam'), ("json", '{"answer": 42}', [], '{"answer": 42}'), ("json", '{"name": "get", "age": 3}', [], '{"name": "get", "age": 3}'),
    ("mistral", '[TOOL_CALLS][{"name": "get", "arguments": {"n": 1}}, {"name": "stop", "arguments": {}}]', [("get", '{"n": 1}', True), ("stop", "{}", True)], ""),
    ("mistral", "[TOOL_CALLS]get", [], "[TOOL_CALLS]get"),
    ("qwen3_coder", "<function=get>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>", [("get", '{"n": 3}', True)], ""),
    ("qwen3_coder", "<tool_call>\n<function=get>\n<parameter=city>\nA\n\nB\n</parameter>\n<parameter=n>\nmany", [("get", '{"city": "A\\n\\nB", "n": ', False)], ""),
    ("qwen3_coder", "see <tool_call>\n<func", [], "see <tool_call>\n<func"),
    ("qwen3_coder", "<tool_call>\n<function=get>\n<parameter=n>\nTrue\n</parameter>\n<parameter=deep>\n[1]</parameter></function></tool_call>", [("get", '{"n": true, "deep": [1]}', True)], ""),
    ("harmony", "<|channel|>final<|message|>Hi", [], "Hi"), ("harmony", "plain words", [], "plain words"),
    ("hermes", "a < b <tool", [], "a < b <tool"), ("hermes", "x \n\n", [], "x \n\n"),
])
def test_what_is_cut_or_broken_is_never_lost(toks, name, text, calls, content):
    for tok in toks[name]:
        message, _ = parse(tok, name, text)
        assert [(c.name, c.arguments, c.whole) for c in message.calls] == calls
        assert message.content == content


def test_without_tools_a_call_is_plain_text(toks):
    text = '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
    assert parse(toks["hermes"][1], "hermes", text, tools=None)[0].content == text
    assert parse(toks["hermes"][0], "hermes", "a</tool_call>b", tools=None)[0].content == "ab"      # special tokens stay hidden


@pytest.mark.parametrize("text, reasoning, content", [("abc</think>x", "abc", "x"), ("abc", "abc", ""), ("abc</thi", "abc</thi", ""), ("\n\nabc\n\n</think>\n\n x", "abc", "x")])
def test_an_opening_tag_in_the_prompt_starts_inside_reasoning(toks, text, reasoning, content):
    for tok in toks["hermes"]:
        message, _ = parse(tok, "hermes", text, prompt="<|im_start|>assistant\n<think>\n")
        assert (message.reasoning, message.content) == (reasoning, content)


def test_the_prompt_s_end_decides_where_an_answer_starts(toks):
    tok, f = toks["hermes"][1], FORMATS["hermes"]
    for prompt, inside in (("assistant\n<think>\n", True), ("assistant\n<think>\n\n</think>\n\n", False), ("assistant\n<think>\nSo far", True), ("a <think> here<|im_end|>\nassistant\n", False), ("assistant\n", False)):
        assert opens_thinking(f, prompt, tok) == inside
    assert open_header(FORMATS["harmony"], "x<|start|>assistant") == ""
    assert parse(toks["harmony"][0], "harmony", "more", prompt="<|start|>assistant<|channel|>final<|message|>Some ")[0].content == "more"


def test_a_tag_in_the_middle_of_an_answer_is_text(toks):
    message, _ = parse(toks["hermes"][1], "hermes", "Use <think> tags </think> so", tools=None)
    assert message.reasoning == "" and message.content == "Use <think> tags </think> so"


def test_a_call_marker_ends_reasoning_where_it_cannot_be_text(toks):
    message, _ = parse(toks["kimi_k2"][0], "kimi_k2", f"<think>why{KI[0]}{KI[1]}functions.stop:4{KI[2]}{{}}{KI[3]}{KI[4]}")
    assert message.reasoning == "why" and [(c.id, c.name) for c in message.calls] == [("functions.stop:4", "stop")]


@pytest.mark.parametrize("template, name", [
    ("<|start|>assistant<|channel|>final", "harmony"), ("<tool_call>\n<function=example>", "qwen3_coder"), ("<tool_call>{name}\n<arg_key>", "glm4"), ("<tool_call>\n{", "hermes"),
    (f"{DS[0]}{DS[2]}\n```json", "deepseek_v3"), (f"{DS[0]}{DS[2]}", "deepseek_v31"), (KI[0], "kimi_k2"), ("[TOOL_CALLS]", "mistral"), ("<minimax:tool_call>", "minimax_m2"), ("{{ messages }}", "json")])
def test_the_template_tells_the_format(template, name):
    assert detect(template).name == name


def test_formats_are_known_by_name():
    assert formats.named("glm4").name == "glm4"
    with pytest.raises(BadOption, match="glm9"):
        formats.named("glm9")
    assert len(FORMATS["mistral"].new_id()) == 9 and FORMATS["hermes"].new_id().startswith("call_")
