"""Anthropic's Messages API as a view of chat: its requests become chat requests, our events become its blocks; knows no engine.

Source of the format: docs.anthropic.com/en/api/messages.
"""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from hetero.errors import BadRequest, HeteroError
from hetero.serve.door import anthropic_error
from hetero.serve.relay import Relay
from hetero.serve.stream import View, merged, openai_error, status_of
from hetero.wire import prepare
from hetero.wire.answers import Choice, event
from hetero.wire.prepare import Prepared, Texts
from hetero.wire.schema import MAX_MESSAGES, ChatRequest, Number, Text, Wire, few_parts


class Block(Wire):
    type: str
    text: Text | None = None
    thinking: Text | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Text | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


class Turn(Wire):
    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Field(fail_fast=True)]


class AnthropicTool(Wire):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: Text | None = None
    input_schema: dict[str, Any] = Field(default_factory=dict)
    strict: bool | None = None


class ToolChoice(Wire):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountRequest(Wire):
    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), AfterValidator(few_parts)]
    system: Text | Annotated[list[Block], Field(fail_fast=True)] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=512)] | None = None
    tool_choice: ToolChoice | None = None


class MessagesRequest(CountRequest):
    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    stop_sequences: Annotated[list[str], Field(max_length=16)] | None = None
    stream: bool | None = None


def _text(content: Any, place: str) -> str:
    """Text of a string or of text blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for b in content:
        kind, text = (b.type, b.text) if isinstance(b, Block) else (b.get("type"), b.get("text"))
        if kind != "text" or not isinstance(text, str):
            raise BadRequest(f"{place}: this model reads text only, not {kind}", "send text blocks", "messages")
        texts.append(text)
    return "\n".join(texts)


def _turn(turn: Turn, place: str) -> list[dict[str, Any]]:
    """One of their messages as ours: tool results are messages of their own."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    found: list[dict[str, Any]] = []
    said = [b for b in turn.content if b.type not in ("tool_use", "tool_result", "thinking", "redacted_thinking")]
    calls = [{"id": b.id or "", "type": "function", "function": {"name": b.name or "?", "arguments": json.dumps(b.input or {})}}
             for b in turn.content if b.type == "tool_use"]
    thought = "\n".join(b.thinking or "" for b in turn.content if b.type == "thinking")
    found += [{"role": "tool", "tool_call_id": b.tool_use_id, "content": _text(b.content, place)} for b in turn.content if b.type == "tool_result"]
    if said or calls:
        found.append({"role": turn.role, "content": _text(said, place), **({"tool_calls": calls} if calls else {}),
                      **({"reasoning_content": thought} if thought else {})})
    return found


