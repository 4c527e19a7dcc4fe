"""Dense matrices against their float64 twin; the same bits whatever the other tokens and the threads are."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cpu_kernels import cpu, lanes, plain
from cpu_kernels.linear import Linear
from cpu_kernels.rows import panel
from cpu_kernels.team import Team

SHAPES = [(64, 64), (300, 130), (16, 256), (1, 64), (257, 320)]


@pytest.fixture(scope="module", params=[1, 2, 3])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    with Team(cores=cpu.read().allowed[:1], threads=request.param) as made:
        yield made


def made(format: str, rows: int, cols: int) -> tuple[Linear, np.ndarray]:
    rng = np.random.default_rng(rows * cols)
    linear = Linear(format, rows, cols)
    linear.put(rng.standard_normal((rows, cols)).astype(np.float32) / 8)
    bias = np.zeros(-(-rows // 16) * 16, np.float32)
    bias[:rows] = rng.standard_normal(rows)
    return linear, bias


def run(linear: Linear, x: np.ndarray, team: Team, bias: np.ndarray | None = None) -> np.ndarray:
    out = np.full((len(x), linear.rows), np.nan, np.float32)
    linear.run(x, out, team, bias)
    return out


@pytest.mark.parametrize("format", ["f32", "bf16", "int8_g32", "int4_g32", "fp8"])
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_products_are_those_of_float64_and_the_same_bits_for_any_number_of_tokens(format: str, rows: int, cols: int, team: Team) -> None:
    linear, bias = made(format, rows, cols)
    x = np.random.default_rng(1).standard_normal((19, cols)).astype(np.float32)
    taken = plain.rounded_activations(linear.format, x)
    want = taken.astype(np.float64) @ linear.dequantize().T + bias[:rows]
    whole = run(linear, x, team, bias)
    assert np.abs(whole - want).max() <= 2e-5 * np.abs(want).max()
    for n in (1, 2, 3, 5, 8, 9):
        assert np.array_equal(run(linear, x[:n].copy(), team, bias), whole[:n])
    assert np.array_equal(run(linear, x[4:5].copy(), team, bias)[0], whole[4])


@pytest.mark.parametrize("isa", [i for i in cpu.isas() if i in lanes.BODIES])
@pytest.mark.parametrize("format", ["f32", "f16", "bf16", "int8_g32", "int4_g32", "q4_k", "mxfp4", "fp8"])
def test_every_body_multiplies_panels_of_every_size_as_it_does_one_token(format: str, isa: str) -> None:
    rng = np.random.default_rng(3)
    linear = Linear(format, 72, 200, exact=True, isa=isa)
    linear.put(rng.standard_normal((72, 200)).astype(np.float32) / 8)
    x = rng.standard_normal((28, 200)).astype(np.float32)
    want = x.astype(np.float64) @ linear.dequantize().T
    with Team(cores=cpu.read().allowed[:1], threads=2) as team:
        whole = run(linear, x, team)
        assert np.abs(whole - want).max() <= 2e-5 * np.abs(want).max()
        for n in (1, 2, 7, 13, 25):
            assert np.array_equal(run(linear, x[:n].copy(), team), whole[:n]), n


@pytest.mark.parametrize("body", lanes.BODIES)
def test_panels_hold_all_tokens_and_are_as_few_as_can_be(body: str) -> None:
    for tokens in range(1, 200):
        cut = panel.panels(body, tokens)
        assert sum(cut) == tokens and set(cut) <= set(panel.sizes(body))
        assert len(cut) <= tokens // panel.sizes(body)[0] + 3


@pytest.mark.parametrize("format", ["bf16", "int8_g32"])
def test_any_number_of_threads_gives_the_same_bits(format: str) -> None:
    linear, _ = made(format, 300, 130)
    x, outs = np.random.default_rng(2).standard_normal((5, 130)).astype(np.float32), []
    for threads in (1, 4):
        with Team(cores=cpu.read().allowed[:1], threads=threads) as team:
            outs.append(run(linear, x, team))
    assert np.array_equal(*outs)


def test_bf16_weights_are_kept_as_they_arrive() -> None:
    bits = np.random.default_rng(3).integers(0x3C00, 0x4000, (40, 64), dtype=np.uint16)
    linear = Linear("bf16", 40, 64)
    linear.put(bits, "bf16")
    assert np.array_equal(linear.dequantize(), plain.bf16_to_f32(bits))


def test_nan_stays_in_its_row(team: Team) -> None:
    linear, _ = made("int8_g32", 64, 64)
    x = np.ones((3, 64), np.float32)
    x[1, 5] = np.nan
    out = run(linear, x, team)
    assert np.isnan(out[1]).all() and np.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize("wrong", ["x", "out", "bias"])
def test_wrong_arrays_are_named(wrong: str, team: Team) -> None:
    linear, _ = made("f32", 64, 64)
    given = {"x": np.zeros((2, 64), np.float32), "out": np.zeros((2, 64), np.float32), "bias": np.zeros(64, np.float32)}
    given[wrong] = given[wrong].astype(np.float64)
    with pytest.raises(ValueError, match=wrong):
        linear.run(given["x"], given["out"], team, given["bias"])
