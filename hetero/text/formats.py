"""How families of models write reasoning and tool calls, as rows of a table; knows no token and no request.

Spellings follow the models' published chat templates. A row is found by what the template itself spells (`detect`), or named by the user.
"""

import secrets
import string
from dataclasses import dataclass

from hetero.errors import BadOption

ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Json:
    """{"name": …, "arguments": {…}} between `open` and `close`; without them the whole answer is one call."""

    open: str = ""
    close: str = ""


@dataclass(frozen=True)
class Marked:
    """A section of calls: call, name, sep, arguments as JSON, call_end. `id_is_name`: what stands before sep is the call's id, functions.NAME:N."""

    open: str
    call: str
    sep: str
    call_end: str
    close: str
    id_is_name: bool = False
    fenced: bool = False                 # after sep: the name, then ```json


@dataclass(frozen=True)
class Xml:
    """A call as tags with one value each. `value` opens a value where the key's end does not."""

    open: str
    call: str
    name_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    call_end: str
    close: str


@dataclass(frozen=True)
class Bracket:
    """[TOOL_CALLS] with a JSON list, or NAME[ARGS]{…} once per call (Mistral's older and newer tokenizers)."""

    open: str = "[TOOL_CALLS]"
    args: str = "[ARGS]"
    id: str = "[CALL_ID]"


@dataclass(frozen=True)
class Harmony:
    """Channels: analysis, commentary (calls), final (gpt-oss; openai/harmony docs/format.md)."""


@dataclass(frozen=True)
class Format:
    """One way of writing. `think`: the tags around reasoning. `ends_thinking`: a call marker that reasoning cannot contain, so it ends it."""

    name: str
    calls: Json | Marked | Xml | Bracket | Harmony
    think: tuple[str, str] | None = ("<think>", "</think>")
    ends_thinking: bool = False
    short_ids: bool = False              # ids of nine letters and digits, which Mistral's templates insist on

    def new_id(self) -> str:
        """An id for a call: unique, and of the form that the template takes back."""
        return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9)) if self.short_ids else f"call_{secrets.token_hex(12)}"


TOOL = ("<tool_call>", "</tool_call>")
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
KIMI = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>")

FORMATS = {f.name: f for f in (
    Format("hermes", Json(*TOOL)),
    Format("qwen3_coder", Xml(TOOL[0], "<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", TOOL[1])),
    Format("glm4", Xml(TOOL[0], "", "\n", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", TOOL[1], "")),
    Format("deepseek_v3", Marked(*DEEPSEEK, fenced=True), ends_thinking=True),
    Format("deepseek_v31", Marked(*DEEPSEEK), ends_thinking=True),
    Format("kimi_k2", Marked(*KIMI, id_is_name=True), ends_thinking=True),
    Format("harmony", Harmony(), think=None),
    Format("mistral", Bracket(), think=("[THINK]", "[/THINK]"), ends_thinking=True, short_ids=True),
    Format("minimax_m2", Xml("<minimax:tool_call>", '<invoke name="', '">', '<parameter name="', '">', "", "</parameter>", "</invoke>",
                             "</minimax:tool_call>")),
    Format("json", Json()),
)}

# What a template spells -> the row; the first that matches.
SIGNS = (("<|channel|>", "harmony"), (KIMI[0], "kimi_k2"),
         ("<minimax:tool_call>", "minimax_m2"), ("<arg_key>", "glm4"), ("<function=", "qwen3_coder"),
         ("[TOOL_CALLS]", "mistral"), (TOOL[0], "hermes"))


def detect(template: str) -> Format:
    """The row that a chat template's own spelling calls for; "json" when it spells no calls."""
    if DEEPSEEK[0] in template:
        return FORMATS["deepseek_v3" if "```json" in template else "deepseek_v31"]
    return FORMATS[next((name for sign, name in SIGNS if sign in template), "json")]


def named(name: str) -> Format:
    """The row of this name. BadOption lists the known ones."""
    if name not in FORMATS:
        raise BadOption(f"no format of tool calls is named {name!r}", f"known: {', '.join(FORMATS)}")
    return FORMATS[name]


def markers(f: Format) -> tuple[str, ...]:
    """Every spelling that the machine looks for: special tokens among them are not dropped from the text."""
    c = f.calls
    if isinstance(c, Harmony):
        return ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
    if isinstance(c, Marked):
        found = [c.open, c.call, c.sep, c.call_end, c.close]
    elif isinstance(c, Xml):
        found = [c.open, c.call, c.key, c.key_end, c.value, c.value_end, c.call_end, c.close]
    elif isinstance(c, Bracket):
        found = [c.open, c.args, c.id]
    else:
        found = [c.open, c.close]
    return tuple(m for m in (*found, *(f.think or ())) if m)
