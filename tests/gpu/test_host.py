"""Each part of the CPU's arithmetic against its plain twin, run at once and recorded, on one thread and on two."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cpu_kernels import cpu
from cpu_kernels.small import in_series
from cpu_kernels.team import Team
from hetero.arch import spec
from hetero.gpu import plain
from hetero.gpu.host import Host
from hetero.gpu.ops import KV, Step

ROUTERS = [
    spec.Router(64, 4, "softmax", True, 2.0), spec.Router(60, 4, "softmax", False), spec.Router(64, 4, "softmax", False, 1.0, 8, 3, "max"),
    spec.Router(64, 4, "sigmoid", True, 1.5, 8, 3, "top2", True), spec.Router(32, 4, "topk_softmax", False),
    spec.Router(16, 2, "sparsemixer", False, jitter=0.01)]


@pytest.fixture(scope="module", params=[1, 2])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    with Team(cores=cpu.read().allowed[:1], threads=request.param) as team:
        yield Host(256, team, "")


TWIN = plain.Plain(256)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_norm_alone_and_with_the_addition_before_it(host: Host, bias: bool) -> None:
    x, delta, weight = torch.randn(5, 260), torch.randn(5, 260), torch.rand(260)
    shift = torch.randn(260) if bias else None
    ours, theirs = host.norm(weight, shift, 1e-6), TWIN.norm(weight, shift, 1e-6)
    close(ours(x), theirs(x))
    for a, b in zip(ours.add(x.clone(), delta, 0.5), theirs.add(x, delta, 0.5), strict=True):
        close(a, b)


@pytest.mark.parametrize("act", [spec.Act(), spec.Act("silu", 1.702, 7.0, 1.0), spec.Act("gelu"), spec.Act("gelu_tanh", limit=2.0)])
def test_gate(host: Host, act: spec.Act) -> None:
    x = torch.randn(3, 2 * 100) * 5
    torch.testing.assert_close(host.glu(act, x), TWIN.glu(act, x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("part", ROUTERS)
def test_route(host: Host, part: spec.Router) -> None:
    torch.manual_seed(5)
    logits, correction = torch.randn(9, part.experts) * 2, torch.randn(part.experts) if part.correction else None
    logits[3] = 0.0
    (ids, weights), (ids2, weights2) = host.route(part, correction)(logits), TWIN.route(part, correction)(logits)
    assert torch.equal(ids, ids2)
    close(weights, weights2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embed(host: Host, dtype: torch.dtype) -> None:
    table, tokens = torch.randn(50, 96).to(dtype), torch.tensor([49, 0, 7, 7])
    assert torch.equal(host.embed(table, 3.0)(tokens), table[tokens].float() * 3.0)
    assert torch.equal(host.embed(table)(tokens), table[tokens].float())


def test_sums_and_rows(host: Host) -> None:
    x, delta, gate = torch.randn(4, 70), torch.randn(4, 70), torch.randn(4, 1)
    close(host.add(x.clone(), delta, 0.3), x + 0.3 * delta)
    close(host.join(x.clone(), delta, gate), x + delta * gate.sigmoid())
    assert torch.equal(host.rows(x, torch.tensor([3, 1])), x[[3, 1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("part", [
    spec.GQA(4, 2, 24, spec.Rope(24, 1e4)), spec.GQA(4, 2, 24, spec.Rope(16, 1e4, interleaved=True), qk_norm="head"),
    spec.GQA(4, 2, 24, spec.Rope(24, 1e4), qk_norm="full", clip=0.5), spec.GQA(4, 1, 24, spec.Rope(8, 1e4), qk_norm="rotated"),
    spec.GQA(2, 2, 24, None)], ids=["plain", "head", "full-clip", "rotated", "no-rope"])
def test_heads_are_normed_rotated_and_stored(host: Host, part: spec.GQA, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    T, wide = 6, part.qk_norm == "full"
    norms = () if part.qk_norm == "none" else (torch.rand(part.heads * 24 if wide else 24) + 0.5, torch.rand(part.kv_heads * 24 if wide else 24) + 0.5)
    step = Step(torch.zeros(T, dtype=torch.long), torch.tensor([0, 1, 2, 90, 91, 5], dtype=torch.int32), torch.tensor([0, 3, 5, 6], dtype=torch.int32),
                torch.tensor([3, 92, 6], dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32), torch.tensor([0, 1, 2, 25, 26, 13]),
                torch.zeros(3, dtype=torch.int32), torch.arange(T), 3)
    fp8 = dtype == torch.float8_e4m3fn
    ours, theirs = (KV(*(torch.zeros(4, part.kv_heads, 8, 24).to(dtype) for _ in range(2)),
                       *(torch.zeros(4, part.kv_heads, 8) if fp8 else None for _ in range(2))) for _ in range(2))
    qkv = torch.randn(T, (part.heads + 2 * part.kv_heads) * 24)
    twin = TWIN.attend(part, 1e-6, *norms)
    q, k, v = twin.split(qkv, step.positions)
    plain.write_pages(theirs.keys, theirs.key_scales, step.slots, k)
    plain.write_pages(theirs.values, theirs.value_scales, step.slots, v)
    host.attend(part, 1e-6, *norms).prepare(qkv, ours, step)
    close(qkv[:, :part.heads * 24], q.flatten(1))
    for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
        difference = (a.float() - b.float()).abs()
        assert difference.max() <= {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float8_e4m3fn: 32.0}[dtype]   # one unit in the last place at most
        assert (difference > 1e-5).float().mean() < 0.01
    assert torch.equal(ours.values.view(torch.uint8), theirs.values.view(torch.uint8)) or part.clip


def test_every_rounding_is_torchs(host: Host) -> None:
    """Ties, subnormals, the largest: float32 values of every kind, scaled so that 448 is the largest of each vector."""
    bits = torch.arange(0, 1 << 16).to(torch.int32) << 16
    tails = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    values = (bits[:, None] | tails).view(torch.float32).flatten()
    values = values[values.abs() < 440]
    part = spec.GQA(1, 1, 64, None)
    values = values[:values.numel() // 63 * 63].view(-1, 63)
    vectors = torch.cat([values, torch.full((values.shape[0], 1), 448.0)], 1)
    n = vectors.shape[0]
    step = Step(*(torch.zeros(1, dtype=torch.int32),) * 5, torch.arange(n), torch.zeros(1), torch.zeros(1), 1)
    attend = host.attend(part, 1e-6)
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        kv = KV(*(torch.zeros(1, 1, n, 64).to(dtype) for _ in range(2)), *(torch.zeros(1, 1, n) for _ in range(2)))
        attend.prepare(vectors.repeat(1, 3), kv, step)
        assert torch.equal(kv.keys[0, 0].view(torch.uint8), vectors.to(dtype).view(torch.uint8))


def test_a_recorded_series_gives_the_same_bits_and_reads_its_inputs_again(host: Host) -> None:
    norm, part = host.norm(torch.rand(64), None, 1e-6), spec.Router(64, 4, "softmax", True)
    x = torch.randn(3, 64)
    with host.record() as (tape, _room):
        h = norm(x)
        ids, weights = host.route(part)(h)
        y = host.add(norm(h), h)
    job = in_series(tape)
    for _ in range(3):
        x.copy_(torch.randn(3, 64))
        host.team.run(job)
        h2 = norm(x)
        ids2, weights2 = host.route(part)(h2)
        assert torch.equal(h, h2) and torch.equal(ids, ids2) and torch.equal(weights, weights2)
        assert torch.equal(y, host.add(norm(h2), h2))
