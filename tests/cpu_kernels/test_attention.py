"""Attention over pages against the float64 twin, and the promise that a token's bits do not depend on its company."""
import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpu_kernels import attention, plain, plain_attention
from cpu_kernels.attention import Scratch, attend, attend_latent, grouped
from cpu_kernels.heads import KV_TYPES, QK_NORMS, heads_in
from cpu_kernels.jit import address as machine_code
from cpu_kernels.operands import ready
from cpu_kernels.pages import sweep
from cpu_kernels.team import Team

FP8 = np.array([(-1.0) ** (c >> 7) * ((c & 7) * 2.0 ** -9 if (c >> 3) & 15 == 0 else (8 + (c & 7)) * 2.0 ** (((c >> 3) & 15) - 10)) for c in range(256)])


@pytest.fixture(scope="module")
def crew():
    with Team(threads=2) as made:
        yield made


@dataclass
class Model:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    kind: str = "f32"
    page_size: int = 4
    norm: str = "none"
    rope: int = 0
    interleaved: bool = False
    window: int | None = None
    sinks: bool = False
    clip: float | None = None
    seed: int = 0
    context: int = 1200
    made: dict = field(default_factory=dict)

    def __post_init__(self):
        r = np.random.default_rng(self.seed)
        full = self.norm == "full"
        self.q_weight = r.uniform(0.5, 1.5, self.heads * self.dim if full else self.dim).astype(np.float32)
        self.k_weight = r.uniform(0.5, 1.5, self.kv_heads * self.dim if full else self.dim).astype(np.float32)
        angle = np.outer(np.arange(self.context), 10000.0 ** (-np.arange(self.rope // 2) / max(1, self.rope // 2)))
        self.cos, self.sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        self.sink = r.standard_normal(self.heads).astype(np.float32) if self.sinks else None
        self.scale = self.dim ** -0.5

    def qkv(self, tokens, seed=1):
        r = np.random.default_rng(seed)
        return r.standard_normal((tokens, (self.heads + 2 * self.kv_heads) * self.dim)).astype(np.float32)

    def twin(self, qkv):
        """One sequence from position 0: [T, heads * dim]; the cache's rounding included."""
        x = qkv.astype(np.float64)
        a, b = self.heads * self.dim, (self.heads + self.kv_heads) * self.dim
        q, k, v = x[:, :a], x[:, a:b], x[:, b:]
        if self.norm == "full":
            q, k = plain_attention.norm(q, self.q_weight, 1e-6), plain_attention.norm(k, self.k_weight, 1e-6)
        if self.clip is not None:
            q, k, v = (np.clip(t, -self.clip, self.clip) for t in (q, k, v))
        q, k, v = (t.reshape(len(x), -1, self.dim) for t in (q, k, v))
        if self.norm == "head":
            q, k = plain_attention.norm(q, self.q_weight, 1e-6), plain_attention.norm(k, self.k_weight, 1e-6)
        if self.rope:
            cos, sin = self.cos[:len(x), None].astype(np.float64), self.sin[:len(x), None].astype(np.float64)
            q, k = plain_attention.rotate(q, cos, sin, self.interleaved), plain_attention.rotate(k, cos, sin, self.interleaved)
        if self.norm == "rotated":
            q, k = plain_attention.norm(q, self.q_weight, 1e-6), plain_attention.norm(k, self.k_weight, 1e-6)
        return plain_attention.attend(q, self.kept(k), self.kept(v), np.arange(len(x)), self.scale, self.window, self.sink).reshape(len(x), -1)

    def kept(self, x):
        x = x.astype(np.float32)
        if self.kind == "bf16":
            return plain.bf16_to_f32(plain.f32_to_bf16(x))
        return x


class Cache:
    def __init__(self, model, pages):
        shape = (pages, model.kv_heads, model.page_size, model.dim)
        item = {"f32": np.float32, "bf16": np.uint16, "fp8": np.uint8}[model.kind]
        never = {"f32": np.nan, "bf16": 0x7FC0, "fp8": 0x7F}[model.kind]              # what was never written is NaN
        self.keys, self.values = np.full(shape, never, item), np.full(shape, never, item)
        self.scales = [np.full(shape[:3], np.nan, np.float32) for _ in range(2)] if model.kind == "fp8" else [None, None]
        self.pages = pages


def place_of(a):
    return 0 if a is None else a.ctypes.data


def run(model, cache, crew, parts, scratch=None):
    """parts: list of (qkv rows of one sequence, start position, its pages). Returns the outputs per part."""
    counts = [len(x) for x, _, _ in parts]
    starts = np.cumsum([0, *counts]).astype(np.int32)
    width = max(len(p) for _, _, p in parts)
    table = np.full((len(parts), width), -1, np.int32)
    for s, (_, _, p) in enumerate(parts):
        table[s, :len(p)] = p
    positions = np.concatenate([at + np.arange(len(x)) for x, at, _ in parts]).astype(np.int32)
    lengths = np.array([at + len(x) for x, at, _ in parts], np.int32)
    slots = np.concatenate([np.array(p)[(at + np.arange(len(x))) // model.page_size] * model.page_size + (at + np.arange(len(x))) % model.page_size for x, at, p in parts]).astype(np.int64)
    qkv = np.concatenate([x for x, _, _ in parts])
    out = np.full((len(qkv), model.heads * model.dim), np.nan, np.float32)
    at, kind = place_of, KV_TYPES[model.kind]
    cos, sin = (model.cos, model.sin) if model.rope else (None, None)
    scales = [at(a) for a in cache.scales]
    crew.run(ready(heads_in, [at(qkv), len(qkv), model.heads, model.kv_heads, model.dim, at(model.q_weight), at(model.k_weight), QK_NORMS[model.norm], at(cos), at(sin),
                              model.rope // 2, int(model.interleaved), at(positions), at(slots), model.page_size, at(cache.keys), at(cache.values), *scales, kind],
                   [1e-6, model.clip or 0.0]))
    crew.run(attend(at(qkv), qkv.shape[1], len(qkv), len(parts), at(positions), at(starts), at(lengths), at(table), width, model.page_size, at(cache.keys),
                    at(cache.values), *scales, kind, at(out), model.heads, model.kv_heads, model.dim, model.window or 0, at(model.sink), model.scale,
                    scratch or Scratch(crew.threads, model.context)))
    return [out[a:b] for a, b in itertools.pairwise(starts)]


def pages_for(model, length, pool=64, seed=3):
    return np.random.default_rng(seed).permutation(pool)[:-(-length // model.page_size)].tolist()


MODELS = [Model(), Model(heads=8, kv_heads=1, dim=64, norm="head", rope=64), Model(heads=6, kv_heads=2, dim=24, norm="full", rope=16, interleaved=True),
          Model(heads=4, kv_heads=4, dim=20, norm="rotated", rope=20, window=7), Model(heads=4, kv_heads=2, dim=16, sinks=True, window=5, clip=0.7),
          Model(kind="bf16", dim=48), Model(heads=2, kv_heads=1, dim=256, page_size=16)]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: f"{m.heads}x{m.kv_heads}x{m.dim}-{m.kind}-{m.norm}")
def test_prefill_equals_the_twin(model, crew):
    x = model.qkv(45)
    got = run(model, Cache(model, 64), crew, [(x, 0, pages_for(model, 45))])[0]
    assert np.abs(got - model.twin(x)).max() < (2e-5 if model.kind == "f32" else 4e-3)


def test_fp8_codes_and_scales_are_the_nearest(crew):
    model = Model(kind="fp8", rope=32)
    cache, x = Cache(model, 64), model.qkv(21)
    own = pages_for(model, 21)
    got = run(model, cache, crew, [(x, 0, own)])[0]
    v = x[:, -model.kv_heads * model.dim:].reshape(21, model.kv_heads, model.dim)
    for t in range(21):
        page, offset = own[t // 4], t % 4
        for h in range(2):
            scale = cache.scales[1][page, h, offset]
            assert scale == np.abs(v[t, h]).max() / np.float32(448)
            want = v[t, h] / scale
            near = np.abs(FP8[:127][None] - np.abs(want)[:, None]).min(1)
            assert np.allclose(np.abs(FP8[cache.values[page, h, offset] & 127] - np.abs(want)), near, rtol=1e-5)
            assert (np.sign(FP8[cache.values[page, h, offset]]) * np.sign(want) >= 0).all()
    assert np.abs(got - model.twin(x)).max() < 0.15


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_token_is_the_same_bits_in_any_chunk_and_company(crew, data):
    model = data.draw(st.sampled_from([*MODELS, Model(kind="fp8", rope=32, window=9), Model(heads=16, kv_heads=2, dim=32, page_size=16)]))
    length = data.draw(st.integers(1, 40))
    x = model.qkv(length, seed=5)
    whole = run(model, Cache(model, 64), crew, [(x, 0, pages_for(model, length))])[0]
    cache, at, got, scratch = Cache(model, 64), 0, [], Scratch(crew.threads, 64)
    own = pages_for(model, length, 32, seed=8)
    others = [(model.qkv(data.draw(st.integers(1, 6)), seed=20 + i), [32 + 8 * i + j for j in range(2)]) for i in range(data.draw(st.integers(0, 3)))]
    while at < length:
        n = data.draw(st.integers(1, length - at))
        parts = [(y, 0, p) for y, p in others] + [(x[at:at + n], at, own)]
        got.append(run(model, cache, crew, parts, scratch)[-1])
        at += n
    assert np.array_equal(np.concatenate(got).view(np.uint32), whole.view(np.uint32))


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_long_sequences_split_over_threads_give_the_same_bits_and_the_twins_values(kind):
    model = Model(heads=4, kv_heads=1, dim=32, page_size=16, kind=kind, window=None)
    x = model.qkv(700)
    own = pages_for(model, 700)
    answers = []
    for threads in (1, 2, 3, 5):
        with Team(threads=threads) as crew:
            cache = Cache(model, 64)
            run(model, cache, crew, [(x[:699], 0, own)])
            answers.append(run(model, cache, crew, [(x[699:], 699, own)])[0])
    assert all(np.array_equal(a, answers[0]) for a in answers[1:])
    assert np.abs(answers[0][0] - model.twin(x)[-1]).max() < (2e-5 if kind == "f32" else 4e-3)
    with Team(threads=2) as crew:
        assert np.array_equal(run(model, Cache(model, 64), crew, [(x, 0, own)])[0][-1], answers[0][0])


def test_pages_outside_the_window_may_be_gone(crew):
    model = Model(window=6, dim=16)
    x, own = model.qkv(30), pages_for(Model(), 30)
    cache = Cache(model, 64)
    run(model, cache, crew, [(x[:29], 0, own)])
    gone = [-1] * 5 + own[5:]
    got = run(model, cache, crew, [(x[29:], 29, gone)])[0]
    assert np.abs(got[0] - model.twin(x)[-1]).max() < 2e-5


def test_nan_stays_in_its_own_token_and_those_that_see_it(crew):
    model = Model(dim=16, rope=16)
    x = model.qkv(12)
    clean = run(model, Cache(model, 64), crew, [(x, 0, pages_for(model, 12))])[0]
    x[7, -5] = np.nan                                   # a value
    x[9, 3] = np.nan                                    # a query
    got = run(model, Cache(model, 64), crew, [(x, 0, pages_for(model, 12)), (model.qkv(3, 2), 0, [62])])
    assert np.array_equal(got[0][:7], clean[:7]) and np.isnan(got[0][7:]).any(1).all() and np.isnan(got[0][9]).any()
    assert np.isfinite(got[1]).all()


@dataclass
class Latent:
    heads: int = 6
    nope: int = 12
    rope: int = 8
    rank: int = 24
    v_dim: int = 10
    kind: str = "f32"
    bf16_up: bool = False
    page_size: int = 4

    def __post_init__(self):
        r = np.random.default_rng(4)
        up = r.standard_normal((self.heads * (self.nope + self.v_dim), self.rank)).astype(np.float32) / self.rank ** 0.5
        self.bits = plain.f32_to_bf16(up)
        self.up = self.bits if self.bf16_up else up
        self.exact = plain.bf16_to_f32(self.bits) if self.bf16_up else up

    def inputs(self, length, seed=1):
        r = np.random.default_rng(seed)
        return r.standard_normal((length, self.heads * (self.nope + self.rope))).astype(np.float32), r.standard_normal((length, self.rank + self.rope)).astype(np.float32)

    def twin(self, q, latent):
        """Unabsorbed: keys and values of every head are made, then attended."""
        kept = plain.bf16_to_f32(plain.f32_to_bf16(latent)) if self.kind == "bf16" else latent
        both = (kept[:, :self.rank].astype(np.float64) @ self.exact.T).reshape(len(q), self.heads, -1)
        k = np.concatenate([both[..., :self.nope], np.repeat(kept[:, None, self.rank:], self.heads, 1)], -1)
        return plain_attention.attend(q.reshape(len(q), self.heads, -1), k, both[..., self.nope:], np.arange(len(q)), 0.2).reshape(len(q), -1)

    def run(self, crew, parts, cache):
        """parts: (q rows, start, pages) of sequences whose latents are in `cache` already."""
        starts = np.cumsum([0, *(len(q) for q, _, _ in parts)]).astype(np.int32)
        table = np.full((len(parts), max(len(p) for _, _, p in parts)), -1, np.int32)
        for s, (_, _, p) in enumerate(parts):
            table[s, :len(p)] = p
        positions = np.concatenate([at + np.arange(len(q)) for q, at, _ in parts]).astype(np.int32)
        lengths = np.array([at + len(q) for q, at, _ in parts], np.int32)
        q = np.concatenate([q for q, _, _ in parts])
        out, at = np.full((len(q), self.heads * self.v_dim), np.nan, np.float32), place_of
        crew.run(attend_latent(at(q), len(q), len(parts), at(positions), at(starts), at(lengths), at(table), table.shape[1], self.page_size, at(cache), 0,
                               KV_TYPES[self.kind], at(out), self.heads, self.nope, self.rope, self.rank, self.v_dim, at(self.up), KV_TYPES["bf16" if self.bf16_up else "f32"],
                               0.2, Scratch(crew.threads, 64)))
        return [out[a:b] for a, b in itertools.pairwise(starts)]

    def cache(self, latent, pages):
        made = np.full((16, self.page_size, self.rank + self.rope), np.nan, np.float32)
        for t, row in enumerate(latent):
            made[pages[t // self.page_size], t % self.page_size] = row
        return plain.f32_to_bf16(np.nan_to_num(made)) if self.kind == "bf16" else made


@pytest.mark.parametrize("model", [Latent(), Latent(kind="bf16", bf16_up=True), Latent(heads=17, rank=32, rope=4, nope=7), Latent(heads=2, rank=40, rope=16, v_dim=33, bf16_up=True)],
                         ids=lambda m: f"{m.heads}x{m.rank}-{m.kind}")
def test_mla_in_latent_space_equals_the_unabsorbed_twin_and_any_chunks_give_its_bits(model, crew):
    q, latent = model.inputs(37)
    own = np.random.default_rng(7).permutation(16)[:10].tolist()
    cache = model.cache(latent, own)
    whole = model.run(crew, [(q, 0, own)], cache)[0]
    assert np.abs(whole - model.twin(q, latent)).max() < 3e-5
    cuts = [0, 1, 2, 9, 20, 36, 37]
    parts = [model.run(crew, [(q[5:6], 5, own), (q[a:b], a, own), (q[7:9], 7, own)], cache)[1] for a, b in itertools.pairwise(cuts)]
    assert np.array_equal(np.concatenate(parts), whole)
    with Team(threads=5) as wide:
        assert np.array_equal(model.run(wide, [(q[36:], 36, own)], cache)[0], whole[36:])


def test_what_cannot_be_is_refused():
    scratch = Scratch(1, 64)
    zeros = [0] * 9
    with pytest.raises(ValueError, match=r"^heads: 3 for 2 kv heads"):
        attend(*zeros, 4, 0, 0, 0, 0, 0, 0, 3, 2, 8, 0, 0, 1.0, scratch)
    with pytest.raises(ValueError, match=r"^page_size: 3 is odd"):
        attend(*zeros, 3, 0, 0, 0, 0, 0, 0, 2, 2, 8, 0, 0, 1.0, scratch)


@pytest.mark.slow
@pytest.mark.parametrize("body", ["generic", "avx512_vnni"])
@pytest.mark.parametrize("kind", ["f32", "bf16", "fp8"])
def test_every_width_of_vectors_gives_the_twins_values(body, kind, crew, monkeypatch):
    """The vectors are LLVM's own, so that wide ones run (as narrow ones) on every CPU."""
    code = machine_code(sweep(body).block, 2)
    monkeypatch.setattr(attention, "_grouped", lambda: (grouped(body), code))
    model = Model(heads=6, kv_heads=2, dim=40, kind=kind, window=11, sinks=True)
    x = model.qkv(33)
    got = run(model, Cache(model, 64), crew, [(x, 0, pages_for(model, 33))])[0]
    assert np.abs(got - model.twin(x)).max() < {"f32": 2e-5, "bf16": 4e-3, "fp8": 0.15}[kind]
