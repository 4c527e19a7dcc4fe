"""Every Triton kernel against its torch twin on random data; on a machine without a GPU in Triton's interpreter (see test_triton.py), else on the GPU.

Run alone with `python -m pytest tests/gpu/triton_cases.py` (TRITON_INTERPRET=1 without a GPU).
"""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_kernels import FORMATS, ExpertStore
from cpu_kernels import plain as twins
from hetero.arch import spec
from hetero.engine.graphs import Staged
from hetero.gpu import attention, experts, few, linear, mailbox, norm, plain, rope, router
from hetero.gpu.ops import KV, LatentKV, Step

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")               # the interpreter computes with numpy, infinity included
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16          # the interpreter's bf16 is not to be trusted
TIGHT = 2e-5 if DEVICE == "cpu" else 2e-4


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def rand(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape) * scale).to(DEVICE, dtype)


def close(got, want, tolerance):
    got, want = got.float(), want.float()
    assert got.shape == want.shape and torch.isfinite(got).all()
    error = ((got - want).norm() / want.norm().clamp(min=1e-12)).item()
    assert error <= tolerance, f"relative error {error:.2e} > {tolerance:.0e}"


def step_of(new, cached, page=16, spare=3):
    """A step of len(new) sequences: new[s] tokens after cached[s] ones, pages shuffled."""
    lengths = [n + c for n, c in zip(new, cached, strict=True)]
    needed = [-(-n // page) for n in lengths]
    total = sum(needed) + spare
    order = torch.randperm(total).tolist()
    table = torch.full((len(new), max(needed) + 1), -1, dtype=torch.int32)
    for s, n in enumerate(needed):
        table[s, :n] = torch.tensor([order.pop() for _ in range(n)], dtype=torch.int32)
    positions = torch.cat([torch.arange(c, c + n) for n, c in zip(new, cached, strict=True)])
    owner = torch.repeat_interleave(torch.arange(len(new)), torch.tensor(new))
    slots = table[owner, positions // page].long() * page + positions % page
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    d = DEVICE
    return Step(torch.zeros(len(positions), dtype=torch.int64, device=d), positions.int().to(d), starts.to(d), torch.tensor(lengths, dtype=torch.int32, device=d),
                table.to(d), slots.to(d), torch.zeros(len(new), dtype=torch.int32, device=d), torch.arange(len(positions), device=d), max(new)), total


def kv_of(pages, heads, page, dim, dtype):
    if dtype == "fp8":
        def half():
            return plain.to_fp8(rand(pages, heads, page, dim))
        (k, ks), (v, vs) = half(), half()
        return KV(k, v, ks, vs)
    return KV(rand(pages, heads, page, dim, dtype=dtype), rand(pages, heads, page, dim, dtype=dtype))


def copy_of(kv):
    return type(kv)(**{n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in vars(kv).items()})


@pytest.mark.parametrize("width", [8, 96, 257, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_norms_equal_their_twin_with_and_without_the_residual_add(width, dtype):
    x, delta, w, b = rand(3, width, dtype=dtype), rand(3, width, dtype=dtype), rand(width), rand(width)
    bound = TIGHT if dtype == torch.float32 else 4e-3
    close(norm.norm(x, w, 1e-6), plain.PlainNorm(w, None, 1e-6)(x), bound)
    close(norm.norm(x, w, 1e-5, b, center=True), plain.PlainNorm(w, b, 1e-5)(x), bound)
    s, y = norm.add_norm(x, delta, w, 1e-6, scale=0.5)
    want_s, want_y = plain.PlainNorm(w, None, 1e-6).add(x, delta, 0.5)
    close(s, want_s, bound)
    close(y, want_y, bound)


ROUTERS = [
    spec.Router(8, 2, "softmax", False),
    spec.Router(128, 8, "softmax", True),
    spec.Router(60, 4, "softmax", False, scale=2.5),
    spec.Router(32, 4, "topk_softmax", False),
    spec.Router(64, 6, "sigmoid", True, scale=1.5, correction=True),
    spec.Router(64, 8, "sigmoid", True, scale=2.5, groups=8, top_groups=4, group_score="top2", correction=True),
    spec.Router(160, 6, "softmax", False, scale=16.0, groups=8, top_groups=3),
    spec.Router(20, 1, "sigmoid", False, correction=True),
]


@pytest.mark.parametrize("part", ROUTERS, ids=lambda p: f"{p.score}-{p.experts}-{p.groups}")
def test_router_picks_and_weighs_as_its_twin(part):
    logits = rand(5, part.experts)
    logits[3] = 0.25                                          # all equal: the lowest ids
    correction = rand(part.experts, scale=0.3) if part.correction else None
    ids, weights = router.route(part, logits, correction)
    want_ids, want_weights = plain.select(part, logits, correction)
    assert torch.equal(ids, want_ids)
    close(weights, want_weights, TIGHT)


def test_router_of_a_row_of_nan_still_names_experts_that_exist():
    logits = torch.full((2, 32), float("nan"), device=DEVICE)
    ids, _ = router.route(spec.Router(32, 4, "softmax", True), logits, None)
    assert ((ids >= 0) & (ids < 32)).all()


def gqa(heads=4, kv_heads=2, dim=64, rope_dim=None, interleaved=False, **more):
    return spec.GQA(heads, kv_heads, dim, spec.Rope(rope_dim or dim, 10000.0, interleaved, context=512), **more)


def table(dim, n=512):
    angles = torch.outer(torch.arange(n).float(), 10000.0 ** (-torch.arange(0, dim, 2).float() / dim))
    return angles.cos().to(DEVICE), angles.sin().to(DEVICE)


PARTS = [
    gqa(), gqa(8, 2, 128, qk_norm="head"), gqa(4, 4, 64, qk_norm="full"), gqa(4, 1, 64, qk_norm="rotated"), gqa(4, 2, 80, rope_dim=32), gqa(4, 2, 64, interleaved=True),
    gqa(8, 1, 64, window=20, sinks=True), gqa(6, 2, 256), gqa(16, 1, 64, clip=0.5), spec.GQA(4, 2, 64, None),
]


QUICK = [(1, "f32"), (2, "f32"), (5, "f32"), (6, "fp8"), (0, "half")]


@pytest.mark.parametrize("part,kind", [pytest.param(p, k, marks=() if (i, k) in QUICK else pytest.mark.slow) for i, p in enumerate(PARTS)
                                       for k in ("f32", "half", "fp8")],
                         ids=lambda p: p if isinstance(p, str) else f"{p.heads}x{p.kv_heads}x{p.head_dim}-{p.qk_norm}-{p.window}")
def test_placing_and_attending_equal_their_twin(part, kind):
    for new, cached, splits in (([1, 1], [0, 37], 1), ([1], [300], 4), ([3, 1, 8], [30, 18, 0], 1)):
        check_attention(part, kind, new, cached, splits, 16)


def check_attention(part, kind, new, cached, splits, page):
    step, pages = step_of(new, cached, page)
    dtype = torch.float32 if kind == "f32" else HALF
    kv = kv_of(pages, part.kv_heads, page, part.head_dim, {"f32": torch.float32, "half": HALF, "fp8": "fp8"}[kind])
    twin = copy_of(kv)
    T = step.tokens.shape[0]
    qkv = rand(T, (part.heads + 2 * part.kv_heads) * part.head_dim, dtype=dtype)
    wide = part.qk_norm == "full"
    q_norm, k_norm = rand(part.head_dim * (part.heads if wide else 1)), rand(part.head_dim * (part.kv_heads if wide else 1))
    sinks = rand(part.heads) if part.sinks else None
    cos, sin = table(part.rope.dim) if part.rope else table(2)
    oracle = plain.PlainAttend.__new__(plain.PlainAttend)
    oracle.part, oracle.eps, oracle.q_norm, oracle.k_norm, oracle.sinks = part, 1e-6, q_norm, k_norm, sinks
    oracle.scale, oracle.table, oracle.device = part.head_dim ** -0.5, (cos, sin) if part.rope else None, torch.device(DEVICE)
    want = oracle(qkv, twin, step)
    q = rope.place(part, 1e-6, qkv, kv, step, cos, sin, q_norm, k_norm)
    for name in ("keys", "values"):
        mine, theirs = (plain.read_pages(getattr(c, name), getattr(c, name[:-1] + "_scales"), torch.arange(pages, device=DEVICE), pages * page) for c in (kv, twin))
        close(mine, theirs, 1e-5 if kind == "f32" else 6e-3)
    got = attention.attend(q, twin, step, oracle.scale, part.window, sinks, splits).flatten(1)   # on the twin's pages: codes may differ by a rounding
    close(got, want, {"f32": TIGHT, "half": 6e-3, "fp8": 6e-3}[kind])      # a card rounds the query to half twice, the twin once: 4.4e-3


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(1, 3), st.sampled_from([1, 2, 3, 5, 16]), st.sampled_from([64, 72, 96]), st.sampled_from([4, 16, 64]), st.sampled_from([None, 1, 17]),
       st.lists(st.tuples(st.integers(1, 20), st.integers(0, 90)), min_size=1, max_size=4), st.sampled_from([1, 2, 8]), st.booleans())
def test_any_shape_attends_as_its_twin(kv_heads, group, dim, page, window, sequences, splits, decode):
    new, cached = [1 if decode else n for n, _ in sequences], [c for _, c in sequences]
    check_attention(gqa(kv_heads * group, kv_heads, dim, window=window), "f32", new, cached, splits if max(new) == 1 else 1, page)


@pytest.mark.parametrize("new,cached", [(40, 0), (40, 23)])
def test_a_sequence_alone_attends_by_torch_as_by_pages(new, cached):
    step, pages = step_of([new], [cached])
    kv = kv_of(pages, 2, 16, 64, torch.float32)
    q = rand(new, 8, 64)
    alone = Step(**{**vars(step), "before": cached})
    close(attention.attend_alone(q, kv, alone, 0.125), attention.attend(q, kv, step, 0.125, None, None, 1), TIGHT)


def test_pages_given_back_are_never_read():
    part, page = gqa(4, 2, 64, window=8), 4
    step, pages = step_of([1, 3], [40, 33], page)
    kv = kv_of(pages, 2, page, 64, torch.float32)
    for s, first in enumerate((40 - 7, 33 - 7)):
        gone = step.pages[s, :first // page].clone().long()
        kv.keys[gone] = kv.values[gone] = float("nan")
        step.pages[s, :first // page] = -1
    got = attention.attend(rand(4, 4, 64), kv, step, 0.125, part.window, None, 1)
    assert torch.isfinite(got).all()


def test_layers_of_another_group_write_and_attend_by_their_own_staged_table():
    part, page = gqa(4, 2, 64, window=8), 4
    step, pages = step_of([1, 1], [40, 33], page)
    kv = kv_of(pages, 2, page, 64, torch.float32)
    turned = KV(kv.keys.flip(0), kv.values.flip(0), group=1)         # the same pages, numbered from the other end
    numbers = torch.where(step.pages < 0, -1, pages - 1 - step.pages)
    slots = (pages - 1 - step.slots // page) * page + step.slots % page
    staged = Staged(4, step.pages.shape[1] + 3, torch.device(DEVICE), groups=2)
    staged.load(dataclasses.replace(step.to("cpu"), others=((numbers.cpu(), slots.cpu()),)), 2, 4, spare=0)
    theirs, qkv = dataclasses.replace(staged.part(2), longest=1).of(turned.group), rand(2, 8 * 64)
    given = (1e-6, qkv.clone(), kv, step), (1e-6, qkv.clone(), turned, theirs)
    q, other = (rope.place(part, *g, *table(64), rand(1), rand(1)) for g in given)
    assert torch.equal(q, other) and torch.equal(kv.keys, turned.keys.flip(0)) and torch.equal(kv.values, turned.values.flip(0))
    assert torch.equal(attention.attend(q, kv, step, 0.125, 8, None, 1), attention.attend(q, turned, theirs, 0.125, 8, None, 1))


def test_a_slot_below_zero_writes_nothing():
    part = gqa(2, 1, 64)
    step, pages = step_of([1, 1], [3, 4])
    step.slots[:] = -1
    kv = kv_of(pages, 1, 16, 64, torch.float32)
    before = copy_of(kv)
    rope.place(part, 1e-6, rand(2, 4 * 64), kv, step, *table(64), rand(1), rand(1))
    assert torch.equal(kv.keys, before.keys) and torch.equal(kv.values, before.values)


def test_e4m3_codes_equal_torch_for_every_value_that_matters():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()]
    between = (every[:, None] + torch.linspace(-0.6, 0.6, 41) * every.abs().clamp(min=2 ** -9)[:, None] / 8).flatten().clamp(-448, 448)
    x = torch.cat([every, between, rand(512).cpu() * 100]).clamp(-448, 448)
    x = torch.nn.functional.pad(x, (0, -len(x) % 64)).to(DEVICE)
    x[0] = 448.0                                              # the scale of the row is then exactly 1
    n = x.shape[0]
    page = KV(torch.zeros(1, 1, 1, n, device=DEVICE).to(torch.float8_e4m3fn), torch.zeros(1, 1, 1, n, device=DEVICE).to(torch.float8_e4m3fn),
              torch.zeros(1, 1, 1, device=DEVICE), torch.zeros(1, 1, 1, device=DEVICE))
    part = spec.GQA(1, 1, n, None)
    step, _ = step_of([1], [0])
    step.slots[:] = 0
    rope.place(part, 1e-6, torch.cat([x, x, x])[None], page, step, x, x, x, x)
    assert torch.equal(page.keys.flatten().float(), x.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("kind", ["f32", "half", "fp8"])
@pytest.mark.parametrize("heads,rank,rope_dim,interleaved", [(4, 64, 16, False), pytest.param(20, 96, 16, True, marks=pytest.mark.slow)])
def test_latent_attention_equals_its_twin(heads, rank, rope_dim, interleaved, kind):
    nope, v_dim, page = 32, 24, 16
    part = spec.MLA(heads, None, rank, nope, v_dim, spec.Rope(rope_dim, 10000.0, interleaved, context=512))
    for new, cached, splits in (([1, 1], [50, 0], 1), ([1], [150], 2), ([2, 1, 4], [20, 3, 0], 1)):
        step, pages = step_of(new, cached, page)
        dtype = torch.float32 if kind == "f32" else HALF
        wide = rank + rope_dim
        kv = LatentKV(*plain.to_fp8(rand(pages, page, wide))) if kind == "fp8" else LatentKV(rand(pages, page, wide, dtype=dtype))
        twin = copy_of(kv)
        T = step.tokens.shape[0]
        q, latent, kv_norm = rand(T, heads * (nope + rope_dim), dtype=dtype), rand(T, wide, dtype=dtype), rand(rank)
        kv_b = rand(heads * (nope + v_dim), rank, dtype=dtype, scale=rank ** -0.5)
        oracle = plain.PlainLatentAttend.__new__(plain.PlainLatentAttend)
        oracle.part, oracle.eps, oracle.kv_norm, oracle.scale, oracle.table = part, 1e-6, kv_norm, 0.1, table(rope_dim)
        oracle.key_up, oracle.value_up = kv_b.unflatten(0, (heads, -1)).split([nope, v_dim], 1)
        want = oracle(q.clone(), latent, twin, step).view(T, heads, v_dim)
        q = q.view(T, heads, -1).clone()
        rope.place_latent(q, latent, kv, step, *oracle.table, kv_norm, 1e-6, nope, interleaved)
        inside = torch.cat([torch.einsum("thn,hnr->thr", q[..., :nope], oracle.key_up), q[..., nope:]], -1)
        close(plain.read_pages(kv.latent, kv.scales, torch.arange(pages, device=DEVICE), pages * page),
              plain.read_pages(twin.latent, twin.scales, torch.arange(pages, device=DEVICE), pages * page), 1e-5 if kind == "f32" else 6e-3)
        y = attention.attend_latent(inside, twin, step, rank, 0.1, splits)
        got = torch.einsum("thr,hvr->thv", y, oracle.value_up)
        close(got, want, {"f32": TIGHT, "half": 6e-3, "fp8": 6e-3}[kind])


@pytest.mark.parametrize("act", [spec.Act(), spec.Act("silu", 1.702, 7.0, 1.0), spec.Act("gelu_tanh"), spec.Act("gelu"), spec.Act("relu2")], ids=lambda a: f"{a.kind}-{a.alpha}")
def test_the_gate_equals_its_twin(act):
    x = rand(3, 2 * 100, scale=4.0)
    close(linear.glu(act, x), plain.glu(act, *x.chunk(2, -1)), TIGHT)


def test_adding_scaled_or_gated_equals_its_twin():
    x, d, g = rand(3, 1500), rand(3, 1500), rand(3, 1)
    close(norm.add(x, d, 0.25), x + 0.25 * d, TIGHT)
    close(norm.add(x, d, gate=g), x + g.sigmoid() * d, TIGHT)


@pytest.mark.parametrize("T,N,K", [(1, 40, 96), (3, 33, 130), (5, 70, 256), (40, 65, 300)])
def test_eight_bit_products_equal_those_with_the_dequantized_matrix(T, N, K):
    w, x, bias = rand(N, K), rand(T, K), rand(N)
    codes, scales = linear.quantize(w)
    real = linear.dequantize(codes, scales)
    close(real, w, 9e-3)
    close(linear.expand(codes, scales, torch.float32), real, 1e-7)
    want = x @ real.T + bias
    close(linear.gemm(x, codes, scales, bias, torch.float32), want, TIGHT)
    if T <= 3:
        close(linear.gemv(x, codes, scales, bias, torch.float32), want, TIGHT)
        close(linear.gemv(x, w, None, None, torch.float32), x @ w.T, TIGHT)
    half = linear.gemm(x.to(HALF), codes, scales, None, torch.float32)
    close(half, x.to(HALF).float() @ real.T, 5e-3)


EXPERTS = [
    ("int4_g32", spec.Act(), True, False, "output"), ("int8_g32", spec.Act(), True, False, "output"), ("bf16", spec.Act(), True, False, "input"),
    ("f32", spec.Act("silu", 1.702, 7.0, 1.0), True, True, "output"), ("int4_g32", spec.Act("relu2"), False, False, "output"), ("mxfp4+q6_k", spec.Act(), True, False, "output"), ("int4_g32:ordered", spec.Act(), True, False, "output"),
    *(pytest.param(f, spec.Act(), True, False, "output", marks=[] if f in ("mxfp4", "q6_k") else pytest.mark.slow) for f in FORMATS if FORMATS[f].code > 3),
]


@pytest.mark.parametrize("format,act,gated,biased,weight_on", EXPERTS)
def test_experts_multiply_the_packed_bytes_as_their_twin(format, act, gated, biased, weight_on):
    E, H, I, T, k = 5, 96, 72, 11, 2
    rng = np.random.default_rng(1)
    store = ExpertStore(format, E, H, I, gated)
    for e in range(E):
        gate, up, down = (rng.standard_normal(s, np.float32) / s[1] ** 0.5 for s in ((I, H), (I, H), (H, I)))
        tag = {"dtype": "bf16"} if format == "bf16" else {}
        gate, up, down = (twins.f32_to_bf16(w) if tag else w for w in (gate, up, down))
        store.put(e, gate if gated else None, up, down, **tag)
    if store.orders is not None:
        store.orders[:] = np.stack([rng.permutation(H) for _ in range(E)])
    biases = tuple(rng.standard_normal((E, n), np.float32) for n in (I, I, H)) if biased else None
    x = torch.from_numpy(rng.standard_normal((T, H), np.float32))
    ids = torch.from_numpy(rng.integers(-1, E, (T, k)).astype(np.int32))
    ids[:3] = 2                                               # more than one tile of one expert, duplicates too
    ids[ids == 4] = 0                                         # one expert that nobody wants
    weights = torch.from_numpy(rng.random((T, k), np.float32))

    def matrices(e):
        return tuple(store.dequantize(e, n) if n != "gate" or gated else None for n in ("gate", "up", "down"))
    want = torch.from_numpy(twins.moe(store.form, x.numpy(), ids.numpy(), weights.numpy(), matrices, (act.kind, act.alpha, act.limit, act.up_shift),
                                      biases, weight_on, False, store.orders)).float().to(DEVICE)
    shape = experts.Shape(format, E, H, I, gated, act, weight_on, None if biases is None else tuple(torch.from_numpy(b).to(DEVICE) for b in biases))
    records = torch.from_numpy(store.buffer).to(DEVICE)
    for dtype, bound in ((torch.float32, 2e-5 if DEVICE == "cpu" else 1e-3), (HALF, 1e-2)):
        groups = experts.group(ids.to(DEVICE), weights.to(DEVICE), E)
        product = experts.Product(shape, x.to(DEVICE, dtype), groups)
        product.h.fill_(float("nan"))
        product.y.fill_(float("nan"))
        product.run(records, 0, E)
        close(product.out(), want, bound)
    n = store.record_nbytes
    ring = torch.zeros(2 * n, dtype=torch.uint8, device=DEVICE)
    product = experts.Product(shape, x.to(DEVICE), groups)
    for first in range(0, E, 2):                              # a ring slot of two experts
        part = records[first * n:(first + 2) * n]
        ring[:part.shape[0]] = part
        product.run(ring, first, min(2, E - first))
    close(product.out(), want, 1e-3)
    order = torch.tensor([3, 1, 4, 0, 2], dtype=torch.int32, device=DEVICE)      # slots in another order
    product = experts.Product(shape, x.to(DEVICE), groups)
    product.run(records.view(E, n)[order.long().argsort()].flatten(), 0, E, order)
    close(product.out(), want, 1e-3)


@pytest.mark.parametrize("format,act,gated,biased,weight_on", EXPERTS)
def test_experts_in_slots_multiply_for_the_pairs_that_are_theirs(format, act, gated, biased, weight_on):
    E, H, I, T, k = 5, 96, 72, 3, 2
    rng = np.random.default_rng(2)
    store = ExpertStore(format, E, H, I, gated)
    for e in range(E):
        gate, up, down = (rng.standard_normal(s, np.float32) / s[1] ** 0.5 for s in ((I, H), (I, H), (H, I)))
        tag = {"dtype": "bf16"} if format == "bf16" else {}
        gate, up, down = (twins.f32_to_bf16(w) if tag else w for w in (gate, up, down))
        store.put(e, gate if gated else None, up, down, **tag)
    if store.orders is not None:
        store.orders[:] = np.stack([rng.permutation(H) for _ in range(E)])
    biases = tuple(rng.standard_normal((E, n), np.float32) for n in (I, I, H)) if biased else None
    x = torch.from_numpy(rng.standard_normal((T, H), np.float32))
    ids = torch.tensor([[0, 3], [-1, 2], [4, 1]], dtype=torch.int32)
    table = torch.tensor([2, -1, 0, 1, -1], dtype=torch.int32)                   # slot of each expert; token 2 has nobody here
    slots = torch.where(ids >= 0, table[ids.long()], -1).int()
    weights = torch.from_numpy(rng.random((T, k), np.float32))

    def matrices(e):
        return tuple(store.dequantize(e, n) if n != "gate" or gated else None for n in ("gate", "up", "down"))
    mine = torch.where(slots >= 0, ids, -1)
    want = torch.from_numpy(twins.moe(store.form, x.numpy(), mine.numpy(), weights.numpy(), matrices, (act.kind, act.alpha, act.limit, act.up_shift),
                                      biases, weight_on, False, store.orders)).float().to(DEVICE)
    shape = experts.Shape(format, E, H, I, gated, act, weight_on, None if biases is None else tuple(torch.from_numpy(b).to(DEVICE) for b in biases))
    records = torch.from_numpy(np.concatenate([store.record(e) for e in (2, 3, 0)])).to(DEVICE)
    got = few.few(shape, x.to(DEVICE), *(t.to(DEVICE) for t in (ids, slots, weights)), records)
    close(got, want, 2e-5 if DEVICE == "cpu" else 1e-3)
    assert not got[2].any()


@pytest.mark.parametrize("choice", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_posting_tells_the_cpu_what_is_asked_of_it(choice, cached):
    T, H, E, k = 3, 80, 8, 2
    part = spec.Router(E, k, "softmax", True)
    x, logits = rand(T, H), rand(T, E)
    ids, weights = plain.select(part, logits, None)
    to = torch.zeros(T, H), torch.zeros(T, k, dtype=torch.int32), torch.zeros(T, k)
    to = tuple(t.pin_memory() if DEVICE == "cuda" else t for t in to)
    table = torch.tensor([-1, 0, -1, 1, -1, 2, -1, 3], dtype=torch.int32, device=DEVICE)
    new = [torch.full((T, k), 9, dtype=torch.int32, device=DEVICE) for _ in range(3)]
    slots = mailbox.Slots(table, *new, torch.zeros(T, k, device=DEVICE)) if cached else None
    live, arrived = torch.tensor([2], dtype=torch.int32, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    mailbox.post(x, mailbox.Choice(part, logits, None) if choice else (ids, weights), live, to, arrived, 0, slots)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    asked = ids.clone()
    asked[2:] = -1
    here = torch.where(asked >= 0, table[asked.long()], -1)
    assert torch.equal(to[0].to(DEVICE), x)
    assert torch.equal(to[1].to(DEVICE), torch.where(here >= 0, -1, asked) if cached else asked)
    close(to[2].to(DEVICE), weights, TIGHT)
    if slots is not None:
        assert torch.equal(slots.asked, asked) and torch.equal(slots.ids, asked) and torch.equal(slots.slots, here.int())
        close(slots.weights, weights, TIGHT)


def test_an_awaited_answer_is_summed_and_normed_by_the_kernel_that_takes_it():
    T, H = 3, 96
    answer, hits, x, shared, gate, w, b = rand(T, H), rand(T, H), rand(T, H), rand(T, H), rand(T, 1), rand(H), rand(H)
    awaited = mailbox.Awaited(answer, 0, 0, 1, torch.device(DEVICE), torch.float32, hits)
    close(awaited.take(), answer + hits, TIGHT)
    close(awaited.plus(shared).take(), answer + hits + shared, TIGHT)
    whole = answer + hits + gate.sigmoid() * shared
    for bias in (None, b):
        s, y = awaited.plus(shared, gate).add_norm(x, w, 1e-6, bias, 0.5)
        want_s, want_y = plain.PlainNorm(w, bias, 1e-6).add(x, whole, 0.5)
        close(s, want_s, TIGHT)
        close(y, want_y, TIGHT)
