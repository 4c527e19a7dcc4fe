"""The arithmetic a decoder calls, as protocols, with the records it is given: the step and the tensors behind KV pages; computes nothing itself.

`Ops` makes each part once, at load: weights go in, a callable comes out, and each callable tells what it is by `row()`. Between parts there are only
tensors on `Ops.device`, flat over the T tokens of a step: no branch on data, no wait for the device. Implementations: `plain` (torch, the twin of
all), `host` (the CPU through cpu_kernels), `cuda` (Triton).
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from hetero.arch import spec


@dataclass(frozen=True)
class Step:
    """One forward as a flat record: T tokens of S sequences, any number per sequence; R rows want logits. Given to layers as an argument."""

    tokens: Tensor       # [T] int64
    positions: Tensor    # [T] int32, position in the own sequence
    starts: Tensor       # [S + 1] int32, sequence s owns rows starts[s]:starts[s + 1]
    lengths: Tensor      # [S] int32, tokens of the sequence after this step, cached ones included
    pages: Tensor        # [S, P] int32, page table of group 0, -1 beyond the end or given back
    slots: Tensor        # [T] int64, page * page_size + offset where the token's KV is written
    states: Tensor       # [S] int32, slot of per-sequence state parts
    wanted: Tensor       # [R] int64, rows whose logits are wanted
    longest: int         # max tokens of one sequence in this step: 1 means pure decode
    before: int = -1     # tokens that the only sequence had before this step; -1: there are several, or nobody knows
    others: tuple[tuple[Tensor, Tensor], ...] = ()       # pages and slots of groups 1, 2, ...; empty: all groups are numbered alike

    def to(self, device: torch.device | str) -> "Step":
        """The same with its tensors there; from pinned memory without waiting."""
        def sent(t: Tensor) -> Tensor:
            return t.to(device, non_blocking=True)
        return Step(sent(self.tokens), sent(self.positions), sent(self.starts), sent(self.lengths), sent(self.pages), sent(self.slots),
                    sent(self.states), sent(self.wanted), self.longest, self.before, tuple((sent(p), sent(s)) for p, s in self.others))

    def of(self, group: int) -> "Step":
        """The step as layers of one group see it: `pages` and `slots` are theirs."""
        if group == 0 or not self.others:
            return self
        pages, slots = self.others[group - 1]
        return replace(self, pages=pages, slots=slots, others=())


@dataclass(frozen=True)
class KV:
    """Pages of one GQA layer. float8_e4m3fn values carry one scale per token and head (value = code * scale); other dtypes have no scales."""

    keys: Tensor                        # [pages, kv_heads, page_size, head_dim] f32 | bf16 | fp16 | float8_e4m3fn
    values: Tensor                      # the same shape and dtype
    key_scales: Tensor | None = None    # [pages, kv_heads, page_size] f32
    value_scales: Tensor | None = None
    group: int = 0                      # of layers that share a page table (`Step.of`)


@dataclass(frozen=True)
class LatentKV:
    """Pages of one MLA layer: the normed latent, then the rotated key part that all heads share."""

    latent: Tensor                      # [pages, page_size, kv_rank + rope_dim]
    scales: Tensor | None = None        # [pages, page_size] f32, for float8_e4m3fn
    group: int = 0


@dataclass(frozen=True)
class DeltaState:
    """What sequences keep in one gated delta net layer: a slot per row of the batch (`Step.states`)."""

    conv: Tensor                        # [slots, channels, kernel - 1] f32: the convolution's last inputs
    memory: Tensor                      # [slots, value_heads, key_dim, value_dim] f32


@dataclass(frozen=True)
class Row:
    """One line of the report, told by the thing that runs: what it is, where, by which kernel, on which bytes."""

    part: str                           # "linear", "attention", "experts", ...
    device: str                         # "cpu", "cuda:0"
    kernel: str                         # the kernel's own name: "torch", "rows.int8_g32", "triton.paged_gqa"
    format: str = ""                    # weight or KV format
    nbytes: int = 0                     # bytes of weights it owns
    isa: str = ""                       # instruction set or compute capability
    threads: int = 0
    cores: tuple[int, ...] = ()
    note: str = ""                      # a fallback in force, or why a faster kernel is not used


@dataclass(frozen=True)
class Check:
    """One kernel and format that serves, against its plain twin on random data. `error`: largest difference relative to the twin's size."""

    part: str
    kernel: str
    format: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


class Reports(Protocol):
    def row(self) -> Row: ...


