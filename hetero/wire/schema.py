"""Wire types: what clients send, field by field, and the error object; checks form alone, knows no model.

Types are strict ("0.7" is no number), null means absent, unknown fields are kept aside and logged. Sources: OpenAI's and Anthropic's API references.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from hetero.errors import BadRequest

Text = Annotated[str, Field(max_length=4_000_000)]
Number = Annotated[float, Field(allow_inf_nan=False)]
FIELD, BRANCHES = re.compile("[a-z_][a-z0-9_]*"), frozenset({"body", "str", "int", "float", "bool", "none", "dict", "list", "nullable"})
CLASS = re.compile(r" or instance of \w+")
Ids = Annotated[list[int], Field(fail_fast=True)]       # the first that is wrong is told, and the rest not looked at: a body may hold millions
MAX_STOPS, MAX_STOP_CHARS = 16, 512
MAX_MESSAGES, MAX_PARTS = 8192, 16_384


def few_parts(messages: list[Any]) -> list[Any]:
    """A limit on what all messages together hold."""
    if (parts := sum(len(m.content) for m in messages if isinstance(m.content, list))) > MAX_PARTS:
        raise ValueError(f"the messages have {parts} content parts, but at most {MAX_PARTS} are taken")
    return messages


class Wire(BaseModel):
    """Strict, and open to fields that we do not know."""

    model_config = ConfigDict(strict=True, extra="allow")

    def unknown(self) -> list[str]:
        """Fields that mean nothing to us."""
        return sorted(self.model_extra or {})


def fault(errors: Sequence[Any]) -> BadRequest:
    """Of pydantic's errors the first place that is wrong, and what would be right there: one thing, or one of several. Where that place may have
    several forms, the item at which the form that went furthest went wrong."""
    if errors[0].get("type") == "json_invalid":
        return BadRequest(f"body: not JSON, from character {errors[0]['loc'][-1]} on")
    first = _place(errors[0])
    inside = [p for p in map(_place, errors) if p == first or p.startswith(f"{first}.")]
    place = max(inside, key=lambda p: ([int(i) for i in p.split(".") if i.isdigit()], p.count(".")))
    wrong = dict.fromkeys(CLASS.sub("", str(e.get("msg", "cannot be read"))) for e in errors if _place(e) == place)
    return BadRequest(f"{place or 'body'}: {', or '.join(wrong)}"[:500], param=place.split(".")[0] or None)


def _place(error: Any) -> str:
    """messages.0.content: fields and indices alone, without pydantic's names for the branches of a union."""
    return ".".join(str(p) for p in error.get("loc", ()) if isinstance(p, int) or (FIELD.fullmatch(p) and p not in BRANCHES))


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(BaseModel):
    """The error object of OpenAI's API."""

    error: ErrorBody


class FunctionCall(Wire):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Wire):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Part(Wire):
    type: str
    text: Text | None = None


class Message(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Annotated[list[Part], Field(max_length=4096, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=256)] | None = None
    tool_call_id: str | None = None
    reasoning_content: Text | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        """An assistant's content may be missing (it called tools) and a tool's too; nobody's is an empty list. "" is content."""
        if self.content == [] or (self.content is None and self.role in ("system", "developer", "user")):
            raise ValueError(f"a message of role {self.role} needs content")
        return self


class Function(Wire):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Wire):
    type: Literal["function"]
    function: Function


class NamedFunction(Wire):
    name: str


class NamedTool(Wire):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Wire):
    name: str = "schema"
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Wire):
    type: Literal["text", "json_object", "json_schema", "regex", "choice", "grammar"]
    json_schema: JsonSchema | None = None
    pattern: str | None = None
    choices: list[str] | None = None
    grammar: str | None = None


class StreamOptions(Wire):
    include_usage: bool | None = None


class Sampled(Wire):
    """What chat, completions and their relatives share."""

    model: str | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=4096)] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=256)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_prompt: bool | None = None
    return_progress: bool | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), AfterValidator(few_parts)]


class ChatRequest(Sampled):
    messages: Messages
    tools: Annotated[list[Tool], Field(max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(Sampled):
    prompt: (Text | Annotated[Ids, Field(min_length=1)] | Annotated[list[str], Field(min_length=1, max_length=256, fail_fast=True)]
             | Annotated[list[Ids], Field(min_length=1, max_length=256, fail_fast=True)])
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: str | None = None
    best_of: int | None = None


class TokenizeRequest(Wire):
    content: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special: bool | None = None


class DetokenizeRequest(Wire):
    tokens: Annotated[Ids, Field(max_length=4_000_000)]


class TemplateRequest(Wire):
    messages: Messages
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class LoadRequest(Wire):
    model: Annotated[str, Field(min_length=1, max_length=4096)] | None = None      # null: the one that the server was started with
    served_model_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    wait: bool | None = None             # answer when it is loaded, not at once


class UnloadRequest(Wire):
    model: str | None = None
    force: bool | None = None            # end what runs
