"""OpenAI's Responses API, stateless, as a view of chat: items in, items out, one event for each change; stores nothing, knows no network.

Source of the format: platform.openai.com/docs/api-reference/responses.
"""

import time
from typing import Annotated, Any

from pydantic import Field, ValidationError

from hetero.errors import BadRequest
from hetero.request import Output
from hetero.wire.answers import Choice, event
from hetero.wire.prepare import Prepared
from hetero.wire.schema import ChatRequest, Number, Text, Wire


class ResponsesRequest(Wire):
    model: str | None = None
    input: Text | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=8192, fail_fast=True)]
    instructions: Text | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=512)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    text: dict[str, Any] | None = None
    previous_response_id: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None


def _item(item: dict[str, Any], i: int) -> list[dict[str, Any]]:
    """One input item as chat messages."""
    kind = item.get("type", "message")
    if kind == "message":
        return [{"role": item.get("role"), "content": item.get("content")}]
    if kind == "function_call":
        call = {"id": item.get("call_id"), "type": "function", "function": {"name": item.get("name"), "arguments": item.get("arguments", "{}")}}
        return [{"role": "assistant", "content": None, "tool_calls": [call]}]
    if kind == "function_call_output":
        return [{"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}]
    if kind == "reasoning":
        return []
    raise BadRequest(f"input[{i}] has type {str(kind)[:60]!r}, which is not supported", "message, function_call, function_call_output", "input")


def _tool(tool: dict[str, Any], i: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise BadRequest(f"tools[{i}] has type {str(tool.get('type'))[:60]!r}, but only functions can be called here", param="tools")
    return {"type": "function", "function": {k: tool[k] for k in ("name", "description", "parameters", "strict") if tool.get(k) is not None}}


def chat_request(r: ResponsesRequest) -> ChatRequest:
    """Their request as a chat request. Raises BadRequest, also for what needs a memory that this server does not have."""
    if r.previous_response_id:
        raise BadRequest("previous_response_id needs stored responses, and nothing is stored here", "send the whole input", "previous_response_id")
    messages: list[dict[str, Any]] = [{"role": "system", "content": r.instructions}] if r.instructions else []
    for i, item in enumerate([{"role": "user", "content": r.input}] if isinstance(r.input, str) else r.input):
        messages += _item(item, i)
    body: dict[str, Any] = {"messages": messages, "temperature": r.temperature, "top_p": r.top_p, "max_tokens": r.max_output_tokens,
                            "parallel_tool_calls": r.parallel_tool_calls}
    if r.tools:
        body["tools"] = [_tool(t, i) for i, t in enumerate(r.tools)]
    if isinstance(r.tool_choice, dict):
        body["tool_choice"] = {"type": "function", "function": {"name": r.tool_choice.get("name")}}
    elif r.tool_choice:
        body["tool_choice"] = r.tool_choice
    form = (r.text or {}).get("format") or {}
    if form.get("type") == "json_schema":
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": form.get("name") or "schema", "schema": form.get("schema")}}
    elif form.get("type"):
        body["response_format"] = {"type": form["type"]}
    try:
        return ChatRequest.model_validate(body)
    except ValidationError as e:
        first = e.errors()[0]
        raise BadRequest(f"input cannot be read: {'.'.join(map(str, first['loc']))}: {first['msg']}", param="input") from e


class Items:
    """The output of one response, item by item, with the events that tell of it."""

    def __init__(self, id: str) -> None:
        self.id, self.output, self._number = id, list[dict[str, Any]](), -1
        self._kind, self._text = "", ""

    def event(self, kind: str, **more: Any) -> str:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **more}, kind)

    def _open(self, kind: str, name: str = "", call: str = "") -> list[str]:
        at, id = len(self.output), f"{self.id}-{len(self.output)}"
        self._kind, self._text = kind, ""
        item: dict[str, Any] = {"id": id, "status": "in_progress"}
        if kind == "content":
            item |= {"type": "message", "role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"type": "reasoning", "summary": [], "content": []}
        else:
            item |= {"type": "function_call", "call_id": call, "name": name, "arguments": ""}
        self.output.append(item)
        found = [self.event("response.output_item.added", output_index=at, item=dict(item))]
        if kind == "content":
            part = {"type": "output_text", "text": "", "annotations": []}
            found.append(self.event("response.content_part.added", output_index=at, item_id=id, content_index=0, part=part))
        return found

    def close(self, status: str = "completed") -> list[str]:
        """Ends the open item."""
        if not self._kind:
            return []
        at, item, kind = len(self.output) - 1, self.output[-1], self._kind
        self._kind, item["status"] = "", status
        place = {"output_index": at, "item_id": item["id"]}
        found = []
        if kind == "content":
            part = {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}
            item["content"] = [part]
            found = [self.event("response.output_text.done", **place, content_index=0, text=self._text, logprobs=[]),
                     self.event("response.content_part.done", **place, content_index=0, part=part)]
        elif kind == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": self._text}]
            found = [self.event("response.reasoning_text.done", **place, content_index=0, text=self._text)]
        else:
            item["arguments"] = self._text
            found = [self.event("response.function_call_arguments.done", **place, arguments=self._text, name=item["name"])]
        return [*found, self.event("response.output_item.done", output_index=at, item=dict(item))]

    def take(self, e: Any) -> list[str]:
        """The events of one of ours."""
        if e.kind == "end":
            return self.close()
        found: list[str] = []
        if e.kind == "call":
            return [*self.close(), *self._open("call", e.name, e.id)]
        if e.kind in ("content", "reasoning") and self._kind != e.kind:
            found = [*self.close(), *self._open(e.kind)]
        self._text += e.text
        place = {"output_index": len(self.output) - 1, "item_id": self.output[-1]["id"], "delta": e.text}
        if e.kind == "content":
            return [*found, self.event("response.output_text.delta", **place, content_index=0, logprobs=[])]
        if e.kind == "reasoning":
            return [*found, self.event("response.reasoning_text.delta", **place, content_index=0)]
        return [*found, self.event("response.function_call_arguments.delta", **place)]


def response(r: ResponsesRequest, items: Items, model: str, status: str, created: int, choice: Choice | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": items.id, "object": "response", "created_at": created, "status": status, "model": model, "output": items.output, "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None, "instructions": r.instructions,
        "metadata": r.metadata or {}, "parallel_tool_calls": r.parallel_tool_calls is not False, "temperature": r.temperature, "top_p": r.top_p,
        "tool_choice": r.tool_choice or "auto", "tools": r.tools or [], "max_output_tokens": r.max_output_tokens, "store": False, "usage": None}
    if choice is not None:
        t = choice.reply.answer.timings
        found["usage"] = {"input_tokens": t.prompt_tokens, "output_tokens": t.tokens, "total_tokens": t.prompt_tokens + t.tokens,
                          "input_tokens_details": {"cached_tokens": t.cached_tokens}, "output_tokens_details": {"reasoning_tokens": 0}}
    return found


class ResponseAnswer:
    """A whole response. `add` tells the events of what came, for streams."""

    def __init__(self, r: ResponsesRequest, job: Prepared, model: str) -> None:
        self.items, self.choice, self.created = Items(job.job.id.replace("chatcmpl-", "resp_")), Choice(job, 0), int(time.time())
        self._request, self._model, self._finish = r, model, "stop"

    def begin(self) -> list[str]:
        """The events before anything came."""
        found = response(self._request, self.items, self._model, "in_progress", self.created)
        return [self.items.event(kind, response=found) for kind in ("response.created", "response.in_progress")]

    def add(self, job: int, output: Output) -> list[str]:
        chunk, events = self.choice.take(output)
        self._finish = self.choice.finish_reason(chunk) if chunk.finish else self._finish
        return [told for e in events for told in self.items.take(e)]

    @property
    def status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def end(self) -> list[str]:
        """The last events: what was open closes, and the whole response."""
        closing = self.items.close(self.status)
        return [*closing, self.items.event(f"response.{self.status}", response=self._whole())]

    def body(self) -> dict[str, Any]:
        self.items.close(self.status)
        return self._whole()

    def _whole(self) -> dict[str, Any]:
        return response(self._request, self.items, self._model, self.status, self.created, self.choice)
