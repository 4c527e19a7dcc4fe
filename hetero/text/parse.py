"""An answer's text to reasoning, content and tool calls, as it grows: one machine for streams and whole answers; knows no engine and no network.

The machine is a coroutine that reads from a growing buffer and waits where it must. Text that turns out to be no call comes back as content: nothing
is lost. Its start state is read from the rendered prompt, for a template may already have opened (or closed) the reasoning.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hetero.text import formats
from hetero.text.formats import Bracket, Format, Harmony, Json, Marked, Xml
from hetero.text.scan import Event, Message, Scanner, Waits
from hetero.text.stream import Piece
from hetero.text.tokenizer import Tokenizer

BARE = ('{"name"', '[{"name"')
HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class Parser(Scanner):
    """Pieces in, events out. `tools`: parameter schemas by name, None when the request has no tools (then calls are plain text).

    reasoning: the prompt leaves the answer inside reasoning (see `opens_thinking`).
    """

    def __init__(self, tokenizer: Tokenizer, form: Format, tools: Mapping[str, Mapping[str, Any]] | None = None, reasoning: bool = False,
                 header: str = "") -> None:
        super().__init__(header)
        self.form, self.tools, self.message = form, tools, Message()
        self._tokenizer, self._thinking = tokenizer, reasoning
        self._shown = set(formats.markers(form)) - (set() if tools or isinstance(form.calls, Harmony) else _call_markers(form))
        self._events: list[Event] = []
        self._said, self._gap = False, ""        # content said so far; white space that is content only when more follows
        self._lead = False                       # content follows reasoning: its first white space is dropped
        self._machine = self._harmony() if isinstance(form.calls, Harmony) else self._tagged()

    def feed(self, pieces: Iterable[Piece]) -> list[Event]:
        """Takes what `Stream.take` gave; gives what it means so far."""
        for p in pieces:
            self._buf += p.text if not p.special else self._spell(p.token)
        return self._advance()

    def finish(self) -> list[Event]:
        """The text has ended: what was held comes out."""
        self._ended = True
        return self._advance()

    def _spell(self, token: int) -> str:
        text = self._tokenizer.added.get(token, "")
        return text if text in self._shown else ""

    def _advance(self) -> list[Event]:
        next(self._machine, None)
        if self._ended and self._gap:
            self._emit("content", self._gap)
            self._gap = ""
        joined: list[Event] = []
        for e in self._events:
            last = joined[-1] if joined else None
            if last and e.kind == last.kind and e.index == last.index and e.kind in ("reasoning", "content", "arguments"):
                joined[-1] = Event(e.kind, last.text + e.text, e.index)
            else:
                joined.append(e)
        self._events = []
        self.message.add(joined)
        return joined

    # -- what the machine says --------------------------------------------------------------------------------------------------------------

    def _emit(self, kind: str, text: str, index: int = 0) -> None:
        if text:
            self._events.append(Event(kind, text, index))

    def _content(self, text: str) -> None:
        """Content; white space before a call is not part of it, so with tools it waits for what follows."""
        if self._lead:
            text = text.lstrip()
        if not text:
            return
        self._lead = False
        text = self._gap + text
        bare = text.rstrip() if self.tools else text
        self._gap = text[len(bare):]
        self._said = self._said or bool(bare.strip())
        self._emit("content", bare)

    def _start(self, name: str, id: str = "") -> None:
        self._gap = ""
        self._calls = sum(e.kind == "call" for e in self._events) + len(self.message.calls)
        self._events.append(Event("call", "", self._calls, name, id or self.form.new_id()))

    def _arguments(self, text: str) -> None:
        self._emit("arguments", text, self._calls)

    def _end(self) -> None:
        self._events.append(Event("end", index=self._calls))

    def _whole(self, name: str, arguments: Any) -> None:
        self._start(name)
        self._arguments(json.dumps(arguments, ensure_ascii=False))
        self._end()

    # -- the ways of writing ----------------------------------------------------------------------------------------------------------------

    def _tagged(self) -> Waits:
        """Everything but channels: reasoning between tags, then content with calls in it."""
        calls, think = self.form.calls, self.form.think
        openers = [o for o in _openers(calls) if o] if self.tools else []
        if self._thinking:
            yield from self._reason(openers)
        while True:
            early = [think[0]] if think and not self._said and not self.message.reasoning else []
            if self.tools and isinstance(calls, Json) and not calls.open and not self._said:
                yield from self._bare()
            marker = yield from self._until([*early, *openers], self._content)
            if not marker:
                return
            if think and marker == think[0]:
                if self._said:
                    self._content(marker)
                else:
                    yield from self._reason(openers)
            elif isinstance(calls, Json):
                yield from self._json(calls.open, calls.close)
            elif isinstance(calls, Marked):
                yield from self._marked(calls)
            elif isinstance(calls, Xml):
                yield from self._xml(calls, marker)
            elif isinstance(calls, Bracket):
                yield from self._bracket(calls)

    def _reason(self, openers: list[str]) -> Waits:
        """Reasoning up to its closing tag, without the white space around it."""
        assert self.form.think is not None
        self._gap, state = "", {"said": False, "gap": ""}

        def sink(text: str) -> None:
            text = str(state["gap"]) + (text if state["said"] else text.lstrip())
            bare = text.rstrip()
            state["gap"] = text[len(bare):]
            state["said"] = state["said"] or bool(bare)
            self._emit("reasoning", bare)
        marker = yield from self._until([self.form.think[1], *(openers if self.form.ends_thinking else [])], sink)
        self._lead = True
        if marker and marker != self.form.think[1]:
            self._back(marker)

    def _bare(self) -> Waits:
        """An answer that is one JSON object may be a call as a whole."""
        while not self._buf.strip() and not self._ended:
            yield
        while any(sign.startswith(bare := "".join(self._buf.split())[:len(sign)]) for sign in BARE):
            if bare in BARE or self._ended:
                yield from self._json("", "")
                return
            yield

    def _json(self, open: str, close: str) -> Waits:
        while True:
            if head := HEADER.match(self._buf):
                self._buf = self._buf[head.end():]
                self._start(json.loads(head[1]))
                if (yield from self._value(self._arguments)):
                    self._end()
                _, marker = yield from self._collect(*((close, open) if close else "}"))
                if open and marker == open:
                    self._back(open)
                return
            at = self._buf.find(close) if close else -1
            if at >= 0 or self._ended:
                body, self._buf = (self._buf[:at], self._buf[at + len(close):]) if at >= 0 else (self._buf, "")
                found = _calls(body, strict=not open)
                if found is None:
                    self._content(open + body + (close if at >= 0 else ""))
                for name, arguments in found or []:
                    self._whole(name, arguments)
                return
            yield

    def _marked(self, c: Marked) -> Waits:
        """A section of calls: what lies between them is dropped."""
        while True:
            _, marker = yield from self._collect(c.call, c.close)
            if marker != c.call:
                return
            head, marker = yield from self._collect(c.sep, c.call_end, c.close)
            if marker != c.sep:
                self._content(c.call + head + marker)
                continue
            tail, marker = yield from self._collect("{", c.call_end)
            if marker != "{":
                self._content(c.call + head + c.sep + tail + marker)
                continue
            self._back("{")
            name = (tail.split("\n")[0] if c.fenced else head).strip()
            if c.id_is_name:
                name = name.split(".", 1)[-1].rsplit(":", 1)[0]
            self._start(name, head.strip() if c.id_is_name else "")
            if (yield from self._value(self._arguments)):
                self._end()
            yield from self._collect(c.call_end)

    def _xml(self, c: Xml, opened: str) -> Waits:
        """A call as tags; a name that never ends was no call."""
        raw = opened
        if c.call and opened != c.call:
            gap, marker = yield from self._collect(c.call, c.close)
            raw += gap + marker
            if marker != c.call:
                self._content(raw)
                return
        name, marker = yield from self._collect(c.name_end, *([c.key, c.call_end] if not c.call else []))
        if not marker:
            self._content(raw + name)
            return
        if marker in (c.key, c.call_end):
            self._back(marker)
        self._start(name.strip())
        schema, first = (self.tools or {}).get(name.strip(), {}).get("properties", {}), True
        while True:
            _, marker = yield from self._collect(c.key, c.call_end)
            if marker != c.key:
                break
            key, marker = yield from self._collect(c.key_end)
            if c.value and marker:
                _, marker = yield from self._collect(c.value)
            if not marker:
                return
            self._arguments(("{" if first else ", ") + json.dumps(key.strip(), ensure_ascii=False) + ": ")
            first = False
            if not (yield from self._xml_value(c, schema.get(key.strip(), {}))):
                return
        if marker:
            self._arguments("{}" if first else "}")
            self._end()
            if c.close:
                _, again = yield from self._collect(c.close, c.call)
                if again == c.call:
                    self._back(again)

    def _xml_value(self, c: Xml, schema: Any) -> Waits:
        """One value: text as it comes when the schema says string, else JSON where it is JSON."""
        if _is_text(schema):
            state = {"gap": "", "first": True}

            def sink(text: str) -> None:
                text = str(state["gap"]) + text
                if state["first"] and text:
                    text, state["first"] = text.removeprefix("\n"), False
                state["gap"] = "\n" if text.endswith("\n") else ""
                self._arguments(json.dumps(text.removesuffix("\n"), ensure_ascii=False)[1:-1])
            self._arguments('"')
            marker = yield from self._until([c.value_end], sink)
            if marker:
                self._arguments('"')
            return bool(marker)
        text, marker = yield from self._collect(c.value_end)
        if marker:
            self._arguments(json.dumps(_loose(text.strip("\n"), schema), ensure_ascii=False))
        return bool(marker)

    def _bracket(self, c: Bracket) -> Waits:
        head, marker = yield from self._collect("[{", "[ {", c.args, c.id, "{")
        if marker in ("[{", "[ {") and not head.strip():
            self._back(marker)
            parts: list[str] = []
            yield from self._value(parts.append)
            found = _calls("".join(parts))
            if found is None:
                self._content(c.open + head + "".join(parts))
            for name, arguments in found or []:
                self._whole(name, arguments)
            return
        id = ""
        if marker == c.id:
            id, marker = yield from self._collect(c.args, "{")
        if not marker:
            self._content(c.open + head)
            return
        if marker == "{":
            self._back("{")
        self._start(head.strip(), id.strip())
        if (yield from self._value(self._arguments)):
            self._end()

    def _harmony(self) -> Waits:
        """Messages with a header each: to a function, the final one, a preamble, or analysis."""
        ends = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
        while True:
            head, marker = yield from self._collect("<|message|>", "<|end|>")
            if marker != "<|message|>":
                self._content(re.sub(r"<\|\w+\|>(assistant)?", "", head))
                if not marker:
                    return
                continue
            channel = re.search(r"<\|channel\|>\s*(\w+)", head)
            recipient = re.search(r"to=([^\s<]+)", head)
            kind = channel[1] if channel else "final"
            if recipient and recipient[1].startswith("functions.") and self.tools:
                self._start(recipient[1].removeprefix("functions."))
                if (yield from self._value(self._arguments)):
                    self._end()
                yield from self._collect(*ends)
            elif kind == "analysis" or recipient:
                yield from self._until(ends, lambda t: self._emit("reasoning", t))
            else:
                yield from self._until(ends, self._content)


def _openers(calls: Json | Marked | Xml | Bracket | Harmony) -> list[str]:
    if isinstance(calls, Harmony):
        return []
    return [calls.open, calls.call] if isinstance(calls, Xml) else [calls.open]


def _call_markers(form: Format) -> set[str]:
    return set(formats.markers(form)) - set(form.think or ())


def _calls(body: str, strict: bool = False) -> list[tuple[str, Any]] | None:
    """Calls written as JSON: {"name", "arguments" | "parameters"}, or a list of them; None when it is anything else. strict: both must be there."""
    try:
        value = json.loads(body)
    except ValueError:
        return None
    found = []
    for v in value if isinstance(value, list) else [value]:
        if not isinstance(v, dict) or not isinstance(v.get("name"), str) or not v["name"]:
            return None
        if strict and not isinstance(value, list) and not {"arguments", "parameters"} & v.keys():
            return None
        arguments = v.get("arguments", v.get("parameters")) or {}
        if isinstance(arguments, str):
            arguments = _loose(arguments, {})
        if not isinstance(arguments, dict):
            return None
        found.append((v["name"], arguments))
    return found or None


def _is_text(schema: Any) -> bool:
    return isinstance(schema, Mapping) and (schema.get("type") == "string" or (not schema.get("type") and bool(schema.get("enum"))
                                                                             and all(isinstance(v, str) for v in schema["enum"])))


def _loose(text: str, schema: Any) -> Any:
    """The JSON value that a text spells (also Python's True, False, None), else the text itself."""
    words = {"True": True, "False": False, "None": None}
    try:
        return words[text.strip()] if text.strip() in words else json.loads(text)
    except ValueError:
        return text


def opens_thinking(form: Format, prompt: str, tokenizer: Tokenizer) -> bool:
    """Whether the rendered prompt ends inside reasoning: an opening tag with no closing tag and no other special token after it."""
    if form.think is None:
        return False
    at = prompt.rfind(form.think[0])
    if at < 0 or prompt.find(form.think[1], at) >= 0:
        return False
    after = tokenizer.encode(prompt[at + len(form.think[0]):])
    return not any(i in tokenizer.specials for i in after)


def open_header(form: Format, prompt: str) -> str:
    """With channels: the header that the prompt leaves open or has just closed, for the machine to begin with."""
    if not isinstance(form.calls, Harmony):
        return ""
    return prompt.rpartition("<|start|>")[2].removeprefix("assistant")


def parser(tokenizer: Tokenizer, form: Format, prompt: str, tools: Sequence[Mapping[str, Any]] | None = None) -> Parser:
    """The machine for one answer to this rendered prompt. tools: as in OpenAI's API, [{"type": "function", "function": {name, parameters}}]."""
    schemas = {t["function"]["name"]: t["function"].get("parameters") or {} for t in tools} if tools else None
    header = open_header(form, prompt)
    if "<|message|>" in header:              # the prefilled words are the prompt's, not the answer's
        header = header[: header.index("<|message|>") + len("<|message|>")]
    return Parser(tokenizer, form, schemas, opens_thinking(form, prompt, tokenizer), header)
