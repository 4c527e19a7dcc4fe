"""One decoder for every row: eager, fp32, no cache, no batching. What every fast path is measured against; knows files only in `load`."""

import json
import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from hetero.arch import families, rope, tensors
from hetero.arch.spec import GQA, MLA, Dense, GatedDeltaNet


def load(folder):
    """(model, tensors by (key, layer, expert) in float32) of a checkpoint folder in the published layouts."""
    folder = pathlib.Path(folder)
    model = families.read(json.loads((folder / "config.json").read_text()))
    raw = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw |= load_file(path)
    found = {(t.key, t.layer, t.expert): find(model, raw, t).float() for t in tensors.of(model)}
    return model, {key: t + model.norm_shift if key[0] in tensors.SHIFTED else t for key, t in found.items()}


def find(model, raw, t):
    if t.name in raw:
        found = raw[t.name]
    elif t.home == "expert" and "experts.gate_up" in model.names:            # Granite: gate above up, all experts in one tensor
        whole = raw[model.names["experts.down" if "down" in t.key else "experts.gate_up"].format(l=t.layer)][t.expert]
        found = whole if "down" in t.key else whole.chunk(2)["up" in t.key]
    elif "shared.gate_up" in model.names and t.key in ("shared.gate", "shared.up"):
        found = raw[model.names["shared.gate_up"].format(l=t.layer)].chunk(2)["up" in t.key]
    else:                                                                    # gpt-oss: all experts in one tensor, transposed, gate and up interleaved
        at, part = t.name.split(".experts.")[0] + ".experts.", t.key.removeprefix("expert.").removesuffix(".bias")
        bias = "_bias" if t.key.endswith(".bias") else ""
        whole = raw[at + ("down_proj" if part == "down" else "gate_up_proj") + bias][t.expert]
        found = (whole if part == "down" else whole[..., part == "up"::2]).T if not bias else (whole if part == "down" else whole[part == "up"::2])
    return found.reshape(t.shape)


def rms(x, w, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def turn(x, r, length=0):
    """x: (tokens, heads, dim) at positions 0, 1, ..."""
    if r is None:
        return x
    freq, size = rope.frequencies(r, length or x.shape[0])
    a = torch.outer(torch.arange(x.shape[0]).float(), torch.from_numpy(freq))[:, None]
    cos, sin = a.cos() * size, a.sin() * size
    part, rest = x[..., :r.dim], x[..., r.dim:]
    a, b = (part[..., ::2], part[..., 1::2]) if r.interleaved else part.chunk(2, -1)
    p, q = a * cos - b * sin, b * cos + a * sin
    return torch.cat([torch.stack([p, q], -1).flatten(-2) if r.interleaved else torch.cat([p, q], -1), rest], -1)


def attend(q, k, v, scale, window=None, sinks=None):
    """q, k, v: (tokens, heads, dim)"""
    n, group = q.shape[0], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("qhd,khd->hqk", q, k) * scale
    i = torch.arange(n)
    s = s.masked_fill(~((i[:, None] >= i) & ((i[:, None] - i) < (window or n))), -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(-1, n, 1)], -1)
    return torch.einsum("hqk,khd->qhd", s.softmax(-1)[..., :n], v).flatten(1)


def activate(act, gate, up):
    if act.limit:
        gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
    if act.kind == "silu":
        return gate * torch.sigmoid(act.alpha * gate) * (up + act.up_shift)
    return {"gelu": F.gelu, "gelu_tanh": lambda g: F.gelu(g, approximate="tanh"), "relu2": lambda g: F.relu(g) ** 2}[act.kind](gate) * (up + act.up_shift)


def sparsemixer(scores, jitter):
    """Two picks; each weighed by a softmax over the scores within 2 * jitter of it, the second without the first (arXiv 2409.12136)."""
    ids, weights, left = [], [], scores
    for _ in range(2):
        best, pick = left.max(-1, keepdim=True)
        far = (best - scores) / scores.abs().clamp(min=best) > 2 * jitter
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, pick))
        ids.append(pick)
        left = left.scatter(-1, pick, -torch.inf)
    return torch.cat(ids, -1), torch.cat(weights, -1)