def chat_request(r: CountRequest) -> ChatRequest:
    """Their request as a chat request. An assistant message at the end is continued, as theirs is."""
    messages = [{"role": "system", "content": _text(r.system, "system")}] if r.system else []
    for i, turn in enumerate(r.messages):
        messages += _turn(turn, f"messages[{i}]")
    if not messages:
        raise BadRequest("messages hold nothing", param="messages")
    choice = r.tool_choice
    body: dict[str, Any] = {"messages": messages, "continue_final_message": messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]}
    if r.tools:
        body["tools"] = [{"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.input_schema,
                                                           "strict": t.strict}} for t in r.tools]
    if choice:
        body["tool_choice"] = {"type": "function", "function": {"name": choice.name or ""}} if choice.type == "tool" else \
            {"any": "required"}.get(choice.type, choice.type)
        body["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if isinstance(r, MessagesRequest):
        body |= {"max_tokens": r.max_tokens, "temperature": r.temperature, "top_p": r.top_p, "top_k": r.top_k, "stop": r.stop_sequences}
    try:
        return ChatRequest.model_validate(body)
    except ValidationError as e:
        first = e.errors()[0]
        raise BadRequest(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", param="messages") from e


def _why(choice: Choice, finish: str) -> tuple[str, str | None]:
    """Their stop_reason and stop_sequence."""
    stopped = choice.reply.stopped
    if stopped is not None:
        return "stop_sequence", stopped
    return {"tool_calls": "tool_use", "length": "max_tokens"}.get(finish, "end_turn"), None


def _usage(choice: Choice) -> dict[str, int]:
    t = choice.reply.answer.timings
    return {"input_tokens": t.prompt_tokens - t.cached_tokens, "cache_read_input_tokens": t.cached_tokens, "cache_creation_input_tokens": 0,
            "output_tokens": t.tokens}


def _arguments(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {"_incomplete": text}


async def message(relay: Relay, jobs: list[Prepared], model: str, body: MessagesRequest) -> dict[str, Any]:
    """A whole message."""
    job = jobs[0]
    choice, finish = Choice(job, 0), "stop"
    async with aclosing(merged(relay, jobs)) as outputs:
        async for _, output in outputs:
            chunk, _ = choice.take(output)
            finish = choice.finish_reason(chunk) if chunk.finish else finish
    m = choice.parser.message
    content: list[dict[str, Any]] = [{"type": "thinking", "thinking": m.reasoning, "signature": ""}] if m.reasoning else []
    content += [{"type": "text", "text": m.content}] if m.content else []
    content += [{"type": "tool_use", "id": c.id, "name": c.name, "input": _arguments(c.arguments)} for c in m.calls]
    reason, sequence = _why(choice, finish)
    return {"id": job.job.id, "type": "message", "role": "assistant", "model": model, "content": content, "stop_reason": reason,
            "stop_sequence": sequence, "usage": _usage(choice)}


STARTS: dict[str, dict[str, Any]] = {"reasoning": {"type": "thinking", "thinking": "", "signature": ""}, "content": {"type": "text", "text": ""}}
DELTAS = {"reasoning": ("thinking_delta", "thinking"), "content": ("text_delta", "text"), "arguments": ("input_json_delta", "partial_json")}


async def message_events(relay: Relay, jobs: list[Prepared], model: str, body: MessagesRequest) -> AsyncGenerator[str, None]:
    """The same as events: one block after the other, each opened, filled and closed."""
    job = jobs[0]
    choice, index, open_kind, finish = Choice(job, 0), -1, "", "stop"
    start: dict[str, Any] = {"id": job.job.id, "type": "message", "role": "assistant", "model": model, "content": [], "stop_reason": None,
                             "stop_sequence": None, "usage": {"input_tokens": len(job.job.prompt), "output_tokens": 0}}
    yield event({"type": "message_start", "message": start}, "message_start")
    async with aclosing(merged(relay, jobs)) as outputs:
        async for _, output in outputs:
            chunk, events = choice.take(output)
            for e in events:
                if e.kind == "end":
                    continue
                if e.kind != open_kind and e.kind != "arguments":
                    if open_kind:
                        yield event({"type": "content_block_stop", "index": index}, "content_block_stop")
                    index, open_kind = index + 1, e.kind
                    block = STARTS.get(e.kind) or {"type": "tool_use", "id": e.id, "name": e.name, "input": {}}
                    yield event({"type": "content_block_start", "index": index, "content_block": block}, "content_block_start")
                if e.kind in DELTAS:
                    kind, key = DELTAS[e.kind]
                    yield event({"type": "content_block_delta", "index": index, "delta": {"type": kind, key: e.text}}, "content_block_delta")
                if e.kind == "call":
                    open_kind = "call "              # a second call is another block
            finish = choice.finish_reason(chunk) if chunk.finish else finish
    if open_kind:
        yield event({"type": "content_block_stop", "index": index}, "content_block_stop")
    reason, sequence = _why(choice, finish)
    yield event({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": _usage(choice)}, "message_delta")
    yield event({"type": "message_stop"}, "message_stop")


def count(r: CountRequest, t: Texts) -> int:
    """Tokens of a prompt."""
    asked = chat_request(r)
    return len(prepare.render(t, asked.messages, prepare.tools_of(asked.tools), None, None, asked.continue_final_message).ids)


def fault(e: HeteroError) -> str:
    return event(anthropic_error(openai_error(e)["error"]["message"], status_of(e)), "error")


# Their clients name models of theirs, so the name is not checked.
VIEW = View(lambda body, texts: [prepare.chat(chat_request(body), texts)], message_events, message, fault, named=False)
