"""A plan made real on a GPU: attention, shared experts and head there, routed experts on the CPU's team; knows no file, no text and no request."""

from collections.abc import Mapping

import torch

from cpu_kernels import ExpertLayer, cpu
from cpu_kernels.team import Team
from hetero.arch.spec import Model, MoE
from hetero.engine.devices import Placed, failed, pages_of
from hetero.engine.graphs import Graphs
from hetero.errors import BadOption
from hetero.gpu.cuda import Cuda
from hetero.gpu.plain import Plain
from hetero.memory.cache import Cache
from hetero.memory.plan import Plan
from hetero.model.check import check_experts, check_parts
from hetero.model.handoff import HandedOver, Handoff, jobs_of
from hetero.model.load import load_decoder
from hetero.model.probe import prove
from hetero.model.weights import Weights
from hetero.options import Options


def place(plan: Plan, model: Model, options: Options, weights: Weights, layers: Mapping[int, ExpertLayer], team: Team, cache: Cache) -> Placed:
    """One graph per batch size; the handoff is the best kind that an echo proves. Raises UnusableHardware when none works."""
    if options.deterministic:
        raise BadOption("deterministic is a promise of the CPU, and device is " + plan.device, "--device cpu, or leave --deterministic out")
    device, dtype = torch.device(plan.device), activations(options)
    ops, order = Cuda(plan.ctx, plan.device, dtype), {l: i for i, l in enumerate(sorted(layers))}
    checks = (*check_experts(layers, team), *check_parts(ops, model, cache.kv_dtype, plan.dense_format))
    facts = {"FALLBACK": wrong} if (wrong := failed(checks, options.allow_fallback)) else {}
    handoff = None
    if layers:
        top_k = max(f.router.top_k for l in layers if isinstance(f := model.layers[l].ffn, MoE))
        proven = prove(team, device, dtype, model.hidden, top_k)
        jobs = jobs_of([layers[l] for l in sorted(layers)], team)
        handoff = Handoff(jobs, len(layers), team, model.hidden, top_k, plan.max_batch, device, dtype, proven.kind)
        handoff.seconds_per_layer = proven.seconds_per_layer
        facts["handoff"] = f"{proven.kind}, {proven.seconds_per_layer * 1e6:.1f} us per layer" + "".join(f"; not {why}" for why in proven.failed)

    def experts(l: int, part: MoE) -> HandedOver:
        assert handoff is not None
        return HandedOver(handoff, order[l], layers[l], cpu.isa())
    if wrong:
        decoder = load_decoder(Plain(plan.ctx, plan.device, dtype), model, weights, experts)
        return Placed(decoder, decoder, cache, facts, checks)
    decoder = load_decoder(ops, model, weights, experts, plan.dense_format, plan.dense_format)
    graphs = Graphs(decoder, cache, handoff, plan.max_batch, pages_of(plan))
    facts["decode"] = f"{len(graphs.graphs)} graphs captured in {graphs.capture_s:.1f} s"
    return Placed(decoder, graphs, cache, facts, checks)


def activations(options: Options) -> torch.dtype:
    """What the GPU keeps activations in: bfloat16 where the card has it."""
    if options.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[options.dtype]
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
