"""Constraints hold for every token, are refused when they cannot, and end when they take too long."""
import json
import random

import jsonschema
import numpy as np
import pytest

from hetero.errors import BadRequest
from hetero.text import formats, grammar
from hetero.text.calls import Calls
from hetero.text.formats import FORMATS
from hetero.text.grammar import AfterReasoning, Checker, Vocabulary
from hetero.text.parse import parser
from hetero.text.stream import Stream

TREE = {"$defs": {"n": {"type": "object", "properties": {"v": {"type": "integer"}, "c": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/n"}}}, "required": ["v"], "additionalProperties": False}}, "$ref": "#/$defs/n"}
MIXED = {"type": "object", "properties": {"x": {"type": "array", "maxItems": 3, "items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}, "y": {"$ref": "#/properties/x/items/anyOf/0"},
                                          "e": {"enum": ["a", 1, None]}, "s": {"type": ["string", "null"], "maxLength": 5}, "d": {"type": "string", "format": "date"}, "p": {"type": "string", "pattern": "^[ab]{1,3}$"}},
         "required": ["x", "y", "e", "s", "d", "p"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}, "unit": {"type": "string", "enum": ["C", "F"]}}, "required": ["city", "n"], "additionalProperties": False}}},
         {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}}]


@pytest.fixture(scope="module")
def vocabulary(tok):
    return Vocabulary(tok, tok.size)


def allowed(mask, size):
    return np.nonzero(np.unpackbits(np.asarray(mask.allowed(), np.uint32).view(np.uint8), bitorder="little")[:size])[0].tolist()


def walk(mask, tok, size, rng, most=400):
    """A random text under a mask, and whether it ended by itself. Short tokens and ends are preferred, so that most walks end."""
    ids = []
    for _ in range(most):
        may = allowed(mask, size)
        ends = [i for i in may if i in tok.ends()]
        if ends and (rng.random() < 0.3 or len(may) == len(ends)):
            return ids, True
        others = [i for i in may if i not in tok.ends()]
        assert others, "a mask that allows nothing"
        closing = [i for i in others if tok.bytes_of(i)[:1] in (b'"', b"}", b"]", b"<")]
        choice = rng.choice(closing if closing and rng.random() < 0.4 else others)
        mask.accept(choice)
        ids.append(choice)
    return ids, False


@pytest.mark.parametrize("schema", [TREE, MIXED, {}, True, {"type": "object"}], ids=["tree", "mixed", "empty", "true", "object"])
def test_random_answers_validate(vocabulary, tok, schema):
    rng, done = random.Random(0), 0
    for _ in range(10):
        ids, ended = walk(vocabulary.mask(grammar.from_schema(schema)), tok, tok.size, rng)
        if ended:
            jsonschema.validate(json.loads(tok.decode(ids)), schema)
            done += 1
    assert done >= 3


@pytest.mark.parametrize("made, good, bad", [
    (lambda: grammar.from_regex("[0-9]{3}"), "123", "12a"), (lambda: grammar.from_choice(["yes", "no \"x\""]), 'no "x"', "maybe"),
    (lambda: grammar.from_lark('start: "a" /b+/'), "abb", "ba"), (lambda: grammar.from_schema({"type": "string", "pattern": "^a\\!$"}), '"a!"', '"a"')])
def test_each_kind_allows_what_it_says(vocabulary, tok, made, good, bad):
    for text, want in ((good, True), (bad, False)):
        mask, ok = vocabulary.mask(made()), True
        for i in tok.encode(text):
            ok = ok and i in allowed(mask, tok.size)
            mask.accept(i)
        assert (ok and bool(set(allowed(mask, tok.size)) & tok.ends())) == want


def test_white_space_is_bounded(vocabulary, tok):
    mask = vocabulary.mask(grammar.from_schema(MIXED))
    for i in tok.encode('{"x":\n\n'):
        mask.accept(i)
    assert not any(tok.bytes_of(i).strip() == b"" for i in allowed(mask, tok.size))


@pytest.mark.parametrize("schema, words", [
    ({"type": "string", "pattern": "(("}, "regex"), ({"$ref": "http://example.com/x.json"}, "example.com"), ({"uniqueItems": True, "type": "array"}, "uniqueItems"), ({"not": {}}, "not"),
    ({"type": "string", "format": "foo"}, "foo"), ([], "object"), (False, "object"), ("x", "object"), ({"type": "nonsense"}, "nonsense")])
