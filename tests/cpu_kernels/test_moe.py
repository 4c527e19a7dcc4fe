"""The routed layer against its float64 twin: every format, body, activation, token count; bits that do not depend on threads or neighbours."""
import numpy as np
import pytest

from cpu_kernels import FORMATS, Act, ExpertLayer, ExpertStore, cpu, lanes, plain, routed
from cpu_kernels.team import Team

ISAS = [i for i in cpu.isas() if lanes.body_of(i) == i]
QUICK = ("f32", "bf16", "int8_g32", "int4_g32", "mxfp4", "q6_k")          # the others compile as long and are run with --slow
MIXED = ("mxfp4+q6_k", "fp8+int4_g32", "int8_g32+bf16")                   # gate and up in one format, down in another
EVERY = [f if f in (*QUICK, MIXED[0]) else pytest.param(f, marks=pytest.mark.slow) for f in (*FORMATS, *MIXED)]


@pytest.fixture(scope="module")
def team():
    with Team(threads=2) as t:
        yield t


def make(format, experts=6, hidden=96, inter=64, gated=True, seed=0):
    rng = np.random.default_rng(seed)
    store = ExpertStore(format, experts, hidden, inter, gated)
    for e in range(experts):
        g, u, d = ((rng.standard_normal(s) / np.sqrt(s[1])).astype(np.float32) for s in ((inter, hidden), (inter, hidden), (hidden, inter)))
        store.put(e, g if gated else None, u, d)
    return store


def inputs(store, tokens, k, seed=1000, low=-1):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, store.hidden)).astype(np.float32)
    return x, rng.integers(low, store.experts, (tokens, k), dtype=np.int32), rng.standard_normal((tokens, k)).astype(np.float32)


def twin(store, x, ids, weights, act=None, biases=None, weight_on="output", rounded=True):
    a = act or Act()
    def matrices(e):
        return tuple(store.dequantize(e, n) if n != "gate" or store.gated else None for n in ("gate", "up", "down"))
    return plain.moe(store.form, x, ids, weights, matrices, (a.kind, a.alpha, a.limit, a.up_shift), biases, weight_on, rounded)


def close(out, ref, bound):
    scale = np.linalg.norm(ref)
    assert np.linalg.norm(out - ref) <= bound * scale + 1e-30, np.linalg.norm(out - ref) / scale


def run(layer, x, ids, weights, team, **how):
    out = np.full(x.shape, np.nan, np.float32)
    layer.run(x, ids, weights, out, team, **how)
    return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", EVERY)
@pytest.mark.parametrize(("hidden", "inter"), [(96, 64), (200, 100), (41, 17)])
def test_equals_the_twin_given_the_same_rounded_activations(team, isa, format, hidden, inter):
    store = make(format, hidden=hidden, inter=inter)
    layer = ExpertLayer(store, isa=isa)
    for tokens, k in ((1, 4), (3, 3), (20, 3)):
        x, ids, weights = inputs(store, tokens, k)
        out, ref = run(layer, x, ids, weights, team), twin(store, x, ids, weights)
        off = np.linalg.norm(out - ref, axis=1) / (np.linalg.norm(ref, axis=1) + 1e-30)
        # h is rounded to codes: where two arithmetics differ in the last bit a code may flip, which is one part in 127 of one value of one token
        flipped = off > 1e-6
        assert flipped.sum() <= (store.down.partner != "f32") and (off <= 4e-3).all(), off


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("gated", [True, False])
def test_two_long_streams_give_the_bits_of_four(team, isa, gated):
    store, rng = make("int8_g32", hidden=200, inter=100, gated=gated), np.random.default_rng(5)
    gate, up, down = (rng.standard_normal((6, n)).astype(np.float32) for n in (100, 100, 200))
    outs = []
    for long in (0, 1):
        layer = ExpertLayer(store, biases=(gate if gated else None, up, down), weight_on="input", isa=isa)
        layer.static[routed.LONG] = long
        outs.append([run(layer, *inputs(store, tokens, 3), team) for tokens in (1, 2, 37)])
    assert all(np.array_equal(a, b) for a, b in zip(*outs, strict=True))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("gated", [True, False])
