"""The tensors behind KV pages, on the device and in the host tier, the copies between them, and states; knows no request and no prefix.

Layers of one shape and one window share a stack, [layers, parts, pages, …], so that a page is one strided block per stack; the host tier keeps each
page in one piece. fp8 is e4m3 with one float32 scale per token and head (per token for latent KV), written once by whoever writes the page.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from hetero.arch import spec
from hetero.gpu.ops import KV, DeltaState, LatentKV
from hetero.memory.pool import Copy, Size, StateCopy

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}


def shapes(part: spec.GQA | spec.MLA, page_size: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """How many tensors one layer's page has, the shape of each, and the shape of its scales."""
    if isinstance(part, spec.MLA):
        return 1, (page_size, part.kv_rank + part.rope.dim), (page_size,)
    return 2, (part.kv_heads, page_size, part.head_dim), (part.kv_heads, page_size)


def page_nbytes(model: spec.Model, page_size: int, kv_dtype: str) -> list[int]:
    """Bytes of one page of each group of layers (`model.windows`)."""
    total = [0] * len(model.windows)
    for layer in model.layers:
        if isinstance(part := layer.attention, spec.GQA | spec.MLA):
            parts, shape, scales = shapes(part, page_size)
            each = torch.Size(shape).numel() * DTYPES[kv_dtype].itemsize + (torch.Size(scales).numel() * 4 if kv_dtype == "fp8" else 0)
            total[model.windows.index(spec.window(part))] += parts * each
    return total


@dataclass(frozen=True)
class Stack:
    """Layers of one group and page shape: values and scales (fp8 only) [layers, parts, pages, …]; their host tier [host_pages, layers, parts, …]."""

    group: int
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
    """KV on `device` in pages of `page_size` tokens, and states of `rows` sequences for layers that keep a state instead of KV, with `marks` more to
    go on from (slots `rows` and up). `pages`, `host_pages` (pinned when the device is a GPU): one number per group, or one for every group."""

    def __init__(self, model: spec.Model, pages: int | Sequence[int], page_size: int = 16, kv_dtype: str = "bf16",
                 device: torch.device | str = "cpu", host_pages: int | Sequence[int] = 0, rows: int = 1, marks: int = 0) -> None:
        if kv_dtype not in DTYPES:
            raise ValueError(f"kv_dtype {kv_dtype!r} is none of {', '.join(DTYPES)}")
        self.page_size, self.kv_dtype, self.device = page_size, kv_dtype, torch.device(device)
        here, there = ([n] * len(model.windows) if isinstance(n, int) else n for n in (pages, host_pages))
        self.sizes = tuple(Size(*size) for size in zip(here, there, model.windows, strict=True))
        self.page_nbytes = page_nbytes(model, page_size, kv_dtype)
        stacks: dict[tuple, list[int]] = {}
        for l, layer in enumerate(model.layers):
            if isinstance(part := layer.attention, spec.GQA | spec.MLA):
                stacks.setdefault((model.windows.index(spec.window(part)), *shapes(part, page_size)), []).append(l)
        self.stacks = tuple(self._stack(tuple(layers), *key) for key, layers in stacks.items())
        self.layers: dict[int, KV | LatentKV] = {l: _record(stack, i) for stack in self.stacks for i, l in enumerate(stack.layers)}
        self.states = {l: _state(layer.attention, rows + marks + 1, self.device) for l, layer in enumerate(model.layers)
                       if isinstance(layer.attention, spec.GatedDeltaNet)}
        self.rows, self.marks, self.spare = rows, marks, rows + marks

    def _stack(self, layers: tuple[int, ...], group: int, parts: int, shape: tuple[int, ...], scales: tuple[int, ...]) -> Stack:
        size, dtype, host = self.sizes[group], DTYPES[self.kv_dtype], torch.device("cpu")
        pin = self.device.type == "cuda" and size.host_count > 0
        here, there = (len(layers), parts, size.count), (size.host_count, len(layers), parts)
        fp8 = self.kv_dtype == "fp8"
        return Stack(group, layers, _zeros((*here, *shape), dtype, self.device),
                     _zeros((*here, *scales), torch.float32, self.device) if fp8 else None,
                     _zeros((*there, *shape), dtype, host, pin), _zeros((*there, *scales), torch.float32, host, pin) if fp8 else None)

    @property
    def nbytes(self) -> int:
        return sum(each * size.count for each, size in zip(self.page_nbytes, self.sizes, strict=True))

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
            for stack in [s for s in self.stacks if s.group == order.group]:
                for device, host in stack.pairs:
                    if order.to_host:
                        host[order.target].copy_(device[:, :, order.source], non_blocking=True)
                    else:
                        device[:, :, order.target].copy_(host[order.source], non_blocking=True)

    def scrub(self, pages: Sequence[Sequence[int]]) -> None:
        """Zeros pages of each group that may hold NaN or infinity, before anybody else gets them."""
        for stack in self.stacks:
            where = torch.tensor(pages[stack.group], dtype=torch.int64, device=self.device)
            for device, _ in stack.pairs:
                device.view(torch.uint8).index_fill_(2, where, 0)


def _state(part: spec.GatedDeltaNet, rows: int, device: torch.device) -> DeltaState:
    return DeltaState(torch.zeros(rows, part.channels, part.kernel - 1, device=device),
                      torch.zeros(rows, part.value_heads, part.key_dim, part.value_dim, device=device))


def _record(stack: Stack, i: int) -> KV | LatentKV:
    values, scales = stack.values[i], stack.scales[i] if stack.scales is not None else None
    if len(values) == 1:
        return LatentKV(values[0], scales[0] if scales is not None else None, stack.group)
    return KV(values[0], values[1], None if scales is None else scales[0], None if scales is None else scales[1], stack.group)
