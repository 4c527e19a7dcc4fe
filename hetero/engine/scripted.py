"""An engine that says what a script tells it, in place of a model: everything else (checks, scheduling, pages, sampling, aborts) is the real one.

A public fake for what stands above the engine: given tokens or logits, delays, NaN and failures.
"""

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Row
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero.arch import spec
from hetero.engine.engine import Engine
from hetero.engine.runner import Runner
from hetero.engine.scheduler import Limits, Work
from hetero.errors import EngineFailed
from hetero.gpu.ops import Step
from hetero.memory.cache import Cache
from hetero.request import Request

LOW = -100.0                             # logit of every token that the script does not say: at temperature 2 it still does not come


@dataclass(frozen=True)
class Script:
    """What one request hears: its tokens one by one (the last one again and again when it goes on), `delay_s` before each, and a fault in place
    of token `fault_at`: a NaN row when `fault` is None, else that error raised by the step."""

    tokens: tuple[int, ...]
    delay_s: float = 0.0
    fault_at: int | None = None
    fault: EngineFailed | None = None


Logits = Callable[[Request, int, tuple[int, ...]], Row[float] | Tensor]


class ScriptedRunner(Runner):
    """Logits from scripts: the records of the step are built as ever, and nothing is computed."""

    def __init__(self, script: Callable[[Request], Script | Logits], cache: Cache, vocab: int, limits: Limits, context: int) -> None:
        super().__init__(_silent, cache, vocab, limits.max_batch, limits.chunk_tokens, context)
        self.script = script

    def run(self, work: Row[Work]) -> tuple[Step, Tensor]:
        step = self.build(work)
        rows: list[Tensor] = []
        for w in work:
            sequence, script = w.sequence, self.script(w.sequence.request)
            if not (sequence.scoring or w.last):           # a prompt that goes on
                rows.append(torch.zeros(self.vocab))
                continue
            wanted = range(sequence.computed + 1, sequence.computed + w.count + 1) if sequence.scoring else [sequence.length]
            for length in wanted:
                said = tuple(sequence.tokens[sequence.prompt_length:length].tolist())
                rows.append(self._row(script, sequence.request, sequence.index, said))
        return step, torch.stack(rows) if rows else torch.zeros(0, self.vocab)

    def _row(self, script: Script | Logits, request: Request, index: int, said: tuple[int, ...]) -> Tensor:
        if not isinstance(script, Script):
            return torch.as_tensor(script(request, index, said), dtype=torch.float32)
        if script.delay_s:
            time.sleep(script.delay_s)
        row = torch.full((self.vocab,), LOW)
        if len(said) == script.fault_at:
            if script.fault is not None:
                raise script.fault
            return row.fill_(torch.nan)
        row[script.tokens[min(len(said), len(script.tokens) - 1)]] = 0.0
        return row


class _Silent:
    """The decoder that is never asked."""

    def __call__(self, step: Step, cache: Cache) -> Tensor:
        raise AssertionError("a scripted engine has no decoder")

    def diagnose(self, step: Step, cache: Cache) -> int | None:
        return None


_silent = _Silent()


class ScriptedEngine(Engine):
    """`script`: what each request is told, a Script, or a function (request, which of n, tokens so far) -> logits [vocab]."""

    def __init__(self, script: Callable[[Request], Script | Logits], vocab: int, context: int = 4096, eos: Iterable[int] = (),
                 limits: Limits = Limits(), pages: int = 4096) -> None:  # noqa: B008
        part = spec.GQA(heads=1, kv_heads=1, head_dim=1, rope=None)
        model = spec.Model("scripted", 1, vocab, 1e-6, (spec.Layer(part, spec.Dense(1)),), True, {}, context)
        cache = Cache(model, pages)
        super().__init__(_silent, cache, vocab, context, eos, limits)
        self.runner = ScriptedRunner(script, cache, vocab, limits, self.context)
