"""Rows to requests and outputs to lines, for one model: the server's own checks and words, seeds from ids; knows no engine and no file."""

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from hetero import llm
from hetero.arch.spec import Model
from hetero.batch.journal import DUPLICATE
from hetero.batch.rows import CHAT, COMPLETIONS, Row, Wanted
from hetero.engine.scheduler import Limits
from hetero.errors import BadRequest, HeteroError
from hetero.memory.plan import Plan
from hetero.options import Options
from hetero.request import Output
from hetero.text.reply import Reply
from hetero.weights.source import EMBEDDED, Source, open_source
from hetero.wire import prepare
from hetero.wire.answers import ChatAnswer, CompletionAnswer, error_body
from hetero.wire.prepare import Prepared, Texts
from hetero.wire.records import Info
from hetero.wire.responses import ResponseAnswer, ResponsesRequest, chat_request
from hetero.wire.schema import ChatRequest, CompletionRequest, fault

R = TypeVar("R", ChatRequest, CompletionRequest)
VARYING = ("timings", "cache_miss")      # of a server's answer: what depends on the neighbours and the clock


@dataclass
class Ready:
    """A row with its jobs and the answer that grows from their outputs."""

    row: Row
    jobs: list[Prepared]
    answer: ChatAnswer | CompletionAnswer | ResponseAnswer

    @property
    def sequences(self) -> int:
        return sum(j.job.sampling.n for j in self.jobs)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(j.job.prompt) for j in self.jobs)

    def replies(self) -> list[Reply]:
        if isinstance(self.answer, ResponseAnswer):
            return [self.answer.choice.reply]
        return [c.reply for c in (self.answer.choices if isinstance(self.answer, ChatAnswer) else self.answer.flat)]


def hash_of(seed: int, id: str) -> bytes:
    return hashlib.blake2b(id.encode("utf-8", "surrogatepass"), key=seed.to_bytes(16, "little", signed=True), digest_size=20).digest()


def seed_of(seed: int, id: str) -> int:
    """A row's seed, below 2^53 so that every JSON reader keeps it: of the batch's seed and its id, whatever ran before it."""
    return int.from_bytes(hash_of(seed, id)[:8], "little") >> 11


def called(info: Info) -> str:
    """What the server would call the model."""
    return "embedded" if info.folder == str(EMBEDDED) else Path(info.name).name


class Desk:
    """Takes rows for the model of `texts`."""

    def __init__(self, texts: Texts, wanted: Wanted) -> None:
        self.texts, self.wanted, self.served = texts, wanted, wanted.served or called(texts.info)

    def take(self, row: Row) -> Ready:
        """A row's jobs, checked as the server checks them. Raises BadRequest naming the field."""
        if not isinstance(name := row.body.get("model"), str | None) or not prepare.serves(name, (self.served,), self.texts.info.name):
            raise BadRequest(f"the model {str(name)[:80]!r} is not run here; {self.served!r} is", "--served-model-name is what rows call it", "model")
        id, seed = hash_of(self.wanted.seed, row.id)[8:].hex(), seed_of(self.wanted.seed, row.id)
        try:
            jobs, answer = self._take(row, seed)
        except ValidationError as e:
            raise fault(e.errors()) from None
        for i, job in enumerate(jobs):
            job.job = replace(job.job, id=f"{job.job.id.split('-')[0]}-{id}" + (f"-{i}" if i else ""))
        if isinstance(answer, ResponseAnswer):
            answer.items.id = f"resp_{id}"
        answer.created = self.wanted.created
        return Ready(row, jobs, answer)

    def _take(self, row: Row, seed: int) -> tuple[list[Prepared], ChatAnswer | CompletionAnswer | ResponseAnswer]:
        if row.url == COMPLETIONS:
            r = self._filled(CompletionRequest.model_validate(row.body), seed)
            if row.short and r.max_tokens is None:
                r.max_tokens = self.texts.info.context
            jobs = prepare.completions(r, self.texts)
            return jobs, CompletionAnswer(jobs, self.served, bool(r.echo), r.max_tokens == 0)
        asked = None if row.url == CHAT else ResponsesRequest.model_validate(row.body)
        chat = self._filled(ChatRequest.model_validate(row.body) if asked is None else chat_request(asked), seed)
        job = prepare.chat(chat, self.texts)
        return [job], ChatAnswer(job, self.served) if asked is None else ResponseAnswer(asked, job, self.served)

    def _filled(self, r: R, seed: int) -> R:
        """The body with what the user says where it says nothing; other sampling is among the model's defaults (`desk_of`)."""
        given = self.wanted.sampling or {}
        r.seed = seed if r.seed is None else r.seed
        if r.max_tokens is None and not (isinstance(r, ChatRequest) and r.max_completion_tokens is not None):
            r.max_tokens = given.get("max_tokens")
        if r.stop is None and given.get("stop"):
            r.stop = list(given["stop"])
        return r

    def add(self, ready: Ready, job: int, output: Output) -> None:
        ready.answer.add(job, output)

    def line(self, ready: Ready) -> dict[str, Any]:
        """The output line of a row whose sequences have all ended: a function of row, seed and model alone."""
        body = {k: v for k, v in ready.answer.body().items() if k not in VARYING}
        for details in ("prompt_tokens_details", "input_tokens_details"):
            body["usage"].pop(details, None)
        return self._line(ready.row.id, 200, body, None)

    def failed(self, id: str | None, number: int, e: HeteroError, status: int = 400, code: str = "invalid_request") -> dict[str, Any]:
        """The line of a row that has no answer."""
        body = error_body(e, status)
        error = {"code": body["error"]["code"] or code, "message": body["error"]["message"], "param": body["error"]["param"], "line": number}
        return self._line(id, status, body, error)

    def duplicate(self, id: str, number: int, first: int) -> dict[str, Any]:
        return self.failed(id, number, BadRequest(f"the id {id!r} is that of line {first} too", "give each row its own", "custom_id"), 400, DUPLICATE)

    def _line(self, id: str | None, status: int, body: dict[str, Any], error: dict[str, Any] | None) -> dict[str, Any]:
        name = hash_of(self.wanted.seed, id or "").hex() if id is not None else hash_of(self.wanted.seed, str(error and error["line"])).hex()
        return {"id": f"batch_req_{name}", "custom_id": id, "response": {"status_code": status, "request_id": f"req_{name}", "body": body},
                "error": error}


def open_desk(name: str | None, options: Options, plan: Plan, wanted: Wanted) -> tuple[Desk, Source, Model, Options]:
    """The text side of a model whose weights are not read; its spec, and the options as it means them."""
    source = open_source(name, partial(llm.fetch, offline=options.offline, progress=lambda *_: None))
    skeleton, options = llm.bridge_to(source, options)
    model, (tokenizer, _) = skeleton.model if skeleton else source.spec().first(options.layers), llm.read_text(source, options.load_format != "dummy")
    limits = Limits(plan.max_batch, plan.chunk, options.max_stall_ms / 1e3)
    return desk_of(llm.describe(source, options, min(tokenizer.size, model.vocab), plan.ctx, limits), wanted), source, model, options


def desk_of(info: Info, wanted: Wanted) -> Desk:
    """The text side of a model. Reads its tokenizer."""
    defaults = {k: v for k, v in (wanted.sampling or {}).items() if k not in ("max_tokens", "stop")}
    info = replace(info, sampling=replace(info.sampling, **defaults))
    return Desk(prepare.read_texts(info, wanted.tool_format, wanted.chat_template), wanted)
