"""The bench of a model, a setting and the kernels, on what runs in seconds: figures are there and add up; their size is nobody's business."""
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from cpu_kernels import Team, ceilings, measure
from hetero import cli
from hetero.bench import ab, kernels, speed
from hetero.errors import BadOption
from hetero.llm import LLM
from hetero.options import resolve


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with LLM(cache_dir=str(tmp_path_factory.mktemp("cache"))) as made:
        yield made


def test_a_run_gives_rates_shares_and_where_the_time_went(llm):
    found = speed.bench(llm, [24], [1, 2], 4, 1, lambda text: None)
    assert [(r["prompt"], r["batch"]) for r in found.rows] == [(24, 1), (24, 2)]
    for r in found.rows:
        assert r["decode tok/s"] == pytest.approx(1e3 * r["batch"] / r["TPOT ms"]) and r["prefill tok/s"] > 0 and r["of read bound"] > 0 and r["of peak"] > 0
    for what in ("prefill", "decode"):
        told = found.facts[f"{what} time at prompt 24, batch 1"]
        shares = dict((name.rsplit(" ", 1)) for name in told.split(", "))
        assert {"experts", "matrices", "attention", "Python"} <= set(shares) and sum(float(s[:-1]) for s in shares.values()) == pytest.approx(100, abs=1)
    assert llm.placed.run.ops.spent is None and llm.engine.runner.decoder is llm.placed.run       # nothing is watched afterwards


def test_the_bytes_of_a_step_are_those_that_the_parts_own(llm):
    one, many = speed.bytes_of(llm, 1, 100), speed.bytes_of(llm, 400, 100)
    k, E = (llm.model.layers[llm.model.moe_layers[0]].ffn.router.top_k, llm.model.layers[llm.model.moe_layers[0]].ffn.router.experts)
    arena = sum(s.experts * s.record_nbytes for s in llm.bank.stores.values())
    assert one["routed"] == pytest.approx(arena * k / E) and many["routed"] == pytest.approx(arena) and many["dense"] == one["dense"] > 0
    assert one["KV"] == 100 * llm.plan.kv_bytes_per_token


def test_what_does_not_fit_the_context_is_refused(llm):
    with pytest.raises(BadOption, match="context"):
        speed.bench(llm, [10**6], [1], 4, 1, lambda text: None)
    with pytest.raises(BadOption, match="batch"):
        speed.bench(llm, [8], [10**4], 4, 1, lambda text: None)