def test_what_cannot_be_enforced_is_refused_by_name(vocabulary, schema, words):
    with pytest.raises(BadRequest, match=words) as caught:
        vocabulary.mask(grammar.from_schema(schema))
    assert caught.value.param == "response_format" and "\n" not in caught.value.message


def test_sizes_are_limited():
    deep = {}
    for _ in range(100):
        deep = {"items": deep}
    for make in (lambda: grammar.from_schema(deep), lambda: grammar.from_schema({"enum": ["x" * 300_000]}), lambda: grammar.from_regex("a" * 300_000), lambda: grammar.from_choice([]),
                 lambda: grammar.from_choice(["a"] * 5000)):
        with pytest.raises(BadRequest):
            make()


def test_a_failed_mask_allows_nothing(vocabulary, tok):
    mask = vocabulary.mask(grammar.from_regex("ab"))
    mask.accept(tok.encode("x")[0])
    assert allowed(mask, tok.size) == []


def test_a_fork_goes_its_own_way(vocabulary, tok):
    mask = vocabulary.mask(grammar.from_choice(["ab", "cd"]))
    twin = mask.fork()
    mask.accept(tok.encode("a")[0])
    assert tok.encode("d")[0] not in allowed(mask, tok.size) and tok.encode("c")[0] in allowed(twin, tok.size)


def test_a_constraint_begins_after_reasoning(vocabulary, tok):
    mask = AfterReasoning(vocabulary.mask(grammar.from_choice(["yes"])), tok, tok.size, "</think>")
    assert not set(allowed(mask, tok.size)) & tok.ends() and len(allowed(mask, tok.size)) == tok.size - len(tok.ends())
    twin = mask.fork()
    for i in tok.encode("so {x} </think>\n\n"):
        mask.accept(i)
    assert set(map(tok.bytes_of, allowed(mask, tok.size))) <= {b"y", b"ye", b"yes"}
    assert len(allowed(twin, tok.size)) > 8000


def test_reasoning_may_come_first_or_not_at_all(vocabulary, tok):
    for first, free in ((1, True), (tok.encode("yes")[0], False)):
        mask = AfterReasoning(vocabulary.mask(grammar.from_choice(["yes"])), tok, tok.size, "</think>", may_open=1)
        assert first in allowed(mask, tok.size) and not set(allowed(mask, tok.size)) & tok.ends()
        mask.accept(first)
        assert (len(allowed(mask, tok.size)) > 8000) == free


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
def test_forced_calls_are_calls_that_validate(make_tok, name, special):
    marks = [m for m in formats.markers(FORMATS[name]) if len(m) > 1]
    tok = make_tok(specials=[*(marks if special else []), "<|im_end|>"], plain=[] if special else marks, ends=["<|im_end|>"])
    vocabulary, rng, whole = Vocabulary(tok, tok.size), random.Random(1), 0
    for round in range(8):
        tools = TOOLS if round % 2 else TOOLS[:1]
        mask = vocabulary.mask(Calls(tok, FORMATS[name], tools).required(parallel=round < 4), "tools")
        ids, ended = walk(mask, tok, tok.size, rng, most=1500)
        if not ended:
            continue
        whole += 1
        machine, stream = parser(tok, FORMATS[name], "", tools), Stream(tok)
        for i in ids:
            stream.see(i)
        machine.feed(stream.take() + stream.finish())
        machine.finish()
        assert machine.message.content == "" and machine.message.finish_reason("stop") == "tool_calls", tok.decode(ids, True)
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in tools}
        for call in machine.message.calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
        assert round < 4 or len(machine.message.calls) == 1
    assert whole >= 3


