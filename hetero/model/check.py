"""The self-test before anything is served: each part and format that will run, against its plain twin on random data; knows no request."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpu_kernels import ExpertLayer, ExpertStore
from cpu_kernels import plain as twins
from cpu_kernels.team import Team
from hetero.arch import spec
from hetero.arch.rope import stretched
from hetero.gpu.ops import KV, Check, LatentKV, Matrix, Ops
from hetero.gpu.plain import Plain
from hetero.memory.cache import Cache
from hetero.model.step import single

PROMPT, PAGE = 19, 16
WEIGHTS = {"": 1e-5, "f32": 1e-5, "bf16": 1e-5, "int8": 0.03, "int8_g32": 0.03}     # of a product's largest value


def check_parts(ops: Ops, model: spec.Model, kv_dtype: str, dense_format: str) -> Iterator[Check]:
    """Matrices, attention of every shape and routers of every kind that the model has."""
    rough = 0.0 if ops.dtype == torch.float32 else 0.02                              # what 16-bit activations may add
    ropes = [part.rope for layer in model.layers if isinstance(part := layer.attention, spec.GQA | spec.MLA)]
    twin = Plain(max(PROMPT + 1, ops.context) if stretched(ropes, ops.context) else PROMPT + 1, str(ops.device))
    for format in dict.fromkeys(("f32", dense_format)):
        weight = drawn(80, min(model.hidden, 1024)) / min(model.hidden, 1024) ** 0.5
        weight = weight.bfloat16() if format == "bf16" else weight
        ours, theirs = ops.matrix(weight, None, format), twin.matrix(weight.float())
        for tokens in (1, 9):
            x = drawn(tokens, ours.cols).to(ops.device, ops.dtype)
            yield result(ours, f"{tokens} tokens", ours(x), theirs(x.float()), WEIGHTS.get(format, 0.2) + rough)
    fine = {"f32": 1e-4, "bf16": 5e-3, "fp16": 5e-3, "fp8": 0.05}[kv_dtype] + rough
    for part in dict.fromkeys(layer.attention for layer in model.layers):
        if isinstance(part, (spec.GQA, spec.MLA)):
            yield check_attention(ops, twin, model, part, kv_dtype, fine)
    for router in dict.fromkeys(f.router for layer in model.layers if isinstance(f := layer.ffn, spec.MoE)):
        correction = drawn(router.experts) / 4 if router.correction else None
        logits = drawn(5, router.experts).to(ops.device)
        (ids, weights), (ids2, weights2) = ops.route(router, correction)(logits), twin.route(router, correction)(logits)
        error = 1.0 if not torch.equal(ids, ids2) else difference(weights, weights2)
        yield Check("router", ops.route(router, correction).row().kernel, router.score, error, 1e-4)


def check_attention(ops: Ops, twin: Plain, model: spec.Model, part: spec.GQA | spec.MLA, kv_dtype: str, bound: float) -> Check:
    """A prompt in one chunk, then one token, over pages of the type that will serve; no further than the context, where rotations end."""
    one = spec.Model("check", model.hidden, 1, model.eps, (spec.Layer(part, model.layers[0].ffn),), True, {})
    runs: list[Tensor] = []
    prompt = min(PROMPT, max(1, ops.context - 1))
    spans = [(start, n) for start, n in ((0, prompt), (prompt, 1)) if start + n <= ops.context]
    given = [drawn(n, width) for _, n in spans for width in widths(part)]
    made = [Attending(o, part, model.eps) for o in (ops, twin)]
    for o, call in zip((ops, twin), made, strict=True):
        kv = Cache(one, 2, PAGE, kv_dtype, o.device).layer(0)
        inputs = iter([t.to(ops.device, ops.dtype).to(o.dtype).clone() for t in given])
        rows = []
        for start, n in spans:
            step = single(torch.zeros(n, dtype=torch.int64), start, PAGE, torch.arange(n), str(o.device))
            rows.append(call([next(inputs) for _ in widths(part)], kv, step))
        runs.append(torch.cat(rows))
    return Check("attention", made[0].kernel, kv_dtype, difference(*runs), bound)


def widths(part: spec.GQA | spec.MLA) -> tuple[int, ...]:
    """Of what a part is called with, per token."""
    if isinstance(part, spec.GQA):
        return ((part.heads + 2 * part.kv_heads) * part.head_dim,)
    return part.heads * (part.nope_dim + part.rope.dim), part.kv_rank + part.rope.dim


class Attending:
    """One attention part with weights that are the same on every device."""

    def __init__(self, ops: Ops, part: spec.GQA | spec.MLA, eps: float) -> None:
        if isinstance(part, spec.MLA):
            latent = ops.latent_attend(part, eps, drawn(part.kv_rank).abs() + 0.5, drawn(part.heads * (part.nope_dim + part.v_dim), part.kv_rank) / 8)
            self.call: Any = latent
            self.kernel = latent.row().kernel
            return
        sizes = {"none": None, "full": (part.heads * part.head_dim, part.kv_heads * part.head_dim)}.get(part.qk_norm, (part.head_dim,) * 2)
        q_norm, k_norm = (None, None) if sizes is None else (drawn(sizes[0]).abs() + 0.5, drawn(sizes[1]).abs() + 0.5)
        grouped = ops.attend(part, eps, q_norm, k_norm, drawn(part.heads) if part.sinks else None)
        self.call, self.kernel = grouped, grouped.row().kernel

    def __call__(self, inputs: list[Tensor], kv: KV | LatentKV, step: Any) -> Tensor:
        out: Tensor = self.call(*inputs, kv, step)
        return out


def drawn(*shape: int) -> Tensor:
    """Normal numbers, the same for the same shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, of the twin's largest value; infinite when anything is not finite."""
    found = ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()
    return found if found == found else float("inf")


def result(matrix: Matrix, what: str, ours: Tensor, theirs: Tensor, bound: float) -> Check:
    row = matrix.row()
    return Check(row.part, f"{row.kernel}, {what}", row.format, difference(ours, theirs), bound)


def matrices(store: ExpertStore, e: int) -> tuple[Any, Any, Any]:
    """gate (None when there is none), up and down of one expert as the kernels multiply them, float64."""
    return store.dequantize(e, "gate") if store.gated else None, store.dequantize(e, "up"), store.dequantize(e, "down")


def check_experts(layers: Mapping[int, ExpertLayer], team: Team) -> Iterator[Check]:
    """The first layer of each shape and format on two random tokens, against the float64 twin over the same packed bytes."""
    for layer in unlike(layers.values()):
        store, rng = layer.store, np.random.default_rng(0)
        x = rng.standard_normal((2, store.hidden)).astype(np.float32)
        ids = rng.integers(0, store.experts, (2, 1)).astype(np.int32)
        weights, out = np.full((2, 1), 0.5, np.float32), np.empty_like(x)
        layer.run(x, ids, weights, out, team)
        act = (layer.act.kind, layer.act.alpha, layer.act.limit, layer.act.up_shift)
        given = x, ids, weights, lambda e, store=store: matrices(store, e), act
        twin = twins.moe(store.form, *given, layer.biases, layer.weight_on, True, store.orders)
        error = float(np.abs(out - twin).max() / np.abs(twin).max())
        yield Check("experts", f"rows.{store.form}", store.form, error if error == error else float("inf"), 2e-3)


def unlike(layers: Iterable[ExpertLayer]) -> Iterator[ExpertLayer]:
    """One layer of each format, shape and activation."""
    seen = set()
    for layer in layers:
        key = (layer.store.form, layer.store.hidden, layer.store.inter, layer.act)
        if key not in seen:
            seen.add(key)
            yield layer
