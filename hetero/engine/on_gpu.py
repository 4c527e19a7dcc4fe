"""Puts a model on a GPU: cap on its memory, arithmetic, handoff to the CPU's team, ring for streamed experts, KV, captured decode steps."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cpu_kernels import ExpertLayer
from cpu_kernels.team import Team
from hetero.arch import tensors
from hetero.arch.spec import GatedDeltaNet, Model, MoE
from hetero.engine.graphs import Graphs
from hetero.errors import DoesNotFit
from hetero.gpu.cuda import Cuda
from hetero.gpu.ops import Experts
from hetero.memory import bank as banks
from hetero.memory.cache import Cache
from hetero.memory.cost import Machine
from hetero.memory.plan import Plan
from hetero.memory.stream import Ring, break_even, register
from hetero.model.decoder import Decoder
from hetero.model.handoff import HandedOver, Handoff, jobs_of
from hetero.model.load import load_decoder
from hetero.model.probe import prove
from hetero.model.streamed import Streamed, orders_of
from hetero.model.weights import Weights
from hetero.weights.checkpoint import Checkpoint
from hetero.weights.dummy import Dummy


@dataclass(frozen=True)
class OnGpu:
    """What was made, and one-line facts about it for the report."""

    decoder: Decoder
    handoff: Handoff | None
    facts: Mapping[str, str]
    capturable: bool

    def capture(self, cache: Cache, most: int, width: int) -> Graphs:
        """Decode steps over `cache` as graphs; a model with parts that cannot be captured runs all steps eagerly."""
        return Graphs(self.decoder, cache, self.handoff, most if self.capturable else 0, width)


def cap(device: torch.device, limit_bytes: int) -> None:
    """Keeps torch's allocator on the device within the limit: what the plan promised is what a smaller card would have."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)


def load(model: Model, plan: Plan, machine: Machine, weights: Checkpoint | Dummy, bank: banks.Bank, layers: dict[int, ExpertLayer], team: Team,
         isa: str) -> OnGpu:
    """The decoder on `plan.device`, experts in the bank. Raises DoesNotFit and UnusableHardware."""
    device = torch.device(plan.device)
    torch.cuda.set_device(device)
    cap(device, plan.vram_limit_bytes)
    dtype = torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
    ops = Cuda(plan.ctx, plan.device, dtype)
    facts, handoff, ring, least = {}, None, None, 0
    index = {l: i for i, l in enumerate(model.moe_layers)}
    if index:
        parts = {l: banks.moe(model, l) for l in index}
        top_k = max(part.router.top_k for part in parts.values())
        proven = prove(team, device, dtype, model.hidden, top_k)
        jobs = jobs_of([layers[l] for l in index], team)
        handoff = Handoff(jobs, len(index), team, model.hidden, top_k, plan.max_batch, device, dtype, proven.kind)
        handoff.seconds_per_layer = proven.seconds_per_layer
        pinned, why = register(bank.arena)
        first = layers[model.moe_layers[0]].store
        part = parts[model.moe_layers[0]]
        least = break_even(first.record_nbytes, first.experts, top_k, (2 + part.gated) * part.width * model.hidden, machine, plan.chunk)
        ring = Ring([order for l in index for order in orders_of(layers[l])], int(bank.arena.memory.ctypes.data), device)
        facts = {"handoff": f"{proven.kind}, {proven.seconds_per_layer * 1e6:.1f} us per layer" + "".join(f"; {f}" for f in proven.failed),
                 "arena pinned": f"{pinned / max(1, bank.arena.nbytes):.0%}" + (f" ({why})" if why else ""),
                 "streaming": f"from {least} tokens on, ring of {ring.nbytes / 2**20:.0f} MiB" if least <= plan.chunk else "never: the CPU is faster"}

    def experts(l: int, part: MoE) -> Experts:
        assert handoff is not None and ring is not None
        return Streamed(HandedOver(handoff, index[l], layers[l], isa), part, ring, least)
    try:
        decoder = load_decoder(ops, model, Weights(tensors.of(model), weights.dense), experts, plan.dense_format, plan.dense_format)
    except torch.OutOfMemoryError as error:
        raise DoesNotFit(f"attention, shared experts and head do not fit {plan.vram_limit_bytes / 2**30:.1f} GiB of GPU memory",
                         "--dense-format int8_g32, a larger --vram, or --device cpu") from error
    return OnGpu(decoder, handoff, facts, not any(isinstance(layer.attention, GatedDeltaNet) for layer in model.layers))
