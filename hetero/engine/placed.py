"""What a plan made real is: the records and small rules that every device's placing shares; places nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hetero.arch.spec import Model
from hetero.errors import UnusableHardware
from hetero.gpu.ops import Check, Row, Step
from hetero.memory.cache import Cache
from hetero.memory.kv import PAGE as PAGE
from hetero.memory.plan import Plan
from hetero.memory.residents import Residents
from hetero.memory.stream import Pinned, Ring

KV_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "fp16", "fp8": "fp8"}


class Run(Protocol):
    """What an engine drives: a decoder with its decode steps replayed."""

    def __call__(self, step: Step, cache: Cache) -> Tensor: ...

    def diagnose(self, step: Step, cache: Cache) -> int | None: ...


class Reporting(Protocol):
    """A decoder that tells what it runs."""

    def report(self) -> Iterator[tuple[int | None, Row]]: ...


@dataclass(frozen=True)
class Placed:
    """`decoder` computes any step; `run` is the same with decode steps replayed over `cache`, and what an engine drives. `facts`: lines for the
    report. `replay(cache, pages)`: the same for one sequence of at most that many pages over another cache; `fresh(pages)`: such a cache.
    `residents`: the expert cache, if on; `ring`: what large steps stream their experts through, if they may; `pinned`: the hold on host memory that a
    GPU reads, to be closed at the end."""

    decoder: Reporting
    run: Run
    cache: Cache
    facts: Mapping[str, str]
    checks: tuple[Check, ...]
    replay: Callable[[Cache, int], Run]
    fresh: Callable[[int], Cache]
    residents: Residents | None = None
    ring: Ring | None = None
    pinned: Pinned | None = None


def fresh(plan: Plan, model: Model) -> Callable[[int], Cache]:
    """Makes caches for one sequence each."""
    return lambda pages: Cache(model, pages, PAGE, KV_NAMES[plan.kv_dtype], plan.device)


def failed(checks: Sequence[Check], allowed: bool) -> str:
    """What failed, in one line, when that is allowed and plain arithmetic can stand in; UnusableHardware otherwise."""
    wrong = [c for c in checks if not c.passed]
    said = "; ".join(f"{c.part} by {c.kernel} ({c.format}) is off by {c.error:.1e}, at most {c.bound:.0e} is right" for c in wrong)
    if wrong and (not allowed or any(c.part == "experts" for c in wrong)):
        raise UnusableHardware(f"the self-test failed: {said}", "HETERO_ISA=generic uses simpler kernels; --allow-fallback lets plain arithmetic "
                               "stand in for what is not an expert; please report this with the output of hetero doctor")
    return f"plain arithmetic stands in, for {said}" if wrong else ""


def pages_of(plan: Plan) -> int:
    """Pages of the longest sequence."""
    return -(-plan.ctx // PAGE) + 1
