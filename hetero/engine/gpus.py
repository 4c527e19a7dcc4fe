"""A plan made real on a GPU: attention, shared experts and head there, routed experts on the CPU's team; knows no file, no text and no request."""

from collections.abc import Mapping

import torch

from cpu_kernels import ExpertLayer, cpu
from cpu_kernels.team import Team
from hetero.arch.spec import GatedDeltaNet, Model, MoE
from hetero.engine.graphs import Graphs
from hetero.engine.placed import Placed, failed, fresh, pages_of
from hetero.errors import BadOption, DoesNotFit
from hetero.gpu.cuda import Cuda
from hetero.gpu.plain import Plain
from hetero.memory.arena import Arena
from hetero.memory.cache import Cache
from hetero.memory.cost import Machine
from hetero.memory.plan import Plan
from hetero.memory.slots import SlotMemory
from hetero.memory.stream import Pinned, Ring, break_even
from hetero.model.cached import Cached
from hetero.model.check import check_experts, check_parts
from hetero.model.drawn import draw_routing
from hetero.model.handoff import HandedOver, Handoff, jobs_of
from hetero.model.load import load_decoder
from hetero.model.probe import prove
from hetero.model.streamed import Streamed, orders_of, shape_of
from hetero.model.weights import Weights
from hetero.options import Options


def place(plan: Plan, model: Model, options: Options, weights: Weights, layers: Mapping[int, ExpertLayer], team: Team, arena: Arena,
          machine: Machine, cache: Cache) -> Placed:
    """One graph per batch size; the handoff is the best kind that an echo proves; large steps stream their experts. torch's memory on the card is
    capped at what the plan promised. Raises UnusableHardware when no handoff works, DoesNotFit when the card is too small."""
    if options.deterministic:
        raise BadOption("deterministic is a promise of the CPU, and device is " + plan.device, "--device cpu, or leave --deterministic out")
    device, dtype = torch.device(plan.device), activations(options)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, plan.vram_limit_bytes / total), device)
    ops, order = Cuda(plan.ctx, plan.device, dtype), {l: i for i, l in enumerate(sorted(layers))}
    checks = (*check_experts(layers, team), *check_parts(ops, model, cache.kv_dtype, plan.dense_format))
    facts = {"FALLBACK": wrong} if (wrong := failed(checks, options.allow_fallback)) else {}
    handoff, ring, slots, pinned, least = None, None, None, None, 0
    if layers:
        top_k = max(f.router.top_k for l in layers if isinstance(f := model.layers[l].ffn, MoE))
        proven = prove(team, device, dtype, model.hidden, top_k)
        jobs = jobs_of([layers[l] for l in sorted(layers)], team)
        handoff = Handoff(jobs, len(layers), team, model.hidden, top_k, plan.max_batch, device, dtype, proven.kind)
        handoff.seconds_per_layer = proven.seconds_per_layer
        facts["handoff"] = f"{proven.kind}, {proven.seconds_per_layer * 1e6:.1f} us per layer" + "".join(f"; not {why}" for why in proven.failed)
        pinned = Pinned(arena, device)
        facts["arena pinned"] = f"{pinned.nbytes / max(1, arena.nbytes):.0%}" + (f" ({pinned.why})" if pinned.why else "")
        ring = Ring([group for l in sorted(layers) for group in orders_of(layers[l])], int(arena.memory.ctypes.data), device)
        least = streamed_from(model, layers, machine, plan.chunk)
        facts["streaming"] = f"from {least} tokens on, a ring of {ring.nbytes / 2**20:.0f} MiB" if least <= plan.chunk else "never: the CPU is faster"

        if plan.cache_slots and not wrong:
            stores, base = [layers[l].store for l in sorted(layers)], int(arena.memory.ctypes.data)
            slots = SlotMemory(stores, plan.cache_slots, plan.max_batch, top_k, base, device)

    def experts(l: int, part: MoE) -> Streamed:
        assert handoff is not None and ring is not None
        cached = None if slots is None else Cached(slots, order[l], shape_of(part, layers[l], device))
        return Streamed(HandedOver(handoff, order[l], layers[l], cpu.isa(), cached), part, ring, least)
    if wrong:
        plain = load_decoder(Plain(plan.ctx, plan.device, dtype), model, weights, experts)
        eager = Graphs(plain, cache, None, 0, pages_of(plan))
        return Placed(plain, eager, cache, facts, checks, lambda other, pages: eager, fresh(plan, model), ring=ring, pinned=pinned)
    try:
        decoder = load_decoder(ops, model, weights, experts, plan.dense_format, plan.dense_format, options.overlap)
    except torch.OutOfMemoryError as error:
        raise DoesNotFit(f"attention, shared experts and head do not fit {plan.vram_limit_bytes / 2**30:.1f} GiB of GPU memory",
                         "--dense-format int8_g32, a larger --vram, or --device cpu") from error
    if options.routing != "model":
        draw_routing(decoder, options.routing, max(plan.chunk, plan.max_batch))
    most = 0 if any(isinstance(layer.attention, GatedDeltaNet) for layer in model.layers) else plan.max_batch
    graphs = Graphs(decoder, cache, handoff, most, pages_of(plan), slots)
    facts["decode"] = f"{len(graphs.graphs)} graphs captured in {graphs.capture_s:.1f} s" if most else "layer by layer: a part cannot be captured"
    return Placed(decoder, graphs, cache, facts, checks, lambda other, pages: Graphs(decoder, other, handoff, min(1, most), pages, slots),
                  fresh(plan, model), None if slots is None else slots.residents, ring, pinned)


def streamed_from(model: Model, layers: Mapping[int, ExpertLayer], machine: Machine, most: int) -> int:
    """Tokens from which streaming a layer's experts beats the CPU, for the layer where that is latest: one number, as the ring knows one order."""
    def one(l: int) -> int:
        part, store = model.layers[l].ffn, layers[l].store
        assert isinstance(part, MoE)
        return break_even(store.record_nbytes, store.experts, part.router.top_k, (2 + part.gated) * part.width * model.hidden, machine, most)
    return max(one(l) for l in layers)


def activations(options: Options) -> torch.dtype:
    """What the GPU keeps activations in: bfloat16 where the card has it."""
    if options.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[options.dtype]
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
