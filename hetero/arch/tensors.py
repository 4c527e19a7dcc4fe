"""The list of a model's tensors (key, name, shape, home), which completeness, plan, dummy weights and packing follow; knows no file."""

from collections.abc import Iterator
from math import prod

from hetero.arch.spec import GQA, MLA, Dense, Foreign, GatedDeltaNet, Layer, Model, MoE, Tensor

EXPERT_PARTS = ("gate", "up", "down")
SHIFTED = frozenset({"norm", "attn_norm", "ffn_norm", "attn.q_norm", "attn.k_norm"})       # the weights that Model.norm_shift is added to


def of(model: Model) -> Iterator[Tensor]:
    """Every logical tensor of the model, globals first, then layer by layer, experts last within a layer."""
    def tensor(key: str, shape: tuple[int, ...], layer: int | None = None, expert: int | None = None) -> Tensor:
        name = model.names[key].format(l=layer, e=expert)
        return Tensor(key, layer, expert, name, shape, "dense" if expert is None else "expert")

    for key, shape in _globals(model):
        yield tensor(key, shape)
    for l, layer in enumerate(model.layers):
        for key, shape in _layer(model, layer):
            yield tensor(key, shape, l)
        if isinstance(layer.ffn, MoE):
            for e in range(layer.ffn.router.experts):
                for key, shape in expert_shapes(model, layer.ffn):
                    yield tensor(key, shape, l, e)


def expert_shapes(model: Model, moe: MoE) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Keys and shapes of one routed expert: gate and up [I, H], down [H, I]; biases [I], [I], [H]."""
    H, I = moe.hidden or model.hidden, moe.width
    for part in EXPERT_PARTS if moe.gated else EXPERT_PARTS[1:]:
        yield f"expert.{part}", (H, I) if part == "down" else (I, H)
        if moe.bias:
            yield f"expert.{part}.bias", (H if part == "down" else I,)


def parameters(model: Model) -> tuple[int, int]:
    """(total, active): what the model holds, and what one token is multiplied with. The embedding counts once when tied; as a
    table that is only looked up it is not active, unless it is the head too. Publishers differ: some count it as active."""
    total = active = 0
    for key, shape in _globals(model):
        total += prod(shape)
        active += prod(shape) if key != "embed" or model.tied else 0
    for layer in model.layers:
        rest = sum(prod(shape) for _, shape in _layer(model, layer))
        expert = sum(prod(shape) for _, shape in expert_shapes(model, layer.ffn)) if isinstance(layer.ffn, MoE) else 0
        experts, top_k = (layer.ffn.router.experts, layer.ffn.router.top_k) if isinstance(layer.ffn, MoE) else (0, 0)
        total += rest + experts * expert
        active += rest + top_k * expert
    return total, active


def dense(model: Model) -> Iterator[tuple[int | None, str, tuple[int, ...]]]:
    """(layer, key, shape) of everything but routed experts."""
    for key, shape in _globals(model):
        yield None, key, shape
    for l, layer in enumerate(model.layers):
        for key, shape in _layer(model, layer):
            yield l, key, shape


def _globals(model: Model) -> Iterator[tuple[str, tuple[int, ...]]]:
    H, V = model.hidden, model.vocab
    yield "embed", (V, H)
    if model.foreign:
        yield from model.others
    else:
        yield from _norm("norm", model)
    if not model.tied:
        yield "head", (V, H)
    if model.head_bias:
        yield "head.bias", (V,)


def _norm(key: str, model: Model) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield key, (model.hidden,)
    if model.norm_bias:
        yield f"{key}.bias", (model.hidden,)


def _glu(key: str, hidden: int, width: int, bias: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
        yield f"{key}.{part}", shape
        if bias:
            yield f"{key}.{part}.bias", shape[:1]


def _layer(model: Model, layer: Layer) -> Iterator[tuple[str, tuple[int, ...]]]:
    H, ffn = model.hidden, layer.ffn
    if isinstance(layer.attention, Foreign):
        yield from layer.attention.tensors
        return
    yield from _norm("attn_norm", model)
    yield from _attention(layer.attention, H)
    yield from _norm("ffn_norm", model)
    if isinstance(ffn, Dense):
        yield from _glu("mlp", H, ffn.width, ffn.bias)
        return
    r = ffn.router
    yield "router", (r.experts, H)
    if r.bias:
        yield "router.bias", (r.experts,)
    if r.correction:
        yield "router.correction", (r.experts,)
    if ffn.shared:
        yield from _glu("shared", H, ffn.shared)
    if ffn.shared_gate:
        yield "shared_gate", (1, H)


def _attention(a: GQA | MLA | GatedDeltaNet | Foreign, H: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if isinstance(a, GQA):
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        for part, rows in (("q", q * (1 + a.gate)), ("k", kv), ("v", kv)):
            yield f"attn.{part}", (rows, H)
            if a.bias:
                yield f"attn.{part}.bias", (rows,)
        if a.qk_norm != "none":
            yield "attn.q_norm", (q if a.qk_norm == "full" else a.head_dim,)
            yield "attn.k_norm", (kv if a.qk_norm == "full" else a.head_dim,)
        if a.sinks:
            yield "attn.sinks", (a.heads,)
        yield "attn.o", (H, q)
        if a.out_bias:
            yield "attn.o.bias", (H,)
        return
    assert not isinstance(a, Foreign)
    if isinstance(a, GatedDeltaNet):
        yield from _delta(a, H)
        return
    head = a.nope_dim + a.rope.dim
    if a.q_rank is None:
        yield "attn.q", (a.heads * head, H)
    else:
        yield "attn.q_a", (a.q_rank, H)
        yield "attn.q_a_norm", (a.q_rank,)
        yield "attn.q_b", (a.heads * head, a.q_rank)
    yield "attn.kv_a", (a.kv_rank + a.rope.dim, H)
    yield "attn.kv_a_norm", (a.kv_rank,)
    yield "attn.kv_b", (a.heads * (a.nope_dim + a.v_dim), a.kv_rank)
    yield "attn.o", (H, a.heads * a.v_dim)


def _delta(a: GatedDeltaNet, H: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if a.grouped:
        yield "delta.qkvz", (a.channels + a.values, H)
    else:
        yield "delta.qkv", (a.channels, H)
        yield "delta.z", (a.values, H)
    if a.paired:
        yield "delta.ba", (2 * a.value_heads, H)
    else:
        yield "delta.b", (a.value_heads, H)
        yield "delta.a", (a.value_heads, H)
    yield "delta.conv", (a.channels, 1, a.kernel)
    yield "delta.dt_bias", (a.value_heads,)
    yield "delta.a_log", (a.value_heads,)
    yield "delta.norm", (a.value_dim,)
    yield "delta.o", (H, a.values)
