"""From a spec, its dense tensors and executors for the routed experts to a decoder; knows the order of loading and no file."""

from collections.abc import Callable

from hetero.arch import spec
from hetero.gpu.ops import Experts, Norm, Ops
from hetero.model.attention import Attention
from hetero.model.decoder import Block, Decoder
from hetero.model.delta import DeltaNet
from hetero.model.ffn import Glu, Routed
from hetero.model.mla import LatentAttention
from hetero.model.weights import LayerWeights, Weights


def load_decoder(ops: Ops, model: spec.Model, weights: Weights, experts: Callable[[int, spec.MoE], Experts], format: str = "",
                 head_format: str = "", overlap: bool = True) -> Decoder:
    """`experts(layer, part)` makes the executor of a routed layer. Formats: "" keeps floats as `ops` stores them. overlap: see `ffn.Routed`."""
    top = weights.of(None)
    embed = ops.embed(top("embed"), model.embed_scale)
    blocks = [load_block(ops, model, l, weights, experts, format, overlap) for l in range(len(model.layers))]
    bias, scale = top.maybe("head.bias"), model.logit_scale
    head = ops.matrix(top("embed" if model.tied else "head"), None if bias is None else bias.float() * scale, head_format, logits=True)
    return Decoder(ops, model, embed, blocks, norm(ops, model, top, "norm", scale), head)


def load_block(ops: Ops, model: spec.Model, l: int, weights: Weights, experts: Callable[[int, spec.MoE], Experts], format: str,
               overlap: bool) -> Block:
    layer, w = model.layers[l], weights.of(l)
    attention = load_attention(ops, layer.attention, l, model.eps, weights, format)
    ffn = (Routed(ops, layer.ffn, l, weights, experts(l, layer.ffn), format, overlap) if isinstance(layer.ffn, spec.MoE)
           else Glu(ops, layer.ffn.act, "mlp", w, format))
    return Block(ops, layer, (norm(ops, model, w, "attn_norm"), norm(ops, model, w, "ffn_norm")), attention, ffn)


def load_attention(ops: Ops, part: spec.GQA | spec.MLA | spec.GatedDeltaNet | spec.Foreign, l: int, eps: float, weights: Weights,
                   format: str) -> Attention | LatentAttention | DeltaNet:
    if isinstance(part, spec.MLA):
        return LatentAttention(ops, part, l, eps, weights, format)
    if isinstance(part, spec.GatedDeltaNet):
        return DeltaNet(ops, part, l, eps, weights, format)
    assert isinstance(part, spec.GQA)
    return Attention(ops, part, l, eps, weights, format)


def norm(ops: Ops, model: spec.Model, w: LayerWeights, key: str, scale: float = 1.0) -> Norm:
    """`scale` multiplies the result: that of the logits goes in here, for the head is linear."""
    weight, bias = w(key).float() * scale, w.maybe(f"{key}.bias")
    return ops.norm(weight, None if bias is None else bias.float() * scale, model.eps)
