"""A plan made real on its device: arithmetic, executors, decoder, cache, and what replays decode steps; knows no file and no request."""

from collections.abc import Mapping

from cpu_kernels import ExpertLayer, cpu
from cpu_kernels.team import Team
from hetero.arch.spec import Model, MoE
from hetero.engine.placed import KV_NAMES, PAGE, Placed, failed, fresh, pages_of
from hetero.errors import BadOption
from hetero.gpu.host import Host
from hetero.gpu.plain import Plain
from hetero.memory.arena import Arena
from hetero.memory.cache import Cache
from hetero.memory.cost import Machine
from hetero.memory.kv import host_pages as host_tier
from hetero.memory.plan import Plan
from hetero.model.check import check_experts, check_parts
from hetero.model.drawn import draw_routing
from hetero.model.experts import OnCpu
from hetero.model.load import load_decoder
from hetero.model.replay import Replay
from hetero.model.weights import Weights
from hetero.options import Options


def place(plan: Plan, model: Model, options: Options, weights: Weights, layers: Mapping[int, ExpertLayer], team: Team, arena: Arena,
          machine: Machine) -> Placed:
    """`arena` holds the layers' experts. Raises BadOption and UnusableHardware for what cannot be meant on this device."""
    kv = KV_NAMES[plan.kv_dtype]
    pages, host_pages = [group.tokens // PAGE for group in plan.kv], host_tier(plan.kv, options.kv_ram or 0)
    cache = Cache(model, pages, PAGE, kv, plan.device, host_pages, plan.max_batch, plan.max_batch)
    if plan.device == "cpu":
        return place_on_cpu(plan, model, options, weights, layers, team, cache)
    # Triton comes only with a torch that has CUDA
    from hetero.engine import gpus

    return gpus.place(plan, model, options, weights, layers, team, arena, machine, cache)


def place_on_cpu(plan: Plan, model: Model, options: Options, weights: Weights, layers: Mapping[int, ExpertLayer], team: Team, cache: Cache) -> Placed:
    if not options.overlap:
        raise BadOption("overlap = off: without a GPU nothing overlaps", "leave overlap out")
    ops = Host(plan.ctx, team, cpu.isa())
    checks = (*check_experts(layers, team), *check_parts(ops, model, cache.kv_dtype, plan.dense_format))
    if wrong := failed(checks, options.allow_fallback):
        plain = Plain(plan.ctx)
        ops.recordable = False

    def experts(l: int, part: MoE) -> OnCpu:
        return OnCpu(layers[l], ops, options.precision, options.deterministic)
    format = "" if wrong else plan.dense_format
    decoder = load_decoder(plain if wrong else ops, model, weights, experts, format, format)
    if options.routing != "model":
        ops.recordable = False                               # a recorded job would draw once for all steps
        draw_routing(decoder, options.routing, max(plan.chunk, plan.max_batch))
    run = Replay(decoder, ops, plan.max_batch, pages_of(plan))
    how = "each step one job of the team" if ops.recordable else "layer by layer: a part has no job, or routing is drawn"
    return Placed(decoder, run, cache, {"decode": how} | ({"FALLBACK": wrong} if wrong else {}), checks, lambda other, pages: run,
                  fresh(plan, model))
