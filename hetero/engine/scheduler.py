"""What runs next, by counts alone: decodes first, then prefill chunks within the stall bound, admission by pages; knows no tensor and no text.

Order: higher priority first, then first come, first served. A request that has waited longer than `patience_s` goes before every priority, and
nobody passes it any more. When pages run out the last in that order gives its pages back and is computed again later; nothing is lost.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hetero.memory.pages import Pages, Table
from hetero.request import Mask, Request, TokenLogprob, Watcher

MARGIN = 0.7                             # of the bound is aimed at: cost grows along a prompt faster than it is learned
LOOK, LOOK_PAGES = 32, 8192              # waiting sequences, and pages of theirs, considered in one step: the queue may be long


@dataclass(frozen=True)
class Limits:
    """Bounds of one engine. `max_stall_s`: longest step while somebody decodes; `chunk_tokens`: most prompt tokens in one step."""

    max_batch: int = 16
    chunk_tokens: int = 2048
    max_stall_s: float = 0.2
    patience_s: float = 30.0
    max_n: int = 128
    max_logprobs: int = 128
    max_bias: int = 4096
    prompt_logprobs_chunk: int = 256     # rows of logits held at once


@dataclass(eq=False, slots=True)
class Sequence:
    """One of a request's n sequences: its tokens so far, how many of them are in the cache, and its pages.

    `tokens[:length]` are prompt and output; `computed` of them have their KV written. row: its row of the batch, -1 while it waits.
    """

    request: Request
    index: int
    seed: int
    arrival: int
    since: float                         # when it began to wait, seconds
    tokens: np.ndarray                   # int32, capacity ≥ length
    length: int
    table: Table
    mask: Mask | None = None
    watcher: Watcher | None = None
    computed: int = 0
    row: int = -1
    cached_tokens: int = 0
    cache_miss: str | None = None
    admitted: bool = False               # has run before: cached_tokens stays that of the first time
    prompt_scores: list[TokenLogprob | None] = field(default_factory=list)
    urgent: bool = False                 # has waited beyond patience
    trouble: str | None = None           # what its mask or watcher failed with
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.request.prompt)

    @property
    def generated(self) -> int:
        return self.length - self.prompt_length

    @property
    def scoring(self) -> bool:
        """Whether prompt logprobs are still wanted: then every prompt token is evaluated and nothing is reused."""
        return self.index == 0 and self.request.sampling.prompt_logprobs is not None and len(self.prompt_scores) < self.prompt_length

    @property
    def key(self) -> tuple[int, int, int, int]:
        return (0 if self.urgent else 1, 0 if self.urgent else -self.request.priority, self.arrival, self.index)

    def append(self, token: int) -> None:
        if self.length == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.zeros(max(64, self.length), np.int32)])
        self.tokens[self.length] = token
        self.length += 1


@dataclass(frozen=True, slots=True)
class Work:
    """`count` tokens of one sequence to evaluate in this step, from `sequence.computed` on; `last`: its next token is sampled after."""

    sequence: Sequence
    count: int

    @property
    def last(self) -> bool:
        return self.sequence.computed + self.count == self.sequence.length


class Pace:
    """How many prompt tokens fit into a step beside the decodes, from an estimate and what steps really took.

    `estimate(tokens, context)` -> seconds that so many prompt tokens add to a step, the last at position `context`. Only its shape matters: measured
    steps correct its scale, at once upwards and slowly downwards, and a chunk is never more than twice the largest one measured.
    """

    def __init__(self, estimate: Callable[[int, int], float], page_size: int) -> None:
        self.estimate, self.page_size, self.scale, self.decode_s, self.largest = estimate, page_size, 1.0, 0.0, page_size

    def seconds(self, tokens: int, context: int) -> float:
        return self.decode_s + self.scale * self.estimate(tokens, context)

    def chunk(self, context: int, bound_s: float, most: int) -> int:
        """The most tokens, a multiple of the page size and at least one page, that keep the step within `bound_s`."""
        sizes = range(self.page_size, min(most, 2 * self.largest) + 1, self.page_size)
        if not sizes:
            return most
        n = bisect.bisect_right(sizes, bound_s, key=lambda tokens: self.seconds(tokens, context + tokens) / MARGIN)
        return sizes[max(0, n - 1)]

    def learn(self, tokens: int, context: int, took_s: float) -> None:
        """Corrects the estimate by one measured step, with `tokens` prompt tokens or (0) with decodes alone."""
        if not tokens:
            self.decode_s += (0.5 if took_s > self.decode_s else 0.1) * (took_s - self.decode_s)
            return
        ratio = max(took_s - self.decode_s, 0.1 * took_s) / max(self.estimate(tokens, context), 1e-9)
        self.scale += (1.0 if self.largest == self.page_size or ratio > self.scale else 0.1) * (ratio - self.scale)
        self.largest = max(self.largest, tokens)


class Scheduler:
    """Waiting and running sequences over one set of pages."""

    def __init__(self, pages: Pages, limits: Limits, pace: Pace) -> None:
        self.pages, self.limits, self.pace = pages, limits, pace
        self.waiting: list[Sequence] = []                  # in order of `key`
        self.running: list[Sequence] = []                  # too: a key changes only while its sequence waits
        self.rows = list(range(limits.max_batch - 1, -1, -1))
        self.preempted = 0

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=lambda s: s.key)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, in whatever phase it is, and gives its pages back."""
        if sequence.row >= 0:
            self._stop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.rows.append(sequence.row)
        sequence.row, sequence.computed = -1, 0
        self.pages.close(sequence.table)

    def _preempt(self, sequence: Sequence, now: float) -> None:
        self._stop(sequence)
        self.preempted += 1
        sequence.since = now
        self.add(sequence)

    def _room(self, sequence: Sequence, tokens: int, now: float) -> bool:
        """Pages for `tokens` tokens of a running sequence, if need be from those who come after it; False: it had to give way itself."""
        self.pages.retire(sequence.table, sequence.computed)
        while not self.pages.extend(sequence.table, tokens):
            victim = self.running[-1]
            self._preempt(victim, now)
            if victim is sequence:
                return False
        return True

    def restart(self, now: float) -> None:
        """Every running sequence is computed again: what a step left behind is not known."""
        for sequence in list(self.running):
            self._preempt(sequence, now)

    def pick(self, now: float) -> list[Work]:
        """The next step: empty when there is nothing to run. Every running sequence that decodes gets its token, before any prompt does."""
        self._age(now)
        work: list[Work] = []
        ordered = list(self.running)
        for sequence in ordered:
            if sequence.row >= 0 and sequence.computed == sequence.length - 1 and self._room(sequence, sequence.length, now):
                work.append(Work(sequence, 1))
        decodes, left = len(work), None
        for sequence in ordered:
            if sequence.row >= 0 and sequence.computed < sequence.length - 1:
                left = self._chunk(work, sequence, decodes, left, now)
        while self.waiting and self.rows and (left is None or left > 0):
            admitted = self._admit()
            if admitted is None:
                break
            left = self._chunk(work, admitted, decodes, left, now)
            if admitted.row < 0:                           # it had to give way at once
                break
        return [w for w in work if w.sequence.row >= 0]

    def _age(self, now: float) -> None:
        late = [s for s in self.waiting if not s.urgent and now - s.since > self.limits.patience_s]
        for sequence in late:
            sequence.urgent = True
        if late:
            self.waiting.sort(key=lambda s: s.key)

    def _chunk(self, work: list[Work], sequence: Sequence, decodes: int, left: int | None, now: float) -> int:
        """Adds what fits of `sequence`'s prompt to `work`; returns the prompt tokens this step can still take."""
        if left is None:
            left = self.limits.chunk_tokens
            if decodes:
                left = self.pace.chunk(sequence.computed, self.limits.max_stall_s, left)
        most = min(left, self.limits.prompt_logprobs_chunk) if sequence.scoring else left
        count = self._whole(sequence, min(most, sequence.length - sequence.computed))
        if count > 0 and self._room(sequence, sequence.computed + count, now):
            work.append(Work(sequence, count))
            return left - count
        return left

    def _whole(self, sequence: Sequence, count: int) -> int:
        """For a model with states: `count`, cut so that the chunk ends where its state is worth keeping, the last of the prompt's full pages."""
        if self.pages.marks is None:
            return count
        size, start, end = self.pages.page_size, sequence.computed, sequence.computed + count
        last = (sequence.length - 1) // size * size
        if start < last < end:
            return last - start
        return end // size * size - start if start < end // size * size and end < last else count

    def advance(self, work: Work) -> None:
        """The work is done and its values are good: its full pages may be shared, and its state kept."""
        sequence, size = work.sequence, self.pages.page_size
        sequence.computed += work.count
        self.pages.commit(sequence.table, sequence.tokens, sequence.computed)
        if self.pages.marks is not None:
            prompt = sequence.computed == (sequence.prompt_length - 1) // size * size
            self.pages.keep(sequence.table, sequence.tokens, sequence.computed, sequence.row, moving=not prompt)

    def _admit(self) -> Sequence | None:
        """The first waiting sequence whose pages are there, in order; none may pass a sequence that has waited beyond patience."""
        prompts = [s for s in self.running if s.computed < s.length - 1]       # who decodes has its pages already
        promised = [sum(owed) for owed in zip(*map(self._owed, prompts), strict=True)] or [0] * len(self.pages.pools)
        if self.running and any(pool.available <= owed + len(self.running) for pool, owed in zip(self.pages.pools, promised, strict=True)):
            return None                                    # not even one page: no need to look for prefixes
        coming = {d for s in prompts for d in s.table.digests[s.table.committed:]}
        looked = 0
        for sequence in self.waiting[:LOOK]:
            table, looked = sequence.table, looked + sequence.length // self.pages.page_size
            if looked > LOOK_PAGES and sequence is not self.waiting[0]:
                return None
            limit = 0 if sequence.scoring else sequence.length - 1       # the last token is always evaluated
            match = self.pages.match(table, sequence.tokens[:sequence.length], limit)
            next_page = match.tokens // self.pages.page_size
            if not sequence.urgent and next_page < len(table.digests) and table.digests[next_page] in coming:
                continue                                   # somebody is computing its next page right now: shared when it is there
            needs = self.pages.need(sequence.length + 1, self.limits.chunk_tokens)
            groups = zip(self.pages.pools, needs, self.pages.shared(match), promised, strict=True)
            if not self.running or all(need - shared + owed + len(self.running) <= pool.available for pool, need, shared, owed in groups):
                self.waiting.remove(sequence)
                sequence.row = self.rows.pop()
                sequence.computed = self.pages.take(table, match, sequence.row)
                if not sequence.admitted:
                    sequence.admitted, sequence.cached_tokens = True, sequence.computed
                    sequence.cache_miss = match.miss if sequence.computed == match.tokens else f"evicted@tok {sequence.computed}"
                    if sequence.scoring or (table.salt and not sequence.computed):       # the request's own field keeps it from reusing
                        sequence.cache_miss = "prompt_logprobs" if sequence.scoring else "cache_prompt"
                bisect.insort(self.running, sequence, key=lambda s: s.key)
                return sequence
            if sequence.urgent:
                return None
        return None

    def _owed(self, sequence: Sequence) -> list[int]:
        """Pages of each group that a running sequence's prompt was promised and has not taken yet."""
        table, needs = sequence.table, self.pages.need(sequence.length, self.limits.chunk_tokens)
        return [max(0, need - len(line) + retired) for need, line, retired in zip(needs, table.pages, table.retired, strict=True)]

    def check(self) -> None:
        """Raises AssertionError when a row or a page is lost; called when idle and by tests."""
        assert sorted([*self.rows, *(s.row for s in self.running)]) == list(range(self.limits.max_batch))
        assert all(s.row < 0 and not any(s.table.pages) for s in self.waiting)
        assert all([s.key for s in some] == sorted(s.key for s in some) for some in (self.waiting, self.running))
        assert all(0 <= s.computed < s.length for s in self.running)
        self.pages.check(s.table for s in self.running)
