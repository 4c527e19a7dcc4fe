"""The cost model: seconds of a decode step and of a prefill chunk as named terms of the machine's own numbers; knows no option and no device.

A term is bytes over bandwidth, operations over throughput, or a count times a latency; its text says which. Nothing here is a switch point:
those follow from comparing terms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hetero.arch.spec import GQA, MLA, Foreign, GatedDeltaNet, Model, MoE


@dataclass(frozen=True)
class Machine:
    """What planning needs to know of a machine. Rates in bytes or operations per second; `assumed` names those that were not measured."""

    cores: int
    ram_bytes: int                       # that this process may take: free now, within cgroup and limits
    dram_bytes_s: float                  # read, all cores
    cpu_flops: float                     # multiply-adds count two, in the experts' matrix products at many tokens
    expert_bytes_s: float = 0.0          # weights that the experts' kernels read for one token; 0: not measured, a usual share of DRAM
    gpu: str = ""
    vram_bytes: int = 0                  # free on the card, 0 without a usable one
    vram_bytes_s: float = 0.0
    gpu_flops: float = 0.0
    pcie_bytes_s: float = 0.0            # host to device, from registered memory
    handoff_s: float = 6e-6              # per routed layer: flags to the CPU and back
    launch_s: float = 2.5e-6             # per kernel within a graph
    cpu_layer_s: float = 25e-6           # per layer on the CPU: team jobs and the calls between them
    context_bytes: int = 600 << 20       # CUDA context, library workspaces, graphs
    numa_nodes: int = 1
    name: str = ""
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Term:
    name: str
    seconds: float
    text: str                            # the formula with its numbers


class Sized(Protocol):
    """What is read of a plan's piece."""

    @property
    def layer(self) -> int | None: ...
    @property
    def kind(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def parameters(self) -> int: ...


KERNELS_PER_LAYER = 9                    # of a captured decode step: two norms, qkv, rope and write, attention, o, router, shared, sum
EXPERT_SHARE, VRAM_SHARE = 0.93, 0.8     # of the read ceiling that the kernels reach


def _by_kind(pieces: Sequence[Sized]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for p in pieces:
        sums[p.kind] = sums.get(p.kind, 0) + p.nbytes
    return sums


def _routed(model: Model, pieces: Sequence[Sized]) -> list[tuple[float, MoE]]:
    """(bytes of one expert, part) of each routed layer."""
    found = []
    for p in pieces:
        part = model.layers[p.layer].ffn if p.layer is not None else None
        if p.kind == "experts" and isinstance(part, MoE):
            found.append((p.nbytes / part.router.experts, part))
    return found


def decode_terms(model: Model, machine: Machine, pieces: Sequence[Sized], on_gpu: bool, slots: int) -> tuple[Term, ...]:
    """One token of one sequence at short context."""
    kinds, layers, routed = _by_kind(pieces), len(model.layers), _routed(model, pieces)
    read = sum(each * moe.router.top_k for each, moe in routed)
    hits = sum(min(1.0, slots / moe.router.experts) for _, moe in routed) / len(routed) if routed else 0.0
    cold, dram = read * (1 - hits), machine.dram_bytes_s * EXPERT_SHARE
    experts = machine.expert_bytes_s or dram
    dense = sum(n for kind, n in kinds.items() if kind not in ("experts", "embed", "shared"))
    shared = kinds.get("shared", 0)
    if not on_gpu:
        return (Term("routed experts", cold / experts, f"{cold / 1e6:.0f} MB / {experts / 1e9:.1f} GB/s"),
                Term("attention, shared experts, head", (dense + shared) / dram, f"{(dense + shared) / 1e6:.0f} MB / {dram / 1e9:.1f} GB/s"),
                Term("calls", layers * machine.cpu_layer_s, f"{layers} layers x {machine.cpu_layer_s * 1e6:.0f} us"))
    vram = machine.vram_bytes_s * VRAM_SHARE
    beside = max(0.0, (shared + read * hits) / vram - cold / experts)
    return (Term("routed experts on the CPU", cold / experts, f"{cold / 1e6:.0f} MB / {experts / 1e9:.1f} GB/s"),
            Term("attention and head", dense / vram, f"{dense / 1e6:.0f} MB / {vram / 1e9:.0f} GB/s"),
            Term("shared and cached experts beyond the CPU's time", beside,
                 f"{(shared + read * hits) / 1e6:.0f} MB / {vram / 1e9:.0f} GB/s, beside the CPU"),
            Term("launches", layers * KERNELS_PER_LAYER * machine.launch_s,
                 f"{layers * KERNELS_PER_LAYER} kernels x {machine.launch_s * 1e6:.1f} us"),
            Term("hand-off", len(routed) * machine.handoff_s, f"{len(routed)} routed layers x {machine.handoff_s * 1e6:.0f} us"))


def prefill_terms(model: Model, machine: Machine, pieces: Sequence[Sized], on_gpu: bool, slots: int, chunk: int) -> tuple[str, tuple[Term, ...]]:
    """(where the experts of a chunk are computed, terms of one chunk at the start of a prompt)."""
    routed = _routed(model, pieces)
    expert_flops = sum(2.0 * chunk * moe.router.top_k * (2 + moe.gated) * moe.width * (moe.hidden or model.hidden) for _, moe in routed)
    dense_flops = 2.0 * chunk * sum(p.parameters for p in pieces if p.kind not in ("experts", "embed", "head"))
    attend = sum(2.0 * _pairs(layer.attention, chunk) * _attend_width(layer.attention) for layer in model.layers)
    used = sum(each * min(moe.router.experts, chunk * moe.router.top_k) for each, moe in routed)
    held = sum(each * min(slots, moe.router.experts) for each, moe in routed)
    by_cpu = max(used / machine.dram_bytes_s, expert_flops / machine.cpu_flops)
    on_cpu = Term("routed experts on the CPU", by_cpu, f"max({used / 1e9:.2f} GB / {machine.dram_bytes_s / 1e9:.1f} GB/s, "
                                                       f"{expert_flops / 1e12:.2f} T / {machine.cpu_flops / 1e12:.2f} T/s)")
    if not on_gpu:
        return "cpu", (on_cpu, Term("attention, shared experts", (dense_flops + attend) / machine.cpu_flops,
                                    f"{(dense_flops + attend) / 1e12:.2f} T / {machine.cpu_flops / 1e12:.2f} T/s"))
    moved = max(0.0, used - held)
    copy, compute = moved / machine.pcie_bytes_s, (expert_flops + dense_flops + attend) / machine.gpu_flops
    streamed = (Term("experts over PCIe", copy, f"{moved / 1e9:.2f} GB / {machine.pcie_bytes_s / 1e9:.1f} GB/s"),
                Term("GPU compute beyond the copy", max(0.0, compute - copy),
                     f"{(expert_flops + dense_flops + attend) / 1e12:.2f} T / {machine.gpu_flops / 1e12:.0f} T/s, under the copy"))
    rest = Term("attention, shared experts", (dense_flops + attend) / machine.gpu_flops,
                f"{(dense_flops + attend) / 1e12:.2f} T / {machine.gpu_flops / 1e12:.0f} T/s")
    if not model.foreign and sum(t.seconds for t in streamed) <= on_cpu.seconds + rest.seconds:
        return "streamed", streamed
    return "cpu", (on_cpu, rest)


def _pairs(part: GQA | MLA | GatedDeltaNet | Foreign, chunk: int) -> float:
    """Of a token and one that it sees, among the first `chunk` tokens of a prompt."""
    width = min(chunk, part.window or chunk) if isinstance(part, GQA) else chunk
    return width * (chunk - width / 2)


def _attend_width(part: GQA | MLA | GatedDeltaNet | Foreign) -> int:
    if isinstance(part, GatedDeltaNet):                  # its work does not grow with the prompt's square
        return 0
    if isinstance(part, Foreign):                        # what the cache holds per token is what a query is multiplied with
        return part.kv_numbers
    return 2 * part.heads * part.head_dim if isinstance(part, GQA) else part.heads * (part.nope_dim + part.rope.dim + part.v_dim)
