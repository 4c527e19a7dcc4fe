"""Messages to prompt ids through the model's own chat template, which is untrusted code in a sandbox; knows no engine and no network.

The dialect is that of transformers' `apply_chat_template` (jinja2 with trim_blocks, lstrip_blocks, loop controls, `raise_exception`,
`strftime_now`, `tojson` without HTML escapes, `{% generation %}`). Steps, time and sizes are bounded; a template is tried when it is read.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from time import thread_time
from types import BuiltinFunctionType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from hetero.errors import BadCheckpoint, BadRequest
from hetero.text.tokenizer import Tokenizer, free_mark, read_json

MAX_STEPS, MAX_SECONDS, MAX_CHARS, MAX_SOURCE = 1_000_000, 5.0, 32_000_000, 1_000_000
FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
Message = dict[str, Any]


class _Budget:
    """What one rendering may still spend."""

    def __init__(self) -> None:
        self.steps, self.chars, self.until = MAX_STEPS, MAX_CHARS, thread_time() + MAX_SECONDS

    def spend(self, steps: int = 0, chars: int = 0) -> None:
        self.steps, self.chars = self.steps - steps, self.chars - chars
        if self.steps < 0 or self.chars < 0:
            raise jinja2.sandbox.SecurityError(f"more than {MAX_STEPS} steps" if self.steps < 0 else f"more than {MAX_CHARS} characters")
        if steps and self.steps % 64 == 0 and thread_time() > self.until:
            raise jinja2.sandbox.SecurityError(f"more than {MAX_SECONDS:g} s")


_budget: ContextVar[_Budget] = ContextVar("budget")


def _counted(values: Any) -> Iterator[Any]:
    budget = _budget.get()
    for value in values:
        budget.spend(steps=1)
        yield value


def _sized(value: Any) -> Any:
    if isinstance(value, (str, list, tuple)):
        if len(value) > MAX_CHARS:
            raise jinja2.sandbox.SecurityError(f"a value of more than {MAX_CHARS} characters")
        _budget.get().spend(steps=1, chars=len(value) // 64)
    return value


def _grow(size: int) -> None:
    """Refuses a value before it is made."""
    if size > MAX_CHARS // 8:
        raise jinja2.sandbox.SecurityError(f"a value of {size} characters or items")


def _check(name: str, value: Any, args: Sequence[Any]) -> None:
    """Refuses calls of filters and string methods whose result could be huge."""
    for number in args:
        if isinstance(number, (int, float)) and abs(number) > 100_000:
            raise jinja2.sandbox.SecurityError(f"{name} with a width or count above 100000")
    if name in ("format", "format_map") and any(len(run) > 5 for run in re.findall(r"\d+", str(value))):
        raise jinja2.sandbox.SecurityError("a width above 99999")
    if name == "replace" and len(args) > 1:
        _grow(len(str(value)) + str(value).count(str(args[0])) * len(str(args[1])))
    if name == "indent":
        _grow(len(str(value)) + str(value).count("\n") * (len(args[0]) if args and isinstance(args[0], str) else 1))


def _finalize(value: Any) -> Any:
    if (budget := _budget.get(None)) is not None and isinstance(value, str):
        budget.spend(steps=1, chars=len(value))
    return value


def _bounded(name: str, call: Callable[..., Any], skip: int) -> Callable[..., Any]:
    """A filter that checks its arguments first; `skip` is 1 where jinja2 passes a context in front."""
    @functools.wraps(call)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check(name, args[skip], [*args[skip + 1:], *kwargs.values()])
        return _sized(call(*args, **kwargs))
    return bounded


def _bounded_format(text: str, call: Callable[..., str]) -> Callable[..., str]:
    def bounded(*args: Any, **kwargs: Any) -> str:
        _check("format", text, [*args, *kwargs.values()])
        return call(*args, **kwargs)
    return bounded


def _join(values: Any, separator: str = "", attribute: str | int | None = None) -> str:
    found = [str(v if attribute is None else v[attribute]) for v in _counted(values)]
    _grow(sum(map(len, found)) + len(found) * len(separator))
    return str(separator).join(found)


class _Measure(NodeTransformer):
    """Puts a counter into every loop and a measure around every `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(node, "_sized", [], [], None, None, lineno=node.lineno)


class _Generation(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}`, which marks the assistant's words for training: here only its body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 reads it from the class

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox of jinja2, with every loop step counted and every growing value measured."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, finalize=_finalize, extensions=[_Generation, jinja2.ext.loopcontrols])
        for name, skip in (("center", 0), ("indent", 0), ("batch", 0), ("format", 0), ("slice", 1), ("wordwrap", 1), ("truncate", 1), ("replace", 1)):
            self.filters[name] = _bounded(name, self.filters[name], skip)
        self.filters |= {"tojson": _tojson, "join": _join, "_counted": _counted, "_sized": _sized}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Measure().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for long, times in ((left, right), (right, left)):
                if isinstance(long, (str, list, tuple)) and isinstance(times, int):
                    _grow(len(long) * times)
        if operator == "**":
            raise jinja2.sandbox.SecurityError("powers")
        if operator == "%" and isinstance(left, str):
            _check("format", left, ())
        return _sized(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        found = super().wrap_str_format(value)
        return found if found is None else _bounded_format(value.__self__, found)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _budget.get().spend(steps=1)
        if isinstance(obj, BuiltinFunctionType) and isinstance(obj.__self__, str):
            _check(obj.__name__, obj.__self__, [*args, *kwargs.values()])
            if obj.__name__ == "join" and args:
                return _join(args[0], obj.__self__)
        return _sized(super().call(context, obj, *args, **kwargs))


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation: what the model reads, as text (with control tokens spelled) and as ids."""

    text: str
    ids: tuple[int, ...]


def plain_content(content: object, place: str) -> str:
    """A message's content as one string; text parts are joined by newlines; null and absent are "". BadRequest names what is not text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{place}.content must be a string or a list of text parts", param="messages")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise BadRequest(f"{place}.content[{i}]: this model reads text only, not {kind or type(part).__name__}", "send text parts", "messages")
        texts.append(text)
    return "\n".join(texts)


def _shielded(value: Any, shield: Callable[[str], str]) -> Any:
    """Every string inside a value, shielded; keys and the words that templates compare stay."""
    if isinstance(value, str):
        return shield(value)
    if isinstance(value, list):
        return [_shielded(v, shield) for v in value]
    if isinstance(value, dict):
        return {k: v if k in ("role", "type") else _shielded(v, shield) for k, v in value.items()}
    return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for v in value.values() if isinstance(value, dict) else value:
            yield from _strings(v)


def _ask() -> list[Message]:
    return [{"role": "user", "content": "hi"}]


class Template:
    """One model's chat template with its tokenizer. `source` names where it came from; `turn_end` is what it writes after an answer."""

    def __init__(self, tokenizer: Tokenizer, text: str, source: str, tools_text: str | None = None) -> None:
        self.tokenizer, self.text, self.source = tokenizer, text, source
        if max(len(text), len(tools_text or "")) > MAX_SOURCE:
            raise BadCheckpoint(f"{source}: a chat template of {len(text)} characters", f"at most {MAX_SOURCE} are accepted")
        sandbox = _Sandbox()
        try:
            self._plain = sandbox.from_string(text)
            self._tools = sandbox.from_string(tools_text) if tools_text is not None else self._plain
        except FAULTS as e:
            raise BadCheckpoint(f"{source}: the chat template does not compile ({e})", "pass a working one with --chat-template FILE") from e
        self._try()
        self.objects = self._takes_objects()
        self.turn_end = self._find_turn_end()

    def render(self, messages: Sequence[Message], tools: Sequence[Message] | None = None, generation: bool = True, **names: Any) -> str:
        """The conversation as text. BadRequest with the template's own words when it refuses, or when it does not end in time."""
        values = {**self.tokenizer.named, **names, "messages": list(messages), "tools": list(tools) if tools else None, "documents": None,
                  "add_generation_prompt": generation}
        token = _budget.set(_Budget())
        try:
            return (self._tools if tools else self._plain).render(values)
        except FAULTS as e:
            reason = str(e).strip() or type(e).__name__
            raise BadRequest(f"the chat template refuses these messages: {reason}", f"template: {self.source}", param="messages") from e
        finally:
            _budget.reset(token)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] | None = None, continue_final: bool = False,
               names: dict[str, Any] | None = None, trusted: bool = False) -> Prompt:
        """Messages to ids. Control tokens come from the template alone; their spellings in messages and tools stay ordinary text, unless `trusted`.

        continue_final: the last message is the beginning of the answer and stays open. Raises BadRequest (param "messages").
        """
        plain = [self._message(m, i) for i, m in enumerate(messages)]
        if not plain:
            raise BadRequest("messages is empty", "send at least one message", param="messages")
        if continue_final and plain[-1]["role"] != "assistant":
            raise BadRequest("continue_final_message needs an assistant message at the end", param="messages")
        found = list(_strings([plain, list(tools or [])]))
        mark = free_mark(found)
        end = free_mark([*found, mark])
        if not trusted:
            shield = self.tokenizer.shield
            plain = [_shielded(m, functools.partial(shield, mark=mark, loose=m["role"] in ("user", "tool"))) for m in plain]
            tools = _shielded(list(tools), functools.partial(shield, mark=mark, loose=False)) if tools else None
        if continue_final:
            plain[-1] = {**plain[-1], "content": plain[-1]["content"] + end}
        text = self.render(plain, tools, not continue_final, **(names or {}))
        for sign in (mark, end):          # a template may have asked tojson for ASCII
            text = text.replace(json.dumps(sign)[1:-1], sign)
        if continue_final:
            if end not in text:
                raise BadRequest("the chat template leaves out the message to be continued", param="messages")
            text = text[: text.rindex(end)].replace(end, "")
        return Prompt(text.replace(mark, ""), tuple(self.tokenizer.encode_marked(text, mark)))

    def _message(self, message: Message, i: int) -> Message:
        """A message as templates expect it: content a string, call arguments as this template takes them."""
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{i}] must be an object with a role", param="messages")
        plain = {**message, "content": plain_content(message.get("content"), f"messages[{i}]")}
        if calls := message.get("tool_calls"):
            plain["tool_calls"] = [self._call(c) for c in calls]
        return plain

    def _call(self, call: Message) -> Message:
        function = call.get("function", {})
        arguments = function.get("arguments") or {}
        try:
            value = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError as e:
            raise BadRequest(f"arguments of the call {function.get('name')!r} are not JSON ({e})", param="messages") from e
        return {**call, "function": {**function, "arguments": value if self.objects else _tojson(value)}}

    def _try(self) -> None:
        """Renders a first conversation, so that a broken or hostile template fails when it is read."""
        fault: BadRequest | None = None
        system: Message = {"role": "system", "content": "s"}
        answer: Message = {"role": "assistant", "content": "a"}
        tries = (_ask(), [system, *_ask()], [*_ask(), answer, *_ask()])
        for messages in tries:
            try:
                self.render(messages)
                return
            except BadRequest as e:
                fault = fault or e
        raise BadCheckpoint(f"{self.source}: the chat template cannot render a first message ({fault.message if fault else ''})",
                            "pass a working one with --chat-template FILE")

    def _takes_objects(self) -> bool:
        """Whether call arguments are given as objects (most templates) or as JSON text (those that add strings together)."""
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"arg": "val"}}}
        try:
            return "{'arg'" not in self.render([*_ask(), {"role": "assistant", "content": "", "tool_calls": [call]}])
        except BadRequest:
            return False

    def _find_turn_end(self) -> int | None:
        """The special token that this template writes right after an answer: one more end of generation."""
        answer = "qwx answer"
        try:
            text = self.render([*_ask(), {"role": "assistant", "content": answer}], generation=False)
        except BadRequest:
            return None
        after = self.tokenizer.encode(text.rpartition(answer)[2].lstrip()[:200]) if answer in text else []
        return after[0] if after and after[0] in self.tokenizer.specials else None


