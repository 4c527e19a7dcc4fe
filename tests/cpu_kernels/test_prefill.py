import numpy as np
import pytest

from cpu_kernels import FORMATS, Act, ExpertLayer, ExpertStore, cpu, plain, tiles
from cpu_kernels.team import Team
from cpu_kernels.tiled import FAST, Tiled, split


@pytest.fixture(scope="module")
def team():
    with Team(threads=2) as t:
        yield t


def made(format, experts, hidden, inter, gated=True, seed=0):
    rng = np.random.default_rng(seed)
    store = ExpertStore(format, experts, hidden, inter, gated)
    for e in range(experts):
        gate, up = (rng.standard_normal((inter, hidden)).astype(np.float32) * np.float32(hidden**-0.5) for _ in range(2))
        store.put(e, gate if gated else None, up, rng.standard_normal((hidden, inter)).astype(np.float32) * np.float32(inter**-0.5))
    return store


def wanted(store, layer_act, biases, x, ids, weights, weight_on="output"):
    act = (layer_act.kind, layer_act.alpha, layer_act.limit, layer_act.up_shift)

    def matrices(e):
        return tuple(store.dequantize(e, n) if n != "gate" or store.gated else None for n in ("gate", "up", "down"))
    return plain.moe(store.form, x, ids, weights, matrices, act, biases, weight_on, rounded=False)


AMX = cpu.isa() == "amx" and tiles.permitted()


def tiled(layer, team, fast, amx=AMX):
    return Tiled(layer.store, layer.static, layer.act.kind, layer.body, amx, fast, team, layer)


def relative(a, b):
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("format", [*(f for f in FORMATS if f != "f32"), "int4_g32+int8_g32", "q4_k+q6_k"])
@pytest.mark.parametrize("hidden,inter,tokens", [(64, 64, 5), (144, 96, 40), (576, 640, 150)])
def test_tile_products_give_the_twin_within_their_rounding(team, format, fast, hidden, inter, tokens):
    if fast and not set(format.split("+")) <= set(FAST):
        pytest.skip("this format has no int8 products")
    if format not in (*FAST, "bf16") and tokens != 40:
        pytest.skip("the same unpacking as of 40 tokens")
    store = made(format, 3, hidden, inter)
    layer = ExpertLayer(store)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    ids = rng.integers(-1, 3, (tokens, 2)).astype(np.int32)
    weights = rng.random((tokens, 2)).astype(np.float32)
    out = np.zeros_like(x)
    tiled(layer, team, fast).add(x, ids, weights, out)
    most = 3e-2 if fast else 3.4e-3 if format in ("int4_g32", "bf16") and hidden > 500 else 5.5e-3
    assert relative(out, wanted(store, layer.act, None, x, ids, weights)) < most


def test_biases_a_clamped_activation_and_weights_on_the_input(team):
    rng = np.random.default_rng(2)
    biases = tuple(rng.standard_normal((2, n)).astype(np.float32) for n in (96, 96, 80))
    store, act = made("int4_g32", 2, 80, 96), Act("silu", 1.702, 1.0, 1.0)
    layer = ExpertLayer(store, act, biases, "input")
    x = rng.standard_normal((70, 80)).astype(np.float32)
    ids = rng.integers(0, 2, (70, 1)).astype(np.int32)
    weights = rng.random((70, 1)).astype(np.float32)
    out = np.zeros_like(x)
    tiled(layer, team, False).add(x, ids, weights, out)
    assert relative(out, wanted(store, act, biases, x, ids, weights, "input")) < 4.5e-3


def test_ungated_experts(team):
    store, act = made("int8_g32", 2, 128, 64, gated=False), Act("relu2")
    layer = ExpertLayer(store, act)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((33, 128)).astype(np.float32)
    ids, weights = np.zeros((33, 1), np.int32), np.ones((33, 1), np.float32)
    out = np.zeros_like(x)
    tiled(layer, team, False).add(x, ids, weights, out)
    assert relative(out, wanted(store, act, None, x, ids, weights)) < 4.5e-3


@pytest.mark.parametrize("fast", [False, True])
def test_the_result_does_not_depend_on_the_number_of_threads_and_nan_stays_in_its_row(fast):
    store = made("int4_g32", 4, 192, 128)
    rng = np.random.default_rng(4)
    x = rng.standard_normal((90, 192)).astype(np.float32)
    x[7, 3] = np.nan
    ids = rng.integers(0, 4, (90, 2)).astype(np.int32)
    weights = rng.random((90, 2)).astype(np.float32)
    outs = []
    for threads in (1, 2, 3):
        with Team(threads=threads) as t:
            layer = ExpertLayer(store)
            out = np.zeros_like(x)
            tiled(layer, t, fast).add(x, ids, weights, out)
            outs.append(out)
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])
    bad = ~np.isfinite(outs[0])
    assert bad[7].all()
    assert not bad[np.arange(90) != 7].any()


def test_split_gives_each_pair_to_one_side():
    ids = np.array([[0, 1], [0, -1], [0, 2], [1, 0]], np.int32)
    few, many = split(ids, 3, 3)
    np.testing.assert_array_equal(many, [[0, -1], [0, -1], [0, -1], [-1, 0]])
    np.testing.assert_array_equal(few, [[-1, 1], [-1, -1], [-1, 2], [1, -1]])


@pytest.mark.skipif(not AMX, reason="this CPU has no AMX: the tests above ran the emulation")
@pytest.mark.parametrize("fast", [False, True])
def test_tile_registers_and_their_emulation_agree(team, fast):
    store = made("int4_g32", 3, 320, 192)
    layer = ExpertLayer(store)
    rng = np.random.default_rng(5)
    x = rng.standard_normal((200, 320)).astype(np.float32)
    ids, weights = rng.integers(0, 3, (200, 2)).astype(np.int32), np.ones((200, 2), np.float32)
    real, emulated = np.zeros_like(x), np.zeros_like(x)
    tiled(layer, team, fast, True).add(x, ids, weights, real)
    tiled(layer, team, fast, False).add(x, ids, weights, emulated)
    assert relative(real, emulated) < 2e-3


@pytest.mark.skipif(not AMX, reason="this CPU has no AMX")
def test_a_layer_sends_experts_of_many_tokens_through_tiles(team):
    store = made("int8_g32", 4, 128, 64)
    layer = ExpertLayer(store)
    rng = np.random.default_rng(6)
    x = rng.standard_normal((64, 128)).astype(np.float32)
    ids = np.zeros((64, 1), np.int32)
    ids[:3] = 2
    weights, out = np.ones((64, 1), np.float32), np.full_like(x, np.nan)
    layer.run(x, ids, weights, out, team)
    assert relative(out, wanted(store, layer.act, None, x, ids, weights)) < 8e-3
    assert layer.tune(team) in (4, 8, 16, 32, 64)
