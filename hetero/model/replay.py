"""A decoder on the CPU whose decode steps are recorded once per number of sequences and then run as one job; knows no arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cpu_kernels.small import in_series
from cpu_kernels.team import Prepared
from hetero.gpu.host import Host
from hetero.gpu.ops import Step
from hetero.gpu.room import Room
from hetero.model.attention import Cache
from hetero.model.decoder import Decoder


@dataclass(frozen=True)
class Tape:
    """A recorded step: its inputs and its logits stand at fixed places, `job` goes from the ones to the others through `room`. `names` of its
    parts, `times` when each began and the last ended (ns), for a replay that is watched."""

    step: Step
    logits: Tensor
    job: Prepared
    room: Room
    names: Sequence[str]
    times: np.ndarray


class Replay:
    """The decoder, with steps of one token per sequence replayed. `width`: most pages of a sequence."""

    def __init__(self, decoder: Decoder, ops: Host, most: int, width: int) -> None:
        self.decoder, self.ops, self.most, self.width = decoder, ops, most, width
        self.cache: Cache | None = None
        self.tapes: dict[int, Tape] = {}

    def __call__(self, step: Step, cache: Cache) -> Tensor:
        """[R, V] float32 logits, valid until the next step."""
        S = step.tokens.shape[0]
        if not self.ops.recordable or step.longest != 1 or not S == step.wanted.shape[0] <= self.most or step.pages.shape[1] > self.width:
            return self.decoder(step, cache)
        if cache is not self.cache:
            self.cache, self.tapes = cache, {}
        if S not in self.tapes:
            self.tapes[S] = self.record(S, cache)
        tape = self.tapes[S]
        here = tape.step
        for g, (pages, slots) in enumerate(((here.pages, here.slots), *here.others)):
            given_pages, given_slots = step.others[g - 1] if g and step.others else (step.pages, step.slots)
            pages[:, :given_pages.shape[1]].copy_(given_pages)
            slots.copy_(given_slots)
        for mine, given in ((here.tokens, step.tokens), (here.positions, step.positions), (here.lengths, step.lengths)):
            mine.copy_(given)
        tape.times[0] = self.ops.spent is not None
        self.ops.team.run(tape.job)
        if self.ops.spent is not None:
            for name, took in zip(tape.names, np.diff(tape.times).tolist(), strict=True):
                self.ops.spend(name, took * 1e-9)
        return tape.logits

    def record(self, S: int, cache: Cache) -> Tape:
        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype)
        step = Step(ints(S, dtype=torch.int64), ints(S), torch.arange(S + 1, dtype=torch.int32), ints(S), ints(S, self.width),
                    ints(S, dtype=torch.int64), ints(S), torch.arange(S), 1,
                    others=tuple((ints(S, self.width), ints(S, dtype=torch.int64)) for _ in self.decoder.model.windows[1:]))
        with self.ops.record() as (tape, room):
            logits = self.decoder(step, cache)
        times = np.zeros(len(tape) + 1, np.int64)
        return Tape(step, logits, in_series(tape, times), room, [job.name for job in tape], times)

    def diagnose(self, step: Step, cache: Cache) -> int | None:
        return self.decoder.diagnose(step, cache)