def _named(value: object, source: str) -> dict[str, str]:
    """`chat_template` as files spell it: one text, or a list of {"name", "template"}."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(v, dict) and isinstance(v.get("template"), str) for v in value):
        return {str(v.get("name")): v["template"] for v in value}
    raise BadCheckpoint(f"{source}: chat_template is neither text nor a list of named texts", "pass one with --chat-template FILE")


def find(folder: Path) -> tuple[dict[str, str], str]:
    """The templates of a model folder by name, and the file they are from; ({}, "") when there are none. The .jinja file wins, as in transformers."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        more = {p.stem: p.read_text(encoding="utf-8") for p in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        return {**more, "default": path.read_text(encoding="utf-8")}, str(path)
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (value := read_json(folder / name).get("chat_template")) is not None:
            return _named(value, str(folder / name)), str(folder / name)
    return {}, ""


def read(folder: Path, tokenizer: Tokenizer, override: Path | None = None) -> Template | None:
    """The chat template of a model folder, tried; None when the model has none."""
    if override is not None:
        if not override.is_file():
            raise BadCheckpoint(f"{override}: no such chat template file", "give the path of a .jinja file")
        texts, source = {"default": override.read_text(encoding="utf-8")}, str(override)
    else:
        texts, source = find(folder)
    return try_out(texts, source, tokenizer) if texts else None


def try_out(texts: dict[str, str], source: str, tokenizer: Tokenizer) -> Template:
    """A template from its texts by name ("default", "tool_use"), tried; `source` is for messages. Its turn end joins the tokenizer's ends."""
    made = Template(tokenizer, texts.get("default", next(iter(texts.values()))), source, texts.get("tool_use"))
    if made.turn_end is not None and made.turn_end not in tokenizer.eos:
        tokenizer.add_end(made.turn_end, f"chat template ({Path(source).name})")
    return made