def test_a_setting_is_compared_in_pairs_and_equal_sides_are_no_gain(llm, monkeypatch):
    made = []

    def opened(options):
        made.append(options.max_stall_ms)
        return SimpleNamespace(__enter__=None, team=llm.team)

    class Same:                                          # one model plays both sides
        def __init__(self, options):
            made.append(options.max_stall_ms)

        def __enter__(self):
            return llm

        def __exit__(self, *_):
            pass
    def work(llm, cell, tokens, salt):
        cell.prefill_s.append(1.0 + 0.01 * (salt // 2))
        cell.step_s.append(0.1)
    monkeypatch.setattr(ab, "run", work)
    found = ab.bench(ab.question("max-stall-ms", ["100", "200"]), Same, resolve({}), 8, 1, 2, 35, lambda text: None)
    assert made == [100.0, 200.0] and {r.get("verdict") for r in found.rows} >= {"no difference seen"} and not any(r.get("ratio") for r in found.rows)
    assert any("no difference seen" in note for note in found.notes) and not any("times as fast" in note for note in found.notes)
    monkeypatch.setattr(ab, "run", lambda llm, cell, tokens, salt: (cell.prefill_s.append(1.0 + salt % 2), cell.step_s.append(1.0 + salt % 2)))
    found = ab.bench(ab.question("max-stall-ms", ["100", "200"]), Same, resolve({}), 8, 1, 2, 36, lambda text: None)
    assert any("max_stall_ms 100 is 2.000 times as fast as max_stall_ms 200" in note for note in found.notes)


@pytest.mark.parametrize(("name", "values", "said"), [("nothing", [], "nothing to compare"), ("threads", [], "two values"), ("threads", ["1", "2", "3"], "3 values"),
                                                      ("kv_dtype", ["int3", "fp8"], "kv_dtype"), ("stream", ["on", "off"], "takes no values"), ("handoff", ["flags", "smoke"], "two kinds")])
def test_questions_that_cannot_be_asked(name, values, said):
    with pytest.raises(BadOption, match=said):
        ab.question(name, values)


def test_few_pairs_are_refused_and_streaming_needs_a_gpu(llm):
    with pytest.raises(BadOption, match="pairs 10"):
        ab.bench(ab.question("overlap", []), lambda options: llm, resolve({}), 8, 1, 2, 10, lambda text: None)

    class Same:
        def __init__(self, options):
            pass

        def __enter__(self):
            return llm

        def __exit__(self, *_):
            pass
    for name in ("stream", "handoff"):
        with pytest.raises(BadOption, match="without a GPU"):
            ab.bench(ab.question(name, []), Same, resolve({}), 8, 1, 2, 35, lambda text: None)


def test_kernels_are_measured_at_a_models_shape():
    options = resolve({"threads": "1"})
    model = kernels.model_of(None, options)
    wanted = kernels.task(model, "int4_g32,f32", "generic", "1,16", 0.01, 0.02)
    assert wanted.isas == ("generic",) and wanted.hidden == 2048
    small = measure.Task(64, 64, 2, True, ("int4_g32",), wanted.isas, (1, 16), 0.001, 3, 0.01)
    found = kernels.bench(small, options, lambda text: None)
    assert [r["kernel"] for r in found.rows] == ["int4_g32 generic"] * 2 and found.rows[0]["GB/s"] > 0 and found.rows[1]["TOPS"] > 0
    assert all(0 < r["error"] < 0.05 and r["share"] > 0 for r in found.rows)
    for bad in (("int3", "", ""), ("all", "avx1024", ""), ("all", "", "0"), ("all", "", "x")):
        with pytest.raises(BadOption):
            kernels.task(model, *bad, 1.0, 1.0)


@pytest.mark.parametrize("int8", [True, False])
def test_the_peak_of_vector_products_is_a_number_on_every_body_here(int8):
    from cpu_kernels import cpu
    with Team(threads=1) as team:
        assert all(np.isfinite(ceilings.vector_ops_s(team, isa, int8, 2000)) for isa in cpu.isas())


def test_the_bench_needs_neither_triton_nor_httpx_nor_matplotlib_until_it_is_asked_for_what_they_do():
    code = ("import sys; sys.modules.update(dict.fromkeys(('triton', 'httpx', 'matplotlib'))); from hetero import cli; "
            "import hetero.bench.speed, hetero.bench.ab, hetero.bench.kernels, hetero.bench.machine; sys.exit(cli.main(['bench', 'serve', 'http://x']))")
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 2 and "needs httpx" in found.stderr and "hetero-moe[bench]" in found.stderr, found.stderr


def test_the_door_shows_results_as_asked(monkeypatch, capsys):
    from hetero.bench import machine
    from hetero.bench.result import Result
    monkeypatch.setattr(machine, "bench", lambda options: Result("machine", {"cpu": "x"}, [{"what": "DRAM read", "best": 12.0}]))
    assert cli.main(["bench", "machine", "--json"]) == 0 and json.loads(capsys.readouterr().out)["rows"] == [{"what": "DRAM read", "best": 12.0}]
    assert cli.main(["bench", "machine", "--csv"]) == 0 and capsys.readouterr().out.splitlines() == ["what,best", "DRAM read,12.0"]
    assert cli.main(["bench", "machine"]) == 0 and "| DRAM read |" in capsys.readouterr().out
    for wrong in (["run", "--prompts", "0"], ["run", "--rounds", "0"], ["serve", "nowhere"], ["serve", "http://x", "--extra", "[1]"], ["quality", "--text", "/nowhere"]):
        assert cli.main(["bench", *wrong]) == 2 and "hint:" in capsys.readouterr().err
