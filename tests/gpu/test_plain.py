"""The plain twins against formulas written another way: whole-sequence attention, unabsorbed MLA, torch's own operators."""
import math

import pytest
import torch
import torch.nn.functional as F

from hetero.arch import spec
from hetero.gpu import plain
from hetero.gpu.ops import KV, LatentKV, Step

FP8 = torch.float8_e4m3fn


def steps_of(cuts: list[int], page: int, table: torch.Tensor) -> list[Step]:
    """One sequence fed in chunks."""
    out, done = [], 0
    for n in cuts:
        at = torch.arange(done, done + n)
        slots = table[0, at // page].long() * page + at % page
        done += n
        out.append(Step(torch.zeros(n, dtype=torch.long), at.int(), torch.tensor([0, n], dtype=torch.int32), torch.tensor([done], dtype=torch.int32),
                        table, slots, torch.zeros(1, dtype=torch.int32), torch.arange(n), n))
    return out


def gqa_pages(part: spec.GQA, pages: int, page: int, dtype: torch.dtype) -> KV:
    shape = (pages, part.kv_heads, page)
    scales = [torch.full(shape, torch.nan) if dtype == FP8 else None for _ in range(2)]
    return KV(*(torch.full((*shape, part.head_dim), torch.nan).to(dtype) for _ in range(2)), *scales)


def whole(part: spec.GQA, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    n = q.shape[0]
    i = torch.arange(n)
    mask = (i[:, None] >= i) & (i[:, None] - i < (part.window or n))
    q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    if sinks is None:
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)[0]
    else:
        k, v = k.repeat_interleave(part.heads // part.kv_heads, 0), v.repeat_interleave(part.heads // part.kv_heads, 0)
        e = ((q @ k.mT) / math.sqrt(part.head_dim)).masked_fill(~mask, -torch.inf).exp()
        y = (e / (e.sum(-1, keepdim=True) + sinks.exp()[:, None, None])) @ v
    return y.transpose(0, 1).flatten(1)


@pytest.mark.parametrize(("window", "sinks"), [(None, False), (None, True), (5, False), (5, True)])
@pytest.mark.parametrize("cuts", [[37], [1] * 20, [7, 1, 20, 1]])
def test_paged_attention_in_any_chunks_is_attention_over_the_whole_sequence(window: int | None, sinks: bool, cuts: list[int]) -> None:
    torch.manual_seed(1)
    part = spec.GQA(heads=4, kv_heads=2, head_dim=16, rope=None, window=window, sinks=sinks)
    weights = torch.randn(4) if sinks else None
    n, table = sum(cuts), torch.tensor([[5, 2, 7, 1, 3, 4, -1]], dtype=torch.int32)
    kv = gqa_pages(part, 9, 8, torch.float32)
    qkv = torch.randn(n, 8 * 16)
    attend = plain.Plain(64).attend(part, 1e-6, sinks=weights)
    got = torch.cat([attend(rows, kv, step) for rows, step in zip(qkv.split(cuts), steps_of(cuts, 8, table), strict=True)])
    q, k, v = (t.unflatten(-1, (-1, 16)) for t in qkv.split([64, 32, 32], -1))
    torch.testing.assert_close(got, whole(part, q, k, v, weights), atol=1e-5, rtol=1e-5)


def test_pages_given_back_outside_the_window_are_never_read() -> None:
    part = spec.GQA(heads=2, kv_heads=1, head_dim=8, rope=None, window=6)
    qkv = torch.randn(20, 32)
    attend, outs = plain.Plain(64).attend(part, 1e-6), []
    for give_back in (False, True):
        table = torch.tensor([[1, 2, 3, 4, 5]], dtype=torch.int32)
        kv = gqa_pages(part, 6, 4, torch.float32)
        first, last = steps_of([19, 1], 4, table)
        attend(qkv[:19], kv, first)
        if give_back:
            table[0, :3] = -1
            kv.keys[:4], kv.values[:4] = torch.nan, torch.nan
        outs.append(attend(qkv[19:], kv, last))
    assert torch.equal(outs[0], outs[1])


def test_fp8_pages_keep_each_vector_within_a_sixteenth_of_its_size() -> None:
    torch.manual_seed(2)
    part = spec.GQA(heads=2, kv_heads=2, head_dim=64, rope=None)
    kv, table = gqa_pages(part, 4, 8, FP8), torch.tensor([[3, 1]], dtype=torch.int32)
    qkv = torch.randn(12, 6 * 64) * 50
    plain.Plain(64).attend(part, 1e-6)(qkv, kv, steps_of([12], 8, table)[0])
    keys = plain.read_pages(kv.keys, kv.key_scales, table[0], 12)
    wanted = qkv[:, 128:256].unflatten(-1, (2, 64))
    assert (keys - wanted).abs().max() <= wanted.abs().max() / 16
    assert ((keys - wanted).norm() / wanted.norm()).item() < 0.04


@pytest.mark.parametrize("cuts", [[21], [1] * 12, [9, 1, 4]])
def test_absorbed_latent_attention_equals_the_unabsorbed_formula(cuts: list[int]) -> None:
    torch.manual_seed(3)
    part = spec.MLA(heads=3, q_rank=None, kv_rank=24, nope_dim=16, v_dim=12, rope=spec.Rope(8, 1e4, interleaved=True))
    ops, n = plain.Plain(64), sum(cuts)
    q, latent = torch.randn(n, 3 * 24), torch.randn(n, 32)
    norm, kv_b = torch.rand(24) + 0.5, torch.randn(3 * 28, 24) / 5
    kv = LatentKV(torch.full((5, 8, 32), torch.nan))
    table = torch.tensor([[4, 2, 1]], dtype=torch.int32)
    attend = ops.latent_attend(part, 1e-6, norm, kv_b)
    got = torch.cat([attend(a, b, kv, step) for a, b, step in zip(q.split(cuts), latent.split(cuts), steps_of(cuts, 8, table), strict=True)])
    cos, sin = (t[:n] for t in ops.table(part.rope))
    heads = q.unflatten(-1, (3, 24))
    queries = torch.cat([heads[..., :16], plain.rotate(heads[..., 16:], cos, sin, True)], -1)
    k, v = (plain.rms_norm(latent[:, :24], norm, 1e-6) @ kv_b.T).unflatten(-1, (3, 28)).split([16, 12], -1)
    keys = torch.cat([k, plain.rotate(latent[:, None, 24:], cos, sin, True).expand(-1, 3, -1)], -1)
    y = F.scaled_dot_product_attention(queries.transpose(0, 1), keys.transpose(0, 1), v.transpose(0, 1), is_causal=True).transpose(0, 1).flatten(1)
    torch.testing.assert_close(got, y, atol=1e-5, rtol=1e-5)


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    rope, ops = spec.Rope(8, 1e4), plain.Plain(128)
    q, k = torch.randn(1, 1, 12), torch.randn(1, 1, 12)
    cos, sin = ops.table(rope)

    def at(x: torch.Tensor, p: int) -> torch.Tensor:
        return plain.rotate(x, cos[p:p + 1], sin[p:p + 1], False)
    torch.testing.assert_close(at(q, 90).norm(), q.norm())
    torch.testing.assert_close((at(q, 50) * at(k, 43)).sum(), (at(q, 107) * at(k, 100)).sum(), atol=1e-4, rtol=1e-4)
    assert torch.equal(at(q, 7)[..., 8:], q[..., 8:])


def test_the_router_picks_by_corrected_scores_within_the_best_groups_and_weighs_by_plain_scores() -> None:
    part = spec.Router(experts=8, top_k=2, score="sigmoid", renormalize=True, scale=2.0, groups=4, top_groups=2, group_score="top2", correction=True)
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 3.0, -4.0, 0.5, 0.6]])
    correction = torch.tensor([0.0, 0.0, -9.0, 0.0, 0.0, 0.0, 0.5, 0.0])
    ids, weights = plain.select(part, logits, correction)
    # group sums: .5+.73, <0, .95+.02, 1.12+.65: groups 3 and 0 are kept
    s = logits.sigmoid()[0]
    assert ids.tolist() == [[6, 1]]
    torch.testing.assert_close(weights[0], 2.0 * torch.stack([s[6], s[1]]) / (s[6] + s[1]))


def test_equal_scores_go_to_the_lower_id() -> None:
    ids, weights = plain.select(spec.Router(experts=64, top_k=4, score="softmax", renormalize=True), torch.zeros(3, 64), None)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    torch.testing.assert_close(weights, torch.full((3, 4), 0.25))


def test_experts_skip_ids_that_are_not_theirs_and_keep_bad_numbers_in_their_row() -> None:
    torch.manual_seed(4)
    part = spec.MoE(spec.Router(4, 2, "softmax", True), width=8)
    experts = plain.PlainExperts(part, *(torch.randn(4, *s) for s in ((8, 16), (8, 16), (16, 8))))
    x = torch.randn(3, 16)
    x[1] = torch.nan
    experts.start(x, torch.tensor([[0, -1], [0, 1], [-1, -1]], dtype=torch.int32), torch.ones(3, 2))
    y = experts.finish()
    torch.testing.assert_close(y[0], experts.expert(0, x[0]))
    assert y[1].isnan().all() and (y[2] == 0).all()