def test_an_order_of_inputs_gives_the_bits_of_inputs_that_came_in_that_order(team, isa, gated):
    ordered, plainly = (make(f"int4_g32+q6_k{mark}", hidden=200, inter=100, gated=gated) for mark in (":ordered", ""))
    assert ordered.form == "int4_g32+q6_k:ordered" and np.array_equal(ordered.orders[3], np.arange(200)) and plainly.orders is None
    ordered.orders[:] = np.stack([np.random.default_rng(e).permutation(200) for e in range(6)])
    layer, other = ExpertLayer(ordered, isa=isa), ExpertLayer(plainly, isa=isa)
    for tokens, k in ((1, 1), (1, 4), (2, 1), (37, 3)):
        x, ids, weights = inputs(ordered, tokens, k)
        out = run(layer, x, ids, weights, team)
        off = np.linalg.norm(out - plain.moe(ordered.form, x, ids, weights, lambda e: tuple(
            ordered.dequantize(e, n) if n != "gate" or gated else None for n in ("gate", "up", "down")), ("silu", 1.0, None, 0.0), None, "output", True, ordered.orders), axis=1)
        assert (off <= 4e-3 * np.linalg.norm(out, axis=1)).all() and (off > 1e-6 * np.linalg.norm(out, axis=1)).sum() <= 1
        bf16 = plain.f32_to_bf16(x)
        for e in range(6):
            mine = np.where(ids == e, ids, -1)
            assert np.array_equal(run(layer, x, mine, weights, team), run(other, np.ascontiguousarray(x[:, ordered.orders[e]]), mine, weights, team))
            assert np.array_equal(run(layer, bf16, mine, weights, team), run(other, np.ascontiguousarray(bf16[:, ordered.orders[e]]), mine, weights, team))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", EVERY)
def test_exact_precision_rounds_no_activation(team, isa, format):
    store = make(format, hidden=200, inter=100)
    x, ids, weights = inputs(store, 9, 3)
    out = run(ExpertLayer(store, isa=isa), x, ids, weights, team, precision="exact")
    close(out, twin(store, x, ids, weights, rounded=False), 1e-6)


@pytest.mark.parametrize("format", ["int8_g32", "int4_g32"])
def test_a_whole_ffn_with_int8_activations_stays_within_its_error(team, format):
    store = make(format, experts=2, hidden=512, inter=256)
    x, ids, weights = inputs(store, 4, 2)
    ids[:], weights = [0, 1], np.abs(weights)
    close(run(ExpertLayer(store), x, ids, weights, team), twin(store, x, ids, weights, rounded=False), 1.3e-2)


ACTS = [Act("silu"), Act("silu", 1.702, 1.0, 1.0), Act("silu", 1.0, 0.5), Act("gelu"), Act("gelu_tanh"), Act("relu2"), Act("gelu", limit=0.7, up_shift=0.25)]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("act", ACTS, ids=str)
@pytest.mark.parametrize("weight_on", ["input", "output"])
def test_every_activation_bias_and_weighting(team, act, gated, weight_on):
    store = make("f32", hidden=72, inter=40, gated=gated)
    rng = np.random.default_rng(3)
    biases = tuple(rng.standard_normal((store.experts, n)).astype(np.float32) for n in (40, 40, 72))
    if not gated:
        biases = (None, *biases[1:])
    x, ids, weights = inputs(store, 5, 3)
    for b in (biases, None, (None, None, biases[2])):
        out = run(ExpertLayer(store, act, b, weight_on), x, ids, weights, team)
        close(out, twin(store, x, ids, weights, act, b, weight_on), 2e-6)


@pytest.mark.parametrize("format", ["bf16", "int4_g32"])
def test_bits_do_not_depend_on_the_number_of_threads(format):
    store = make(format, experts=9, hidden=160, inter=96)
    x, ids, weights = inputs(store, 13, 4)
    outs = []
    for threads in (1, 2, 3, 5):
        with Team(threads=threads) as team:
            outs.append([run(ExpertLayer(store), x, ids, weights, team) for _ in range(3)])
    for out in (o for several in outs for o in several):
        assert np.array_equal(out, outs[0][0])


