"""The tensors behind KV pages, on the device and in the host tier, the copies between them, and states; knows no request and no prefix.

Layers of one shape share a stack, [layers, parts, pages, …], so that a page is one strided block per stack; the host tier keeps each page in one
piece. fp8 is e4m3 with one float32 scale per token and head (per token for latent KV), written once by whoever writes the page.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hetero.arch import spec
from hetero.gpu.ops import KV, DeltaState, LatentKV
from hetero.memory.pages import Copy, StateCopy

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}


def shapes(part: spec.GQA | spec.MLA, page_size: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """How many tensors one layer's page has, the shape of each, and the shape of its scales."""
    if isinstance(part, spec.MLA):
        return 1, (page_size, part.kv_rank + part.rope.dim), (page_size,)
    return 2, (part.kv_heads, page_size, part.head_dim), (part.kv_heads, page_size)


def page_nbytes(model: spec.Model, page_size: int, kv_dtype: str) -> int:
    """Bytes of one page over all layers."""
    total = 0
    for layer in model.layers:
        if isinstance(layer.attention, (spec.GatedDeltaNet, spec.Foreign)):
            continue
        parts, shape, scales = shapes(layer.attention, page_size)
        total += parts * (torch.Size(shape).numel() * DTYPES[kv_dtype].itemsize + (torch.Size(scales).numel() * 4 if kv_dtype == "fp8" else 0))
    return total


def window(model: spec.Model) -> int | None:
    """Tokens that any layer sees, or None when some layer sees everything: then no page is given back before its sequence ends."""
    parts = [layer.attention for layer in model.layers if not isinstance(layer.attention, (spec.GatedDeltaNet, spec.Foreign))]
    widths = [part.window if isinstance(part, spec.GQA) else None for part in parts]
    seen = [w for w in widths if w is not None]
    return max(seen) if seen and len(seen) == len(widths) else None


@dataclass(frozen=True)
class Stack:
    """Layers of one page shape: values and scales (fp8 only) [layers, parts, pages, …], and their host tier [host_pages, layers, parts, …]."""

    layers: tuple[int, ...]
    values: torch.Tensor
    scales: torch.Tensor | None
    host_values: torch.Tensor
    host_scales: torch.Tensor | None

    @property
    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(device, host) tensors that copies go between."""
        pairs = [(self.values, self.host_values)]
        if self.scales is not None and self.host_scales is not None:
            pairs.append((self.scales, self.host_scales))
        return pairs


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pin: bool = False) -> torch.Tensor:
    """Zeros, also for dtypes that have no fill; a page that was never written must be finite."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.zeros(count, dtype=torch.uint8, device=device, pin_memory=pin).view(dtype).view(shape)


class Cache:
    """KV of `pages` pages of `page_size` tokens on `device`, of `host_pages` in host memory (pinned when the device is a GPU), and states
    of `rows` sequences for layers that keep a state instead of KV, with `marks` more to go on from (slots `rows` and up)."""

    def __init__(self, model: spec.Model, pages: int, page_size: int = 16, kv_dtype: str = "bf16", device: torch.device | str = "cpu",
                 host_pages: int = 0, rows: int = 1, marks: int = 0) -> None:
        if kv_dtype not in DTYPES:
            raise ValueError(f"kv_dtype {kv_dtype!r} is none of {', '.join(DTYPES)}")
        self.pages, self.page_size, self.host_pages, self.kv_dtype = pages, page_size, host_pages, kv_dtype
        self.device, self.window = torch.device(device), window(model)
        self.page_nbytes = page_nbytes(model, page_size, kv_dtype)
        groups: dict[tuple, list[int]] = {}
        for l, layer in enumerate(model.layers):
            if not isinstance(layer.attention, (spec.GatedDeltaNet, spec.Foreign)):
                groups.setdefault(shapes(layer.attention, page_size), []).append(l)
        self.stacks = tuple(self._stack(tuple(layers), *key) for key, layers in groups.items())
        self.layers: dict[int, KV | LatentKV] = {l: _record(stack, i) for stack in self.stacks for i, l in enumerate(stack.layers)}
        self.states = {l: _state(layer.attention, rows + marks + 1, self.device) for l, layer in enumerate(model.layers)
                       if isinstance(layer.attention, spec.GatedDeltaNet)}
        self.rows, self.marks, self.spare = rows, marks, rows + marks

    def _stack(self, layers: tuple[int, ...], parts: int, shape: tuple[int, ...], scales: tuple[int, ...]) -> Stack:
        dtype, host, pin = DTYPES[self.kv_dtype], torch.device("cpu"), self.device.type == "cuda" and self.host_pages > 0
        here, there = (len(layers), parts, self.pages), (self.host_pages, len(layers), parts)
        fp8 = self.kv_dtype == "fp8"
        return Stack(layers, _zeros((*here, *shape), dtype, self.device), _zeros((*here, *scales), torch.float32, self.device) if fp8 else None,
                     _zeros((*there, *shape), dtype, host, pin), _zeros((*there, *scales), torch.float32, host, pin) if fp8 else None)

    @property
    def nbytes(self) -> int:
        return self.page_nbytes * self.pages

    @property
    def token_nbytes(self) -> float:
        return self.page_nbytes / self.page_size

    @property
    def host_nbytes(self) -> int:
        return self.page_nbytes * self.host_pages

    def layer(self, l: int) -> KV | LatentKV:
        """The pages of layer `l`, as views: the same tensors for the cache's whole life."""
        return self.layers[l]

    def state(self, l: int) -> DeltaState:
        """What sequences keep in layer `l`: a slot per row of the batch, per mark, and one (`spare`) for rows that pad a step. A slot is
        found as it was left."""
        return self.states[l]

    def copy(self, orders: Iterable[Copy | StateCopy]) -> None:
        """Runs the orders one after another, on the current stream."""
        for order in orders:
            if isinstance(order, StateCopy):
                source, target = (order.row, self.rows + order.mark) if order.keep else (self.rows + order.mark, order.row)
                for state in self.states.values():
                    state.conv[target].copy_(state.conv[source])
                    state.memory[target].copy_(state.memory[source])
                continue
            for stack in self.stacks:
                for device, host in stack.pairs:
                    if order.to_host:
                        host[order.target].copy_(device[:, :, order.source], non_blocking=True)
                    else:
                        device[:, :, order.target].copy_(host[order.source], non_blocking=True)

    def scrub(self, pages: list[int]) -> None:
        """Zeros pages that may hold NaN or infinity, before anybody else gets them."""
        where = torch.tensor(pages, dtype=torch.int64, device=self.device)
        for stack in self.stacks:
            for device, _ in stack.pairs:
                device.view(torch.uint8).index_fill_(2, where, 0)


def _state(part: spec.GatedDeltaNet, rows: int, device: torch.device) -> DeltaState:
    return DeltaState(torch.zeros(rows, part.channels, part.kernel - 1, device=device),
                      torch.zeros(rows, part.value_heads, part.key_dim, part.value_dim, device=device))


def _record(stack: Stack, i: int) -> KV | LatentKV:
    values, scales = stack.values[i], stack.scales[i] if stack.scales is not None else None
    if len(values) == 1:
        return LatentKV(values[0], scales[0] if scales is not None else None)
    return KV(values[0], values[1], *((scales[0], scales[1]) if scales is not None else (None, None)))
