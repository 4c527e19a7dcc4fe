"""Serves many requests at once: pick, run, accept; knows counts, token ids and logits, but no model and no text.

Not thread-safe: one owner calls `add`, `step` and `abort`, in any order, between steps.
"""

import math
import secrets
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Row
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hetero.engine.admission import validate
from hetero.engine.runner import Decoder, Runner
from hetero.engine.sampling import Choice, Draw, Tally, choose, score
from hetero.engine.scheduler import Limits, Pace, Scheduler, Sequence, Work
from hetero.errors import BadRequest, EngineFailed, HeteroError
from hetero.gpu.ops import Step
from hetero.memory.cache import Cache
from hetero.memory.pages import Pages
from hetero.memory.residents import Residents
from hetero.request import Output, Request, TokenLogprob, uniform


@dataclass
class Stats:
    """Counters since the start (plain numbers, for metrics), and gauges of now."""

    running: int = 0
    waiting: int = 0
    pages: int = 0                       # these five of the layers that see furthest
    pages_held: int = 0
    pages_cached: int = 0
    host_pages: int = 0
    host_pages_used: int = 0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    preempted: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    prefill_s: float = 0.0               # of steps that had prompt tokens
    decode_s: float = 0.0                # of steps that had none
    decode_steps: int = 0
    worst_gap_s: float = 0.0             # longest step while somebody decoded
    stalls: int = 0                      # steps longer than max_stall_s while somebody decoded
    copied_pages: int = 0
    expert_asked: int = 0                # of decode steps where experts may live on the GPU: how many were asked for, and found there
    expert_hits: int = 0


class Live:
    """A request between add and its last output."""

    def __init__(self, request: Request, sequences: list[Sequence]) -> None:
        self.request, self.sequences = request, sequences
        self.tallies = {s.index: Tally(request.prompt) for s in sequences if _penalized(request)}
        self.draws: dict[int, Draw] = {}                   # of sequences whose draw is the same for every token
        self.open = set(range(len(sequences)))
        self.prefilled = False


def _penalized(request: Request) -> bool:
    s = request.sampling
    return s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0


def guess(tokens: int, context: int) -> float:
    """A shape to start from until steps are measured: seconds of `tokens` prompt tokens, attention growing with the context."""
    return 1e-3 * tokens * (1 + context / 16384)