@pytest.mark.parametrize("format", EVERY)
def test_bits_of_a_token_do_not_depend_on_its_neighbours(team, format):
    store = make(format, experts=3)
    layer = ExpertLayer(store)
    x, ids, weights = inputs(store, 23, 2)
    whole = run(layer, x, ids, weights, team)
    for t in range(23):
        assert np.array_equal(whole[t:t + 1], run(layer, x[t:t + 1], ids[t:t + 1], weights[t:t + 1], team))


@pytest.mark.parametrize("format", ["int4_g32", "int8_g32", "mxfp4", "q6_k", *(pytest.param(f, marks=pytest.mark.slow) for f in ("nvfp4", "q4_k", "int8_g64z"))])
def test_all_integer_bodies_give_the_same_sums(team, format):
    store = make(format)
    x, ids, weights = inputs(store, 6, 3)
    outs = [run(ExpertLayer(store, isa=isa), x, ids, weights, team) for isa in ISAS]
    for out in outs:
        close(out, outs[0], 1e-4)


def test_no_expert_of_mine_gives_zeros_and_duplicates_add_up(team):
    store = make("int8_g32")
    layer = ExpertLayer(store)
    x, _, weights = inputs(store, 3, 4)
    assert not run(layer, x, np.full((3, 4), -1, np.int32), weights, team).any()
    same = np.full((3, 4), 2, np.int32)
    close(run(layer, x, same, weights, team), twin(store, x, same, weights), 2e-4)


@pytest.mark.parametrize("format", EVERY)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_not_finite_stays_in_its_token(team, format, bad):
    store = make(format, experts=2)
    layer = ExpertLayer(store)
    x, ids, weights = inputs(store, 6, 2, low=0)
    good = run(layer, x, ids, weights, team)
    x[3, 17] = bad
    out = run(layer, x, ids, weights, team)
    assert not np.isfinite(out[3]).all() or bad == 3e38
    assert np.array_equal(np.delete(out, 3, 0), np.delete(good, 3, 0))


def test_bf16_inputs_are_widened(team):
    store = make("int4_g32", hidden=200, inter=100)
    x, ids, weights = inputs(store, 3, 2)
    bits = plain.f32_to_bf16(x)
    layer = ExpertLayer(store)
    assert np.array_equal(run_bits(layer, bits, ids, weights, team), run(layer, plain.bf16_to_f32(bits), ids, weights, team))


def run_bits(layer, bits, ids, weights, team):
    out = np.empty(bits.shape, np.float32)
    layer.run(bits, ids, weights, out, team)
    return out


def test_more_tokens_than_one_job_takes(team, monkeypatch):
    store = make("int8_g32")
    x, ids, weights = inputs(store, 50, 2)
    whole = run(ExpertLayer(store), x, ids, weights, team)
    monkeypatch.setattr("cpu_kernels.moe.CHUNK_TOKENS", 16)
    assert np.array_equal(run(ExpertLayer(store), x, ids, weights, team), whole)


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"x": np.zeros((4, 95), np.float32)}, ValueError, "x: shape"), ({"x": np.zeros((4, 96))}, TypeError, "x: dtype"),
    ({"ids": np.zeros((4, 2), np.int64)}, TypeError, "ids"), ({"ids": np.full((4, 2), 6, np.int32)}, ValueError, "ids: outside"),
    ({"ids": np.full((4, 2), -2, np.int32)}, ValueError, "ids: outside"), ({"ids": np.zeros((3, 2), np.int32)}, ValueError, "ids"),
    ({"weights": np.zeros((4, 3), np.float32)}, ValueError, "weights"), ({"out": np.zeros((4, 97), np.float32)}, ValueError, "out: shape"),
    ({"x": np.zeros((96, 4), np.float32).T}, ValueError, "x: not C-contiguous"), ({"precision": "best"}, ValueError, "precision"),
    ({"ids": np.zeros((4, 0), np.int32), "weights": np.zeros((4, 0), np.float32)}, ValueError, "ids: shape"),
])
def test_wrong_arguments_are_named_and_the_team_goes_on(team, change, error, words):
    store = make("int4_g32")
    good = {"x": np.ones((4, 96), np.float32), "ids": np.zeros((4, 2), np.int32), "weights": np.ones((4, 2), np.float32), "out": np.zeros((4, 96), np.float32)}
    with pytest.raises(error, match=words):
        ExpertLayer(store).run(**good | change, team=team)
    ExpertLayer(store).run(**good, team=team)
