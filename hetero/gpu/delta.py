"""The gated delta rule (arXiv 2412.06464) in plain torch: a state per sequence instead of KV, in chunks for a prompt, in one step for a token.

Each value head keeps S [key_dim, value_dim]; a token decays it, takes out what its key finds there, puts its value in, and reads with its query:
S = exp(g) S + k (beta (v - k exp(g) S)), o = q S. Knows no projection and no layer.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from hetero.arch import spec
from hetero.gpu.ops import DeltaState, Row, Step

CHUNK = 64


def delta_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of N sequences: q, k [N, H, K], v [N, H, V], g, beta [N, H], state [N, H, K, V] -> out [N, H, V], the new state."""
    state = state * g.exp()[..., None, None]
    change = (v - torch.einsum("nhkv,nhk->nhv", state, k)) * beta[..., None]
    state = state + k[..., None] * change[..., None, :]
    return torch.einsum("nhkv,nhk->nhv", state, q), state


def delta_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """T tokens of one sequence: q, k [T, H, K], v [T, H, V], g, beta [T, H], state [H, K, V] -> out [T, H, V], the new state.

    Inside a chunk the changes solve a unit triangular system (the paper's WY form); from chunk to chunk only the state goes on."""
    parts = []
    for start in range(0, q.shape[0], chunk):
        qc, kc, vc = (t[start:start + chunk].transpose(0, 1) for t in (q, k, v))                     # [H, C, *]
        b, total = beta[start:start + chunk].T, g[start:start + chunk].T.cumsum(-1)                  # [H, C]
        apart = (total[:, :, None] - total[:, None]).tril().exp().tril()                             # decay from token j to token i
        system = torch.eye(qc.shape[1], device=q.device) + ((kc * b[..., None]) @ kc.transpose(1, 2) * apart).tril(-1)
        right = torch.cat([vc * b[..., None], kc * (b * total.exp())[..., None]], -1)
        fresh, old = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split([v.shape[-1], k.shape[-1]], -1)
        change = fresh - old @ state
        parts.append(((qc * total.exp()[..., None]) @ state + (qc @ kc.transpose(1, 2) * apart) @ change).transpose(0, 1))
        state = state * total[:, -1:, None].exp() + (kc * (total[:, -1:] - total).exp()[..., None]).transpose(1, 2) @ change
    return torch.cat(parts), state


class PlainDelta:
    """conv [channels, kernel], dt_bias and a_log [value_heads], norm [value_dim]; all arithmetic in float32."""

    def __init__(self, part: spec.GatedDeltaNet, eps: float, conv: Tensor, dt_bias: Tensor, a_log: Tensor, norm: Tensor) -> None:
        self.part, self.eps, self.note = part, eps, ""
        self.conv, self.dt_bias, self.rate, self.norm = conv.float(), dt_bias.float(), -a_log.float().exp(), norm.float()

    def __call__(self, inputs: Tensor, state: DeltaState, step: Step) -> Tensor:
        """inputs [T, channels + values + 2 value_heads], q | k | v | z | b | a -> [T, values]; moves each sequence's state on.

        A sequence whose first token here stands at position 0 starts from nothing, whatever its slot held."""
        a = self.part
        mixed, z, b, decay = inputs.float().split([a.channels, a.values, a.value_heads, a.value_heads], -1)
        beta, g = b.sigmoid(), self.rate * F.softplus(decay + self.dt_bias)
        if step.longest == 1:
            slots, fresh = step.states.long(), step.positions == 0
            past = torch.where(fresh[:, None, None], 0.0, state.conv[slots])
            memory = torch.where(fresh[:, None, None, None], 0.0, state.memory[slots])
            window = torch.cat([past, mixed[..., None]], -1)                                         # [T, channels, kernel]
            state.conv[slots] = window[..., 1:]
            out, state.memory[slots] = delta_step(*self.heads((window * self.conv).sum(-1)), g, beta, memory)
        else:
            out = torch.empty(inputs.shape[0], a.value_heads, a.value_dim, device=inputs.device)
            starts, slots_, first = step.starts.tolist(), step.states.tolist(), step.positions.tolist()
            for s, (i, j) in enumerate(pairwise(starts)):
                at, begins = slots_[s], first[i] == 0
                past = torch.zeros_like(state.conv[at]) if begins else state.conv[at]
                memory = torch.zeros_like(state.memory[at]) if begins else state.memory[at]
                row = torch.cat([past, mixed[i:j].T], -1)                                            # [channels, kernel - 1 + n]
                state.conv[at] = row[:, -(a.kernel - 1):]
                turned = (row.unfold(1, a.kernel, 1) * self.conv[:, None]).sum(-1).T
                out[i:j], state.memory[at] = delta_chunks(*self.heads(turned), g[i:j], beta[i:j], memory)
        normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + self.eps) * self.norm
        return (normed * F.silu(z.unflatten(-1, (a.value_heads, -1)))).flatten(1).to(inputs.dtype)

    def heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, channels] after the convolution -> q and k [T, value_heads, key_dim] of unit length (q scaled), v [T, value_heads, value_dim]."""
        a = self.part
        q, k, v = F.silu(mixed).split([a.keys, a.keys, a.values], -1)
        q, k = (t.unflatten(-1, (a.key_heads, -1)).repeat_interleave(a.value_heads // a.key_heads, 1) for t in (q, k))
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        return q * a.key_dim ** -0.5, k, v.unflatten(-1, (a.value_heads, -1))

    def row(self) -> Row:
        nbytes = sum(t.nbytes for t in (self.conv, self.dt_bias, self.rate, self.norm))
        return Row("delta net", str(self.conv.device), "torch.delta", "float32", nbytes, note=self.note)
