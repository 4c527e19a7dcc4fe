"""The self-test finds a kernel that is wrong, and passes those that are right, for every kind of attention."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cpu_kernels import cpu, heads
from cpu_kernels.team import Team
from hetero.arch import spec
from hetero.engine.placed import failed
from hetero.errors import UnusableHardware
from hetero.gpu.host import Host
from hetero.gpu.ops import Check
from hetero.model.check import check_parts

LONG = spec.Scaling("longrope", (("long", (2.0,) * 16), ("long_size", 1.2), ("original", 32.0), ("short", (1.0,) * 16), ("short_size", 1.1)))
ROUTED = spec.MoE(spec.Router(16, 2, "sigmoid", True, correction=True), 32)
PARTS = {
    "grouped": spec.GQA(4, 2, 32, spec.Rope(32, 1e4), qk_norm="head"), "window": spec.GQA(4, 1, 32, spec.Rope(16, 1e4), window=8, sinks=True),
    "stretched": spec.GQA(4, 2, 32, spec.Rope(32, 1e4, scaling=LONG)),         # the host's context is beyond its short factors
    "latent": spec.MLA(4, None, 32, 16, 24, spec.Rope(16, 1e4, interleaved=True))}


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Team(cores=cpu.read().allowed[:1], threads=2) as team:
        yield Host(64, team, "")


def model(part: Any) -> spec.Model:
    return spec.Model("test", 64, 100, 1e-6, (spec.Layer(part, ROUTED),), True, {})


@pytest.mark.parametrize("kv", ["f32", "bf16", "fp16", "fp8"])
@pytest.mark.parametrize("part", PARTS)
def test_right_kernels_pass(part: str, kv: str, host: Host) -> None:
    checks = list(check_parts(host, model(PARTS[part]), kv, "bf16"))
    assert {c.part for c in checks} == {"linear", "attention", "router"}
    assert all(c.passed for c in checks), checks


@pytest.mark.parametrize("context", [1, 2, 17])
def test_a_context_shorter_than_the_self_test_s_prompt_is_no_fault(context: int, host: Host) -> None:
    short = Host(context, host.team, "")
    for part in ("grouped", "window", "latent"):
        assert all(c.passed for c in check_parts(short, model(PARTS[part]), "bf16", "bf16"))


def test_a_wrong_kernel_is_found_and_refused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(heads.QK_NORMS, "head", 0)
    checks = list(check_parts(host, model(PARTS["grouped"]), "f32", "bf16"))
    assert [c.part for c in checks if not c.passed] == ["attention"]
    with pytest.raises(UnusableHardware, match=r"attention by attention\.grouped"):
        failed(checks, False)
    assert "stands in" in failed(checks, True)
    assert failed([c for c in checks if c.passed], False) == ""


def test_nothing_stands_in_for_wrong_experts_and_nan_is_wrong() -> None:
    with pytest.raises(UnusableHardware):
        failed([Check("experts", "rows.f32", "f32", 1.0, 1e-3)], True)
    assert not Check("linear", "x", "f32", float("inf"), 1.0).passed
