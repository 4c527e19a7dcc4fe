"""Grammars of tool calls as each family of models writes them: calls and nothing else, or free text in which a call that begins must be whole.

Knows no request and no engine.
"""

import json
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from hetero.text.formats import Bracket, Format, Harmony, Json, Marked, Xml
from hetero.text.grammar import SPACE, depth, from_lark, quote
from hetero.text.tokenizer import Tokenizer

_LINE = quote("\n")


def _escape(text: str) -> str:
    """A text as part of a regular expression between slashes."""
    return re.sub(r"([\\.+*?()|\[\]{}^$/])", r"\\\1", text)


class Calls:
    """Grammars of tool calls as one model family writes them. tools: as in OpenAI's API, already checked.

    strict: names of the tools whose arguments must follow their schema (None: all); of the others any JSON object will do.
    """

    def __init__(self, tokenizer: Tokenizer, form: Format, tools: Sequence[Mapping[str, Any]], strict: Container[str] | None = None) -> None:
        self._tokenizer, self._form = tokenizer, form
        self._tools: list[tuple[str, Mapping[str, Any] | None]] = []
        for f in (t["function"] for t in tools):
            self._tools.append((f["name"], f.get("parameters") or {"type": "object"} if strict is None or f["name"] in strict else None))
            depth(self._tools[-1][1], param="tools")

    def _mark(self, text: str) -> str:
        """A spelling as Lark: the token itself where it is a special one."""
        token = self._special(text)
        return quote(text) if token is None else f"<[{token}]>"

    def _special(self, text: str) -> int | None:
        token = self._tokenizer.id_of(text)
        return token if token is not None and token in self._tokenizer.specials else None

    def _json(self, schema: Mapping[str, Any] | None) -> str:
        return "%json " + json.dumps({**(schema or {"type": "object"}), "x-guidance": {"whitespace_pattern": SPACE}})

    def _any(self) -> str:
        return f"({' | '.join(f'call_{i}' for i in range(len(self._tools)))})"

    def _lark(self, start: str, *more: str) -> str:
        calls = [f"call_{i}: {self._call(name, schema)}" for i, (name, schema) in enumerate(self._tools)]
        return from_lark("\n".join([f"start: {start}", *more, *calls, *self._rules()]), "tools")

    def required(self, parallel: bool = True, instead: Mapping[str, Any] | None = None) -> str:
        """At least one call and nothing else; `parallel`: more may follow; `instead`: or JSON of this schema in place of calls."""
        c, one = self._form.calls, self._any()
        if isinstance(c, Marked) or (isinstance(c, Xml) and self._section(c)):
            start = f"{self._mark(c.open)} {self._inside(c, parallel)}"
        elif isinstance(c, Harmony) or (isinstance(c, Json) and not c.open):
            start = one
        else:
            start = f'{self._opened(c)} {one} ("\\n" {self._opened(c)} {one})*' if parallel else f"{self._opened(c)} {one}"
        return self._lark(start if instead is None else f"{start} | {self._json(instead)}")

    def offered(self, parallel: bool = True) -> str:
        """Any text, with calls in it or without: once a call is opened, it must be one of these. not `parallel`: nothing follows the first."""
        c, one = self._form.calls, self._any()
        if isinstance(c, Harmony):
            m = self._mark
            note = f"{m('<|channel|>')} (\"analysis\" | \"commentary\") {m('<|message|>')} said {m('<|start|>')} \"assistant\""
            said = f'/(.|\\n)*/ {m("<|end|>")}' if self._special("<|end|>") is not None else ""
            return self._lark(f"(note)* ({m('<|channel|>')} \"final\" {m('<|message|>')} TEXT | {one})", f"note: {note}",
                              f"said: {said}" if said else f"said[suffix={quote('<|end|>')}]: /(.|\\n)*/", "TEXT: /(.|\\n)*/")
        if isinstance(c, Json) and not c.open:
            return self._lark(f"{one} | TEXT", 'TEXT: /(.|\\n)*/ & ~/\\s*(\\[\\s*)?\\{\\s*"name"(.|\\n)*/')
        rests = {c.open: self._inside(c, parallel) if isinstance(c, Marked) or (isinstance(c, Xml) and self._section(c)) else
                 f'"\\n" {one}' if isinstance(c, Xml) and c.call else one}
        if isinstance(c, Xml) and c.call:            # a call whose section was never opened is one to the parser
            rests[c.call] = f"({' | '.join(f'bare_{i}' for i in range(len(self._tools)))})"
        spelled = [o for o in rests if self._special(o) is None]
        text = "TEXT: /(.|\\n)*/" + "".join(f" & ~/(.|\\n)*{_escape(o)}(.|\\n)*/" for o in spelled)
        marks = [f"<[{i}]>" for t in self._form.think or () if (i := self._special(t)) is not None]
        more = [text, f"free: ({' | '.join(['TEXT', *marks])})*", *(f"lead_{i}[lazy]: /(.|\\n)*{_escape(o)}/" for i, o in enumerate(spelled))]
        units = [f"free {f'lead_{spelled.index(o)}' if o in spelled else self._mark(o)} {rest}" for o, rest in rests.items()]
        if isinstance(c, Xml) and c.call:
            more += [f"bare_{i}: {self._xml(c, name, schema, True)}" for i, (name, schema) in enumerate(self._tools)]
        more.append(f"unit: {' | '.join(units)}")
        return self._lark("(unit)* free" if parallel else "free | unit", *more)

    def _inside(self, c: Marked | Xml, parallel: bool) -> str:
        """A section after its opening tag."""
        return f"{_LINE if isinstance(c, Xml) else ''} {self._any()}{'+' if parallel else ''} {self._mark(c.close)}"

    def _opened(self, c: Json | Xml | Bracket) -> str:
        return self._mark(c.open) + (f" {_LINE}" if isinstance(c, Xml) and c.call else "")

    def _rules(self) -> list[str]:
        """`text`: anything up to the end of a value."""
        c = self._form.calls
        if not isinstance(c, Xml):
            return []
        end = self._mark(c.value_end)
        return [f"text: /(.|\\n)*/ {end}" if end.startswith("<") else f"text[suffix={end}]: /(.|\\n)*/"]

    def _call(self, name: str, schema: Mapping[str, Any] | None) -> str:
        """One call, without the tag that opens it or its section."""
        c, args, m, q = self._form.calls, self._json(schema), self._mark, quote
        if isinstance(c, Xml):
            return self._xml(c, name, schema)
        if isinstance(c, Json) and c.open:
            parts = ["/\\n?/", q(f'{{"name": "{name}", "arguments": '), args, '"}"', "/\\n?/", m(c.close)]
        elif isinstance(c, Json):
            parts = [q(f'{{"name": "{name}", "parameters": '), args, q("}")]
        elif isinstance(c, Marked) and c.fenced:
            parts = [m(c.call), q("function"), m(c.sep), q(f"{name}\n```json\n"), args, q("\n```"), m(c.call_end)]
        elif isinstance(c, Marked) and c.id_is_name:
            parts = [m(c.call), q(f"functions.{name}:"), "/[0-9]{1,3}/", m(c.sep), args, m(c.call_end)]
        elif isinstance(c, Marked):
            parts = [m(c.call), q(name), m(c.sep), args, m(c.call_end)]
        elif isinstance(c, Harmony):
            parts = [m("<|channel|>"), q(f"commentary to=functions.{name} "), m("<|constrain|>"), q("json"), m("<|message|>"), args, m("<|call|>")]
        else:
            parts = [q(name), m(c.args), args]
        return " ".join(parts)

    def _xml(self, c: Xml, name: str, schema: Mapping[str, Any] | None, bare: bool = False) -> str:
        """Parameters in the schema's order, those that are not required left out or not. bare: after `c.call`, without what is around it."""
        m, q = self._mark, quote
        inner = self._parameters(c, schema) if schema is not None else ["(" + " ".join(
            [m(c.key), "/[^<>\\n\"]{1,128}/", m(c.key_end), *([m(c.value)] if c.value else []), "text", _LINE]) + ")*"]
        if not c.call:
            return " ".join([q(name + "\n"), *inner, m(c.call_end)])
        body = [q(f"{name}{c.name_end}\n"), *inner, m(c.call_end)]
        return " ".join(body if bare else [m(c.call), *body, _LINE] if self._section(c) else [m(c.call), *body, _LINE, m(c.close)])

    def _parameters(self, c: Xml, schema: Mapping[str, Any]) -> list[str]:
        need, m, q = set(schema.get("required") or ()), self._mark, quote
        defs = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
        inner = []
        for key, value in (schema.get("properties") or {}).items():
            value = value if isinstance(value, Mapping) else {}
            if value.get("type") == "string" and not {"enum", "pattern", "const", "format"} & value.keys():
                said = "text"
            elif value.get("enum") and all(isinstance(v, str) for v in value["enum"]):
                said = f"({' | '.join(map(q, value['enum']))}) {m(c.value_end)}"
            else:
                said = f"{self._json({**value, **defs})} {m(c.value_end)}"
            part = " ".join([m(c.key), q(key), m(c.key_end), *([m(c.value)] if c.value else []), said, _LINE])
            inner.append(part if key in need else f"({part})?")
        return inner

    @staticmethod
    def _section(c: Xml) -> bool:
        """Whether one pair of tags is around all calls (and not around each)."""
        return c.call.startswith("<invoke")