def route(r, logits, correction=None):
    """(ids [T, k], weights [T, k]) from router logits [T, E]"""
    if r.score == "sparsemixer":
        return sparsemixer(logits, r.jitter)
    score = {"softmax": lambda: logits.softmax(-1), "sigmoid": logits.sigmoid, "topk_softmax": lambda: logits}[r.score]()
    pick = score if correction is None else score + correction
    if r.groups > 1:
        g = pick.unflatten(-1, (r.groups, -1))
        best = g.amax(-1) if r.group_score == "max" else g.topk(2, -1)[0].sum(-1)
        keep = torch.zeros_like(best).scatter(-1, best.topk(r.top_groups, -1)[1], 1.0)
        pick = (g * keep[..., None]).flatten(-2)
    ids = pick.topk(r.top_k, -1)[1]
    w = score.gather(-1, ids)
    if r.score == "topk_softmax":
        w = w.softmax(-1)
    if r.renormalize:
        w = w / w.sum(-1, keepdim=True)
    return ids, w * r.scale


class Oracle:
    """logits = Oracle(model, tensors)(ids)"""

    def __init__(self, model, found):
        self.model, self.t = model, found

    def linear(self, key, x, l=None, e=None):
        return F.linear(x, self.t[key, l, e], self.t.get((key + ".bias", l, e)))

    def norm(self, key, x, l=None):
        if self.model.norm_bias and (key + ".bias", l, None) in self.t:
            return F.layer_norm(x, x.shape[-1:], self.t[key, l, None], self.t[key + ".bias", l, None], self.model.eps)
        return rms(x, self.t[key, l, None], self.model.eps)

    def __call__(self, ids):
        """ids: list of T tokens; logits [T, V]"""
        m = self.model
        x = self.t["embed", None, None][torch.as_tensor(ids)] * m.embed_scale
        for l, layer in enumerate(m.layers):
            for key, part, f in (("attn_norm", layer.attention, self.attention), ("ffn_norm", layer.ffn, self.ffn)):
                x = x + layer.residual_scale * (self.norm(key, f(part, l, x), l) if layer.norm_after else f(part, l, self.norm(key, x, l)))
        head = self.t["embed" if m.tied else "head", None, None]
        return F.linear(self.norm("norm", x), head, self.t.get(("head.bias", None, None))) * m.logit_scale

    def attention(self, a, l, x):
        if isinstance(a, MLA):
            return self.mla(a, l, x)
        if isinstance(a, GatedDeltaNet):
            return self.delta(a, l, x)
        assert isinstance(a, GQA)
        q, k, v = (self.linear(f"attn.{p}", x, l) for p in "qkv")
        if a.gate:
            q, gate = (t.flatten(1) for t in q.unflatten(-1, (a.heads, 2, -1)).unbind(2))
        if a.qk_norm == "full":
            q, k = self.norm("attn.q_norm", q, l), self.norm("attn.k_norm", k, l)
        if a.clip:
            q, k, v = (t.clamp(-a.clip, a.clip) for t in (q, k, v))
        q, k, v = (t.unflatten(-1, (-1, a.head_dim)) for t in (q, k, v))
        if a.qk_norm == "head":
            q, k = self.norm("attn.q_norm", q, l), self.norm("attn.k_norm", k, l)
        q, k = turn(q, a.rope), turn(k, a.rope)
        if a.qk_norm == "rotated":
            q, k = self.norm("attn.q_norm", q, l), self.norm("attn.k_norm", k, l)
        y = attend(q, k, v, a.scale or a.head_dim ** -0.5, a.window, self.t["attn.sinks", l, None] if a.sinks else None)
        return self.linear("attn.o", y * gate.sigmoid() if a.gate else y, l)

    def delta(self, a, l, x):
        if a.grouped:
            each = a.value_heads // a.key_heads
            q, k, v, z = self.linear("delta.qkvz", x, l).unflatten(-1, (a.key_heads, -1)).split([a.key_dim, a.key_dim, each * a.value_dim, each * a.value_dim], -1)
            mixed, z = torch.cat([t.flatten(1) for t in (q, k, v)], -1), z.flatten(1)
        else:
            mixed, z = (self.linear(f"delta.{p}", x, l) for p in ("qkv", "z"))
        if a.paired:
            each = a.value_heads // a.key_heads
            b, decay = (t.flatten(1) for t in self.linear("delta.ba", x, l).unflatten(-1, (a.key_heads, -1)).split([each, each], -1))
        else:
            b, decay = (self.linear(f"delta.{p}", x, l) for p in "ba")
        mixed = F.pad(mixed, (0, 0, a.kernel - 1, 0)).unfold(0, a.kernel, 1)                             # [T, channels, kernel]
        mixed = F.silu((mixed * self.t["delta.conv", l, None][:, 0]).sum(-1))
        q, k, v = mixed.split([a.keys, a.keys, a.values], -1)
        q, k = (t.unflatten(-1, (a.key_heads, -1)).repeat_interleave(a.value_heads // a.key_heads, 1) for t in (q, k))
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        v = v.unflatten(-1, (a.value_heads, -1))
        keep = (-self.t["delta.a_log", l, None].exp() * F.softplus(decay + self.t["delta.dt_bias", l, None])).exp()
        state, out = torch.zeros(a.value_heads, a.key_dim, a.value_dim), []
        for t in range(x.shape[0]):
            state = state * keep[t, :, None, None]
            change = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * b[t].sigmoid()[:, None]
            state = state + torch.einsum("hk,hv->hkv", k[t], change)
            out.append(torch.einsum("hkv,hk->hv", state, q[t]) * a.key_dim ** -0.5)
        y = rms(torch.stack(out), self.t["delta.norm", l, None], self.model.eps) * F.silu(z.unflatten(-1, (a.value_heads, -1)))
        return self.linear("delta.o", y.flatten(1), l)

    def mla(self, a, l, x):
        if a.q_rank is None:
            q = self.linear("attn.q", x, l)
        else:
            q = self.linear("attn.q_b", self.norm("attn.q_a_norm", self.linear("attn.q_a", x, l), l), l)
        q = q.unflatten(-1, (a.heads, -1))
        latent, k_rope = self.linear("attn.kv_a", x, l).split([a.kv_rank, a.rope.dim], -1)
        kv = self.linear("attn.kv_b", self.norm("attn.kv_a_norm", latent, l), l).unflatten(-1, (a.heads, -1))
        k, v = kv.split([a.nope_dim, a.v_dim], -1)
        q = torch.cat([q[..., :a.nope_dim], turn(q[..., a.nope_dim:], a.rope)], -1)
        k = torch.cat([k, turn(k_rope[:, None], a.rope).expand(-1, a.heads, -1)], -1)
        return self.linear("attn.o", attend(q, k, v, a.scale or q.shape[-1] ** -0.5), l)

    def ffn(self, f, l, x):
        if isinstance(f, Dense):
            return self.glu(f.act, "mlp", l, x)
        ids, weights = route(f.router, self.linear("router", x, l), self.t.get(("router.correction", l, None)))
        y = torch.zeros_like(x)
        for e in ids.unique().tolist():
            row, slot = (ids == e).nonzero(as_tuple=True)
            w = weights[row, slot, None]
            y.index_add_(0, row, self.glu(f.act, "expert", l, x[row], e) * w)
        if f.shared:
            s = self.glu(f.act, "shared", l, x)
            y = y + (s * self.linear("shared_gate", x, l).sigmoid() if f.shared_gate else s)
        return y

    def glu(self, act, key, l, x, e=None):
        return self.linear(f"{key}.down", activate(act, self.linear(f"{key}.gate", x, l, e), self.linear(f"{key}.up", x, l, e)), l, e)
