"""A decoder on the CPU whose decode steps are recorded once per number of sequences and then run as one job; knows no arithmetic."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_kernels.small import in_series
from cpu_kernels.team import Prepared
from hetero.gpu.host import Host
from hetero.gpu.ops import Step
from hetero.model.attention import Cache
from hetero.model.decoder import Decoder


@dataclass(frozen=True)
class Tape:
    """A recorded step: its inputs and its logits stand at fixed places, `job` goes from the ones to the others."""

    step: Step
    logits: Tensor
    job: Prepared


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
        here.pages[:, :step.pages.shape[1]].copy_(step.pages)
        for mine, given in ((here.tokens, step.tokens), (here.positions, step.positions), (here.lengths, step.lengths), (here.slots, step.slots)):
            mine.copy_(given)
        self.ops.team.run(tape.job)
        return tape.logits

    def record(self, S: int, cache: Cache) -> Tape:
        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype)
        step = Step(ints(S, dtype=torch.int64), ints(S), torch.arange(S + 1, dtype=torch.int32), ints(S), ints(S, self.width),
                    ints(S, dtype=torch.int64), ints(S), torch.arange(S), 1)
        with self.ops.record() as tape:
            logits = self.decoder(step, cache)
        return Tape(step, logits, in_series(tape))

    def diagnose(self, step: Step, cache: Cache) -> int | None:
        return self.decoder.diagnose(step, cache)
