"""transformers' experts computed by our kernels: the function behind experts_implementation="hetero", and results that are joined when first used.

On a GPU the experts of a layer run on the CPU's team beside whatever the GPU is asked for next: what they return is a tensor whose numbers are
waited for by the first operation that needs them. On the CPU they are computed at once. Knows no model.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from cpu_kernels import ExpertLayer
from cpu_kernels.team import Team
from hetero.errors import EngineFailed
from hetero.gpu.ops import Row

NAME = "hetero"
ASKS = frozenset({Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.ndim.__get__, Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
                  Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point})
LATER = frozenset({Tensor.view, Tensor.reshape, torch.reshape})


class Pending(Tensor):
    """[T, H] that is still being computed. Asking its shape, and another shape, waits for nothing; everything else does."""

    job: Callable[[], Tensor]

    @staticmethod
    def of(job: Callable[[], Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> "Pending":
        made: Pending = Tensor._make_wrapper_subclass(Pending, shape, dtype=dtype, device=device)
        made.job = job
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ASKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in LATER and isinstance(args[0], Pending):
            first, sizes = args[0], args[1:] if args[1:] else (kwargs["shape"],)
            shape = tuple(sizes[0]) if isinstance(sizes[0], (tuple, list)) else sizes
            if not any(isinstance(s, torch.dtype) for s in shape):
                known = -prod(int(s) for s in shape) if -1 in shape else 1
                shape = tuple(first.numel() // known if s == -1 else int(s) for s in shape)
                return Pending.of(lambda: first.job().reshape(shape), shape, first.dtype, first.device)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*tree_map(joined, args), **tree_map(joined, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:          # type: ignore[override]
        return func(*tree_map(joined, args), **tree_map(joined, kwargs or {}))


def joined(x: Any) -> Any:
    return x.job() if isinstance(x, Pending) else x


class Computed:
    """The routed experts of one layer. `seen(what, layer)` is told when they start and when they are joined."""

    def __init__(self, layer: ExpertLayer, number: int, team: Team, precision: str, isa: str, norm: nn.Module | None = None,
                 beside: ThreadPoolExecutor | None = None) -> None:
        self.layer, self.number, self.team, self.precision, self.isa = layer, number, team, precision, isa
        self.norm, self.beside = norm, beside
        self.seen: Callable[[str, int], None] | None = None
        self.note = ""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [..., H], ids [..., k] of any kind (outside 0..E-1: none), weights [..., k] -> x's shape and dtype."""
        shape, dtype, device = tuple(x.shape), x.dtype, x.device
        flat = x.reshape(-1, shape[-1]), ids.reshape(-1, ids.shape[-1]), weights.reshape(-1, weights.shape[-1])
        if self.beside is None and self.seen is None:
            return self.compute(*flat).to(dtype).reshape(shape)
        if self.beside is None:
            assert self.seen is not None
            seen, out = self.seen, self.compute(*flat).to(dtype).reshape(shape)
            seen("start", self.number)

            def tell() -> Tensor:
                seen("join", self.number)
                return out
            return Pending.of(tell, shape, dtype, device)
        return self.start(flat, shape, dtype, device)

    def start(self, flat: tuple[Tensor, Tensor, Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """On a GPU: a thread of ours waits for the inputs, runs the team and brings the result; the caller's stream waits at the join."""
        assert self.beside is not None
        ready, there, seen = torch.cuda.Event(), torch.cuda.Event(), self.seen
        ready.record()

        def run() -> Tensor:
            side = torch.cuda.Stream(device)
            with torch.no_grad(), torch.cuda.stream(side):
                side.wait_event(ready)
                out = self.compute(*(t.to("cpu") for t in flat)).to(dtype).to(device)
                there.record(side)
            return out
        job: Future[Tensor] = self.beside.submit(run)
        if seen is not None:
            seen("start", self.number)

        def join() -> Tensor:
            out = job.result()
            if seen is not None:
                seen("join", self.number)
            torch.cuda.current_stream(device).wait_event(there)
            out.record_stream(torch.cuda.current_stream(device))
            return out.reshape(shape)
        return Pending.of(join, shape, dtype, device)

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], ids [T, k], weights [T, k], all on the CPU -> [T, H] float32."""
        E = self.layer.store.experts
        given = np.ascontiguousarray(x.float().numpy(), np.float32)
        own = ids.to(torch.int64).numpy()
        picked = np.where((own < 0) | (own >= E), -1, own).astype(np.int32)
        scale = np.ascontiguousarray(weights.float().numpy(), np.float32)
        if self.norm is None:
            out = np.empty_like(given)
            self.layer.run(given, picked, scale, out, self.team, self.precision)
            return torch.from_numpy(out)
        T, k = picked.shape                                            # each expert's own result is normed: a row per token and expert
        rows, out = np.repeat(given, k, axis=0), np.empty((T * k, given.shape[1]), np.float32)
        self.layer.run(rows, picked.reshape(-1, 1).copy(), np.ones((T * k, 1), np.float32), out, self.team, self.precision)
        normed = self.norm(torch.from_numpy(out)).float() * torch.from_numpy(np.where(picked < 0, 0, scale).reshape(-1, 1))
        return normed.reshape(T, k, -1).sum(1)

    def row(self) -> Row:
        store = self.layer.store
        return Row("experts", "cpu", f"rows.{store.form}", store.form, store.experts * store.record_nbytes, self.isa,
                   self.team.threads, tuple(self.team.cores), self.note)


def forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers calls for every module of routed experts."""
    computed = vars(module).get(NAME)
    if computed is None:
        raise EngineFailed(f"{type(module).__name__}: these experts are not loaded", "only what a text reaches is; please report the prompt")
    out: Tensor = computed(hidden_states, top_k_index, top_k_weights)
    return out


def register() -> None:
    """Makes "hetero" an experts implementation of transformers."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, forward)


def attach(module: nn.Module, computed: Computed) -> None:
    """Puts the kernels behind one module of transformers' experts."""
    vars(module)[NAME] = computed
    vars(module)["config"]._experts_implementation_internal = NAME