ALL = {"get", "stop"}
OPENERS = {"harmony": "<|channel|>commentary to=functions.", "json": '{"name": "'}


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
def test_a_call_that_begins_in_free_text_is_a_call_that_validates(make_tok, name, special):
    """The model says what it likes; from the tag that opens a call on the grammar holds, for strict tools with their schema."""
    form = FORMATS[name]
    marks = [m for m in formats.markers(form) if len(m) > 1]
    tok = make_tok(specials=[*(marks if special else []), "<|im_end|>"], plain=[] if special else marks, ends=["<|im_end|>"])
    vocabulary, rng, whole = Vocabulary(tok, tok.size), random.Random(2), 0
    for round in range(12):
        mask = vocabulary.mask(Calls(tok, form, TOOLS, ALL if round % 2 else {"stop"}).offered(parallel=round < 6), "tools")
        opener = OPENERS.get(name) or (form.calls.call if round % 3 == 2 and hasattr(form.calls, "name_end") and form.calls.call else form.calls.open)
        said = tok.encode(("" if name in OPENERS else 'Well <b>, "x" {1}: ') + opener)
        for i in said:
            assert i in allowed(mask, tok.size), tok.decode(said, True)
            mask.accept(i)
        assert not set(allowed(mask, tok.size)) & tok.ends()
        ids, ended = walk(mask, tok, tok.size, rng, most=1500)
        if not ended:
            continue
        machine, stream = parser(tok, form, "", TOOLS), Stream(tok)
        for i in said + ids:
            stream.see(i)
        machine.feed(stream.take() + stream.finish())
        machine.finish()
        calls = machine.message.calls
        assert calls and all(c.whole for c in calls), tok.decode(said + ids, True)
        whole += 1
        for call in calls:
            json.loads(call.arguments)
            if round % 2 or call.name == "stop":
                jsonschema.validate(json.loads(call.arguments), {t["function"]["name"]: t["function"]["parameters"] for t in TOOLS}[call.name])
        assert round < 6 or len(calls) == 1
    assert whole >= 3


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"harmony"}))
def test_text_without_a_call_stays_free(make_tok, name):
    form = FORMATS[name]
    tok = make_tok(specials=[*(m for m in formats.markers(form) if len(m) > 1), "<|im_end|>"], ends=["<|im_end|>"])
    mask = Vocabulary(tok, tok.size).mask(Calls(tok, form, TOOLS, ALL).offered(), "tools")
    for i in tok.encode('Let me <think>: {"a": [1]}\n'):
        if i not in tok.specials:
            assert i in allowed(mask, tok.size)
            mask.accept(i)
    assert set(allowed(mask, tok.size)) & tok.ends()
    if form.ends_thinking:                               # reasoning is part of the same text: a call may end it
        mask.accept(tok.id_of(form.think[0]))
        assert tok.id_of(form.think[1]) in allowed(mask, tok.size) and tok.id_of(form.calls.open) in allowed(mask, tok.size)


def test_with_channels_an_answer_may_think_answer_or_call(make_tok):
    form = FORMATS["harmony"]
    tok = make_tok(specials=formats.markers(form), ends=["<|return|>", "<|call|>"])
    made = Calls(tok, form, TOOLS, ALL).offered()
    thought = "<|channel|>analysis<|message|>Hm <x>.<|end|><|start|>assistant"
    for text, ends in ((thought + "<|channel|>final<|message|>Hello!", {"<|return|>", "<|call|>"}),
                       (thought + '<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}', {"<|call|>"}), ("<|channel|>commentary to=functions.go", None)):
        mask, ok = Vocabulary(tok, tok.size).mask(made, "tools"), True
        for i in tok.encode(text):
            ok = ok and i in allowed(mask, tok.size)
            mask.accept(i)
        assert ok == (ends is not None)
        assert ends is None or {tok.added[i] for i in set(allowed(mask, tok.size)) & tok.ends()} == ends


def test_calls_or_an_answer_of_a_schema(vocabulary, tok):
    made = Calls(tok, FORMATS["hermes"], TOOLS).required(instead={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False})
    for text, want in (('{"a": 3}', True), ('<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>', True), ("Hello", False), ('<tool_call>\n{"name": "go"', False)):
        mask, ok = vocabulary.mask(made), True
        for i in tok.encode(text):
            ok = ok and i in allowed(mask, tok.size)
            mask.accept(i)
        assert (ok and bool(set(allowed(mask, tok.size)) & tok.ends())) == want, text


def test_a_grammar_that_takes_too_long_ends_alone(vocabulary):
    checker = Checker(vocabulary, seconds=20)
    try:
        checker.check(grammar.from_schema(MIXED))
        with pytest.raises(BadRequest, match="uniqueItems"):
            checker.check(grammar.from_schema({"uniqueItems": True}))
        checker.apart.seconds = 0.0
        with pytest.raises(BadRequest, match="more than 0 s"):
            checker.check(grammar.from_schema({"enum": [str(i) for i in range(20000)]}))
        checker.apart.seconds = 20
        checker.check(grammar.from_regex("(a*)*b"))
    finally:
        checker.close()
