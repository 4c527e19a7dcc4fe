"""A plan made real on its device: arithmetic, executors, decoder, cache, and what replays decode steps; knows no file and no request."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cpu_kernels import ExpertLayer, cpu
from cpu_kernels.team import Team
from hetero.arch.spec import Model, MoE
from hetero.gpu.host import Host
from hetero.gpu.ops import Step
from hetero.memory.cache import Cache, page_nbytes
from hetero.memory.plan import Plan
from hetero.model.decoder import Decoder
from hetero.model.experts import OnCpu
from hetero.model.load import load_decoder
from hetero.model.replay import Replay
from hetero.model.weights import Weights
from hetero.options import Options

PAGE = 16
KV_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "fp16", "fp8": "fp8"}


class Run(Protocol):
    """What an engine drives: a decoder with its decode steps replayed."""

    def __call__(self, step: Step, cache: Cache) -> Tensor: ...

    def diagnose(self, step: Step, cache: Cache) -> int | None: ...


@dataclass(frozen=True)
class Placed:
    """`decoder` computes any step; `run` is the same with decode steps replayed, and what an engine drives. `facts`: lines for the report."""

    decoder: Decoder
    run: Run
    cache: Cache
    facts: Mapping[str, str]


def place(plan: Plan, model: Model, options: Options, weights: Weights, layers: Mapping[int, ExpertLayer], team: Team) -> Placed:
    """Raises BadOption and UnusableHardware for what cannot be meant on this device."""
    kv = KV_NAMES[plan.kv_dtype]
    host_pages = (options.kv_ram or 0) // page_nbytes(model, PAGE, kv)
    cache = Cache(model, -(-plan.kv_tokens // PAGE), PAGE, kv, plan.device, host_pages, plan.max_batch)
    if plan.device == "cpu":
        return place_on_cpu(plan, model, options, weights, layers, team, cache)
    # Triton comes only with a torch that has CUDA
    from hetero.engine import gpus

    return gpus.place(plan, model, options, weights, layers, team, cache)


def place_on_cpu(plan: Plan, model: Model, options: Options, weights: Weights, layers: Mapping[int, ExpertLayer], team: Team, cache: Cache) -> Placed:
    ops = Host(plan.ctx, team, cpu.isa())

    def experts(l: int, part: MoE) -> OnCpu:
        return OnCpu(layers[l], ops, options.precision, options.deterministic)
    decoder = load_decoder(ops, model, weights, experts, plan.dense_format, plan.dense_format)
    run = Replay(decoder, ops, plan.max_batch, pages_of(plan))
    return Placed(decoder, run, cache, {"decode": "each step one job of the team" if ops.recordable else "layer by layer: a part has no job"})


def pages_of(plan: Plan) -> int:
    """Pages of the longest sequence."""
    return -(-plan.ctx // PAGE) + 1
