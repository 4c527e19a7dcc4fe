"""What each path makes of a body, beside the event loop: in a thread, or, of a large body, in a process of its own; knows no network.

Parsing, checking, templates and tokenizing hold the interpreter's lock: of a body of 16 MiB for a second and more.
"""

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json

from hetero.errors import BadRequest
from hetero.serve import anthropic, openai, responses
from hetero.serve.stream import View
from hetero.serve.worker import NICER
from hetero.text.apart import Apart, Late
from hetero.text.template import Prompt
from hetero.wire import prepare
from hetero.wire.prepare import Prepared, Texts, read_texts
from hetero.wire.records import Info, Job
from hetero.wire.responses import ResponsesRequest
from hetero.wire.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TemplateRequest, TokenizeRequest, Wire, fault

LARGE_BYTES = 256 << 10                  # parsed and checked in 30 ms at most
MOST_BESIDE_BYTES, MOST_S = 1 << 20, 60.0


def tokenize(body: TokenizeRequest, t: Texts) -> dict[str, Any]:
    if body.messages is not None:
        tokens = list(prepare.render(t, body.messages).ids)
    elif (text := body.content if body.content is not None else body.prompt) is None:
        raise BadRequest("content is missing", "send content, or messages", "content")
    else:
        tokens = t.tokenizer.encode_prompt(text) if body.add_special else t.tokenizer.encode(text)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": t.info.context}


def detokenize(body: DetokenizeRequest, t: Texts) -> dict[str, Any]:
    if (wrong := next((i for i in body.tokens if not 0 <= i < t.info.vocab), None)) is not None:
        raise BadRequest(f"tokens has {wrong}, but ids go from 0 to {t.info.vocab - 1}", param="tokens")
    text = t.tokenizer.decode(body.tokens, True)
    return {"content": text, "prompt": text}


def apply(body: TemplateRequest, t: Texts) -> dict[str, Any]:
    made = prepare.render(t, body.messages, prepare.tools_of(body.tools), body.chat_template_kwargs, body.add_generation_prompt,
                          body.continue_final_message)
    return {"prompt": made.text, "tokens": list(made.ids)}


def count(body: anthropic.CountRequest, t: Texts) -> dict[str, Any]:
    return {"input_tokens": anthropic.count(body, t)}


VIEWS: dict[str, tuple[type[Wire], View]] = {
    "/chat/completions": (ChatRequest, openai.CHAT), "/completions": (CompletionRequest, openai.TEXT),
    "/responses": (ResponsesRequest, responses.VIEW), "/messages": (anthropic.MessagesRequest, anthropic.VIEW)}
LOOKS: dict[str, tuple[type[Wire], Callable[[Any, Texts], dict[str, Any]]]] = {
    "/tokenize": (TokenizeRequest, tokenize), "/detokenize": (DetokenizeRequest, detokenize), "/apply-template": (TemplateRequest, apply),
    "/messages/count_tokens": (anthropic.CountRequest, count)}


@dataclass(frozen=True)
class Read:
    """A body that was read in the other process: what is left of it without its texts, its jobs, and the grammars that nobody has checked yet."""

    body: Wire
    jobs: tuple[tuple[Job, Prompt, bool, list[dict[str, Any]] | None, bool], ...]
    grammars: tuple[tuple[str, str], ...]

    def prepared(self, t: Texts) -> list[Prepared]:
        """The jobs, once their grammars compile. Raises BadRequest."""
        for grammar, param in self.grammars:
            t.checker.check(grammar, param)
        return [Prepared(job, t, prompt, strip, tools, logprobs) for job, prompt, strip, tools, logprobs in self.jobs]


class _Noted:
    """Notes grammars, which another process compiles."""

    def __init__(self) -> None:
        self.grammars: list[tuple[str, str]] = []

    def check(self, grammar: str, param: str = "response_format") -> None:
        self.grammars.append((grammar, param))

    def close(self) -> None:
        self.grammars.clear()


def parsed(form: type[Wire], raw: bytes) -> Wire:
    """Raises BadRequest, in the words that a small body is refused in."""
    try:
        return form.model_validate(json.loads(raw))
    except json.JSONDecodeError as e:
        raise fault([{"type": "json_invalid", "loc": (e.pos,)}]) from None
    except ValidationError as e:
        raise fault(e.errors(include_url=False, include_input=False, include_context=False)) from None
    except (UnicodeDecodeError, RecursionError):
        raise BadRequest("There was an error parsing the body") from None


def _reader(info: Info, format_name: str, template: Path | None, merge: frozenset[str]) -> Callable[[tuple[str, bytes]], Read | bytes]:
    """In the other process: (path, body) to jobs, or to the answer's JSON where no model is asked."""
    os.nice(NICER)
    texts = read_texts(info, format_name, template, merge)

    def read(asked: tuple[str, bytes]) -> Read | bytes:
        path, raw = asked
        if path in LOOKS:
            form, look = LOOKS[path]
            return to_json(look(parsed(form, raw), texts))
        form, view = VIEWS[path]
        body, noted = parsed(form, raw), _Noted()
        jobs = view.prepare(body, replace(texts, checker=noted))
        (body.model_extra or {}).clear()
        small = body.model_copy(update={name: None for name in ("messages", "prompt", "input", "system") if name in form.model_fields})
        if len(pickle.dumps((small, [p.tools for p in jobs]))) > MOST_BESIDE_BYTES:
            raise BadRequest(f"what the body holds beside its messages or prompt is larger than {MOST_BESIDE_BYTES} bytes", "make it smaller")
        return Read(small, tuple((p.job, p.prompt, p.strip, p.tools, p.logprobs) for p in jobs), tuple(noted.grammars))
    return read


class Reader:
    """Reads large bodies for one model, one after the other, in a process that starts with the first."""

    def __init__(self, info: Info, format: str, template: Path | None, merge: frozenset[str]) -> None:
        self.info, self._apart = info, Apart(_reader, lambda: (info, format, template, merge), MOST_S)

    def read(self, path: str, raw: bytes) -> Read | bytes:
        """Raises BadRequest."""
        try:
            found: Read | bytes = self._apart.ask((path, raw))
        except Late:
            raise BadRequest(f"the body takes more than {MOST_S:g} s or too much memory to read", "make it smaller") from None
        return found

    def close(self) -> None:
        self._apart.close()