class Engine:
    """Requests in, outputs out. `vocab`: the tokenizer's size; `context`: most tokens of a sequence; `eos`: ids that end one."""

    def __init__(self, decoder: Decoder, cache: Cache, vocab: int, context: int, eos: Iterable[int], limits: Limits = Limits(),  # noqa: B008
                 estimate: Callable[[int, int], float] = guess, seed: int | None = None, residents: Residents | None = None) -> None:
        self.cache, self.vocab, self.eos, self.limits = cache, vocab, frozenset(eos), limits
        self.pages = Pages(cache.sizes, cache.page_size, cache.marks if cache.states else None)
        short = [size.count for size, need in zip(cache.sizes, self.pages.need(context, limits.chunk_tokens), strict=True) if need > size.count]
        self.context = min(context, min(short, default=context) * cache.page_size)
        self.scheduler = Scheduler(self.pages, limits, Pace(estimate, cache.page_size))
        assert not cache.states or cache.rows >= limits.max_batch
        self.runner = Runner(decoder, cache, vocab, limits.max_batch, limits.chunk_tokens, self.context)
        self.live: dict[str, Live] = {}
        self.ready: list[Output] = []                      # outputs that no step brought: aborts
        self.failure: EngineFailed | None = None
        self.torn = False                                  # the last step was interrupted: states have moved, counts have not
        self.arrivals, self.seeds, self.residents = 0, seed, residents
        self.count = Stats(pages=cache.sizes[0].count, host_pages=cache.sizes[0].host_count)

    # -- the public face ----------------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not self.live and not self.ready

    def add(self, request: Request) -> None:
        """Queues a request. Raises BadRequest (`param` names the field) or ContextExceeded before anything is changed."""
        if self.failure is not None:
            raise self.failure
        validate(request, self.vocab, self.context, self.limits)
        if request.id in self.live:
            raise BadRequest(f"a request with id {request.id!r} is running", "give each request its own id", "id")
        self.arrivals += 1
        sampling, now = request.sampling, time.monotonic()
        seed = sampling.seed if sampling.seed is not None else self._seed()
        salt = 0 if request.cache_prompt else self.arrivals
        room = min(self.context, len(request.prompt) + (sampling.max_tokens or 256))
        sequences = []
        for index in range(sampling.n):
            tokens = np.zeros(room, np.int32)
            tokens[:len(request.prompt)] = request.prompt
            table = self.pages.table(salt, len(request.prompt))
            sequences.append(Sequence(request, index, seed, self.arrivals, now, tokens, len(request.prompt), table,
                                      request.mask.fork() if request.mask is not None and index else request.mask,
                                      request.watcher.fork() if request.watcher is not None and index else request.watcher))
        self.live[request.id] = Live(request, sequences)
        self.scheduler.add(sequences[0])                   # the others share its prompt's pages, so they wait for them
        self.count.requests += 1

    def abort(self, id: str) -> None:
        """Ends a request in whatever phase it is; its pages are free at once, and its last output comes with the next step. Unknown ids: nothing."""
        live = self.live.pop(id, None)
        if live is None:
            return
        for sequence in live.sequences:
            if sequence.index in live.open:
                self.scheduler.remove(sequence)
                self.ready.append(self._output(sequence, (), finish="abort"))
        self.count.aborted += 1

    def step(self) -> list[Output]:
        """One forward over what is to run now: one output per sequence that got a token or ended. Raises EngineFailed when it cannot go on,
        after which every request has ended with "error" and `add` raises it too."""
        if self.failure is not None and not self.ready:
            raise self.failure
        outputs, self.ready = self.ready, []
        began = time.monotonic()
        if self.torn and self.cache.states:
            self.scheduler.restart(began)
        work = self.scheduler.pick(began)
        if not work:
            if not self.scheduler.running:
                self.scheduler.check()
            return outputs
        copies = len(self.pages.pending)
        while self.pages.pending:                          # one by one: an interrupt loses none, and one alone may run twice
            self.cache.copy([self.pages.pending[0]])
            self.pages.pending.popleft()
        self.torn = True
        try:
            step, logits = self.runner.run(work)
            outputs += self._accept(work, step, logits)
        except EngineFailed as failure:
            return outputs + self._fail(failure)
        except torch.OutOfMemoryError:
            return outputs + self._drop(work)
        self.torn = False
        self._measure(work, time.monotonic() - began, copies)
        return outputs

    def stats(self) -> Stats:
        """The counters, with the gauges of now."""
        c = self.count
        c.running, c.waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        widest = self.pages.pools[0]
        c.pages_cached, c.host_pages_used = len(widest.passed) + len(widest.cached), len(widest.host_used)
        c.pages_held = widest.count - len(widest.free) - c.pages_cached
        if self.residents is not None:
            c.expert_asked, c.expert_hits = self.residents.asked, self.residents.hits
        c.preempted = self.scheduler.preempted
        return c

    def clear(self) -> None:
        """Forgets cached prompts that nobody is using."""
        self.pages.clear()

    # -- accepting a step ---------------------------------------------------------------------------------------------------------------

    def _accept(self, work: list[Work], step: Step, logits: Tensor) -> list[Output]:
        """Turns logits into tokens and sequences into their next state."""
        picked: list[tuple[Work, int]] = []                # whose next token is sampled, from which row of the logits
        chunks: list[tuple[Work, int]] = []                # whose prompt goes on
        broken: list[Sequence] = []
        row = -1
        for w in work:
            row += w.count if w.sequence.scoring else 1
            if w.sequence.scoring and not self._score(w, logits[row + 1 - w.count:row + 1]):
                broken.append(w.sequence)
            else:
                (picked if w.last else chunks).append((w, row))
        choices = self._choose(picked, logits) if picked else []
        broken += [w.sequence for (w, _), choice in zip(picked, choices, strict=True) if choice.fault == "finite"]
        if chunks:                                         # a bad value anywhere before spreads to a chunk's last row
            sums = logits[[row for _, row in chunks]].sum(-1).tolist()
            broken += [w.sequence for (w, _), total in zip(chunks, sums, strict=True) if not math.isfinite(total)]
        outputs = self._break(broken, step) if broken else []
        for w in work:
            if w.sequence.row >= 0:
                self.scheduler.advance(w)
        outputs += [self._read(w.sequence) for w, _ in chunks if w.sequence.request.progress and w.sequence.row >= 0 and not w.sequence.generated]
        for (w, _), choice in zip(picked, choices, strict=True):
            if choice.fault == "mask":
                outputs.append(self._end(w.sequence, (), "error", error=w.sequence.trouble or "the constraint allows no token here"))
            elif choice.fault is None:
                outputs.append(self._advance(w.sequence, choice))
        return outputs

    def _choose(self, picked: list[tuple[Work, int]], logits: Tensor) -> list[Choice]:
        rows = [row for _, row in picked]
        if rows != list(range(len(logits))):
            logits = logits[rows]
        return choose(logits, [self._draw(w.sequence) for w, _ in picked])

    def _draw(self, sequence: Sequence) -> Draw:
        live, index = self.live[sequence.request.id], sequence.index
        if (same := live.draws.get(index)) is not None:
            return same
        sampling, at = sequence.request.sampling, sequence.generated
        early = tuple(self.eos.union(sampling.stop_ids)) if at < sampling.min_tokens else ()
        draw = Draw(sampling, sequence.seed, at, index, live.tallies.get(index), early, self._allowed(sequence))
        if draw.plain and draw.greedy and sequence.mask is None:
            live.draws[index] = draw
        return draw

    def _allowed(self, sequence: Sequence) -> Row[int] | None:
        """The request's mask; nothing at all when the mask fails, which ends that request alone."""
        if sequence.mask is None:
            return None
        try:
            return sequence.mask.allowed()
        except HeteroError as error:
            sequence.trouble = error.message
            return [0] * -(-self.vocab // 32)

    def _score(self, w: Work, logits: Tensor) -> bool:
        """Adds the log-probabilities of the prompt tokens that follow the work's rows; False when the logits are not finite."""
        sequence, scores = w.sequence, w.sequence.prompt_scores
        if not bool(torch.isfinite(logits.sum())):
            return False
        if not scores:
            scores.append(None)
        start = len(scores)                                # more than computed + 1 after a preemption
        end = min(sequence.computed + w.count + 1, sequence.prompt_length)
        if start < end:
            rows = logits[start - 1 - sequence.computed:end - 1 - sequence.computed]
            top = sequence.request.sampling.prompt_logprobs or 0
            scores += score(rows, sequence.tokens[start:end].tolist(), [top] * (end - start))
        return True

    def _advance(self, sequence: Sequence, choice: Choice) -> Output:
        """Takes a sampled token, and decides whether the sequence ends with it."""
        request, token = sequence.request, choice.token
        live, sampling = self.live[request.id], request.sampling
        if sequence.generated == 0:
            self.count.prompt_tokens += sequence.prompt_length
            self.count.cached_tokens += sequence.cached_tokens
            self._prefilled(live)
        sequence.append(token)
        if sequence.index in live.tallies:
            live.tallies[sequence.index].add(token)
        try:
            stop = sequence.watcher is not None and sequence.watcher.see(token)
            if sequence.mask is not None:
                sequence.mask.accept(token)
        except HeteroError as error:
            return self._end(sequence, (token,), "error", choice.logprob, error.message)
        stop = stop or token in sampling.stop_ids or (token in self.eos and not sampling.ignore_eos)
        full = sequence.length >= self.context or (sampling.max_tokens is not None and sequence.generated >= sampling.max_tokens)
        finish = "stop" if stop else "length" if full else None
        if finish:
            return self._end(sequence, (token,), finish, choice.logprob)
        return self._output(sequence, (token,), choice.logprob)

    def _prefilled(self, live: Live) -> None:
        """The prompt's pages are in the index: the other n - 1 sequences may come and share them."""
        if not live.prefilled:
            live.prefilled = True
            for sequence in live.sequences[1:]:
                self.scheduler.add(sequence)

    def _break(self, broken: list[Sequence], step: Step) -> list[Output]:
        """Ends sequences whose logits are not finite: their pages are zeroed, never indexed, and the layer is named where it is known."""
        layer = self.runner.decoder.diagnose(step, self.cache) if not self.cache.states else None      # running again would move the states
        where = f"after layer {layer}" if layer is not None else "in the logits"
        outputs = []
        for sequence in broken:
            self.cache.scrub([[p for p in line[sequence.table.committed:] if p >= 0] for line in sequence.table.pages])
            outputs.append(self._end(sequence, (), "error", error=f"NaN or infinity {where} at token {sequence.length}"))
            live = self.live.get(sequence.request.id)
            if live is not None and not live.prefilled:    # the others have the same prompt
                outputs += [self._end(s, (), "error", error=outputs[-1].error) for s in live.sequences if s.index in live.open]
        return outputs

    def _drop(self, work: list[Work]) -> list[Output]:
        """The device had no room for a step: the request that asked most of it ends, the others' work is done again."""
        worst = max(work, key=lambda w: w.count)
        why = f"out of GPU memory in a step of {sum(w.count for w in work)} tokens; a smaller --chunk or --expert-cache leaves more room"
        live = self.live[worst.sequence.request.id]
        return [self._end(s, (), "error", error=why) for s in live.sequences if s.index in live.open]

    def _end(self, sequence: Sequence, tokens: tuple[int, ...], finish: str, logprob: TokenLogprob | None = None, error: str | None = None) -> Output:
        self.scheduler.remove(sequence)
        live = self.live[sequence.request.id]
        live.open.discard(sequence.index)
        if finish == "error":
            self.count.failed += 1
        if not live.open:
            del self.live[sequence.request.id]
            self.count.finished += 1
        return self._output(sequence, tokens, logprob, finish, error)

    def _output(self, sequence: Sequence, tokens: tuple[int, ...], logprob: TokenLogprob | None = None, finish: str | None = None,
                error: str | None = None) -> Output:
        first = sequence.generated == len(tokens)
        return Output(sequence.request.id, sequence.index, tokens, (logprob,) if logprob else (), tuple(sequence.prompt_scores) if first else (),
                      finish, error, sequence.cached_tokens, sequence.cache_miss, sequence.prompt_length, sequence.seed)

    def _read(self, sequence: Sequence) -> Output:
        """How much of a prompt is read."""
        return Output(sequence.request.id, sequence.index, (), cached_tokens=sequence.cached_tokens, prompt_tokens=sequence.prompt_length,
                      read_tokens=sequence.computed)

    def _fail(self, failure: EngineFailed) -> list[Output]:
        """The engine cannot go on: every request ends with the reason."""
        self.failure = failure
        return [self._end(s, (), "error", error=failure.message) for live in list(self.live.values()) for s in live.sequences if s.index in live.open]

    # -- counting -----------------------------------------------------------------------------------------------------------------------

    def _measure(self, work: list[Work], took_s: float, copies: int) -> None:
        c = self.count
        chunks = [w for w in work if w.count > 1]
        tokens, decodes = sum(w.count for w in chunks), len(work) - len(chunks)
        c.steps, c.copied_pages = c.steps + 1, c.copied_pages + copies
        c.prefill_tokens, c.decode_tokens = c.prefill_tokens + tokens, c.decode_tokens + decodes
        if decodes:
            c.worst_gap_s = max(c.worst_gap_s, took_s)
            c.stalls += took_s > self.limits.max_stall_s
        if chunks:
            c.prefill_s += took_s
        else:
            c.decode_s += took_s
            c.decode_steps += 1
        self.scheduler.pace.learn(tokens, max((w.sequence.computed for w in chunks), default=0), took_s)

    def _seed(self) -> int:
        return secrets.randbits(63) if self.seeds is None else int(uniform(self.seeds, self.arrivals) * 2**53)