class Matrix(Reports, Protocol):
    """y = x W^T + b. rows = N, cols = K."""

    rows: int
    cols: int

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N], both in `Ops.dtype`; for matrices made with `logits=True` the result is float32."""
        ...


class Norm(Protocol):
    """RMSNorm, or LayerNorm where a bias was given; computed in float32."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]"""
        ...

    def add(self, x: Tensor, delta: "Addend", scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """s = x + scale * delta -> (s, norm(s)); may write s over x."""
        ...


class Attend(Reports, Protocol):
    def __call__(self, qkv: Tensor, kv: KV, step: Step) -> Tensor:
        """qkv [T, (heads + 2 kv_heads) * head_dim], q | k | v -> [T, heads * head_dim].

        Norms (full), clips, norms (head), rotates, norms (rotated), writes k and v at step.slots, attends."""
        ...


class LatentAttend(Reports, Protocol):
    def __call__(self, q: Tensor, latent: Tensor, kv: LatentKV, step: Step) -> Tensor:
        """q [T, heads * (nope + rope)], latent [T, kv_rank + rope] before its norm and rotation -> [T, heads * v_dim]."""
        ...


class Delta(Reports, Protocol):
    def __call__(self, inputs: Tensor, state: DeltaState, step: Step) -> Tensor:
        """inputs [T, channels + values + 2 value_heads], q | k | v | z | b | a -> [T, values].

        Convolves, normalizes, applies the gated delta rule, norms and gates; moves the states of step.states on. A sequence whose
        first token stands at position 0 starts from nothing, whatever its slot held."""
        ...


class Route(Reports, Protocol):
    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [T, E] f32 -> ids [T, k] int32, weights [T, k] f32 (already scaled)."""
        ...


class Ops(Protocol):
    """A maker of parts. Every tensor given may live on the CPU in any float dtype; parts keep their own copy on `device`."""

    name: str                           # "plain", "host", "cuda"
    device: torch.device
    dtype: torch.dtype                  # of activations and of the residual stream
    context: int                        # tokens that its rotary tables reach

    def embed(self, weight: Tensor, scale: float = 1.0) -> "Embed": ...

    def norm(self, weight: Tensor, bias: Tensor | None, eps: float) -> Norm: ...

    def matrix(self, weight: Tensor, bias: Tensor | None = None, format: str = "", logits: bool = False) -> Matrix:
        """weight [N, K]. format "": as it arrives; else a name of cpu_kernels.FORMATS or one of the device's own. logits: float32 out."""
        ...

    def attend(self, part: spec.GQA, eps: float, q_norm: Tensor | None = None, k_norm: Tensor | None = None, sinks: Tensor | None = None) -> Attend:
        """q_norm, k_norm as part.qk_norm says: [head_dim] (head, rotated) or [heads * head_dim] and [kv_heads * head_dim] (full); sinks [heads]."""
        ...

    def latent_attend(self, part: spec.MLA, eps: float, kv_norm: Tensor, kv_b: Tensor) -> LatentAttend:
        """kv_norm [kv_rank]; kv_b [heads * (nope + v_dim), kv_rank], per head nope rows, then v rows."""
        ...

    def delta(self, part: spec.GatedDeltaNet, eps: float, conv: Tensor, dt_bias: Tensor, a_log: Tensor, norm: Tensor) -> Delta:
        """conv [channels, kernel]; dt_bias, a_log [value_heads]; norm [value_dim]."""
        ...

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x * sigmoid(gate), both [T, N]"""
        ...

    def route(self, part: spec.Router, correction: Tensor | None = None) -> Route: ...

    def glu(self, act: spec.Act, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 I], gate | up -> [T, I]"""
        ...

    def add(self, x: Tensor, delta: Tensor, scale: float = 1.0) -> Tensor:
        """x + scale * delta; may write over x."""
        ...

    def join(self, routed: "Addend", shared: Tensor, gate: Tensor | None) -> "Addend":
        """routed + shared, or + sigmoid(gate) * shared, gate [T, 1]; may write over routed."""
        ...

    def rows(self, x: Tensor, wanted: Tensor) -> Tensor:
        """x[wanted]: [T, H], [R] -> [R, H]"""
        ...


class Embed(Reports, Protocol):
    def __call__(self, tokens: Tensor) -> Tensor:
        """[T] int64 -> [T, H]"""
        ...


class Answer(Protocol):
    """[T, H] that somebody else is still computing, and what was added to it meanwhile."""

    def take(self) -> Tensor: ...


Addend = Tensor | Answer


def settled(addend: Addend) -> Tensor:
    """The sum itself, however long it takes."""
    return addend if isinstance(addend, Tensor) else addend.take()


class Experts(Reports, Protocol):
    """The routed experts of one layer. start enqueues or remembers; finish joins. Nothing waits between the two."""

    def start(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """x [T, H], ids [T, k] int32 (-1: not mine), weights [T, k] f32; kept untouched by the caller until finish."""
        ...

    def begin(self, x: Tensor, logits: Tensor, route: Route) -> None:
        """start with what `route` picks from the router's logits [T, E]; the two may be one kernel."""
        ...

    def finish(self) -> Addend:
        """[T, H]: the weighted sum over each token's experts; valid until the next start."""
        ...
