"""The whole way from a name to text on the embedded model: answers, streams, seeds, evaluation, report."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hetero.engine.engine import Stats
from hetero.errors import BadOption, BadRequest
from hetero.llm import LLM
from hetero.memory.cost import Machine
from hetero.report import reached
from hetero.request import Sampling

HELLO = [{"role": "user", "content": "What is the sky?"}]
GREEDY = Sampling(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(cache_dir=str(tmp_path_factory.mktemp("cache"))) as made:
        yield made


def test_a_chat_answers_in_english_words(llm: LLM) -> None:
    answer = llm.chat(HELLO, GREEDY)
    assert answer.finish_reason in ("stop", "length") and answer.error is None
    assert answer.text.isascii() and len(answer.text.split()) >= 4


def test_a_stream_is_the_same_text_in_pieces(llm: LLM) -> None:
    chunks = list(llm.stream(HELLO, GREEDY))
    assert "".join(c.text for c in chunks) == llm.chat(HELLO, GREEDY).text
    assert chunks[-1].finish and not any(c.finish for c in chunks[:-1])


def test_closing_a_stream_ends_its_request(llm: LLM) -> None:
    stream = llm.stream(HELLO, GREEDY)
    next(stream)
    stream.close()
    llm.engine.step()
    assert llm.engine.idle and llm.engine.stats().pages_held == 0


def test_many_prompts_at_once_come_back_in_order(llm: LLM) -> None:
    prompts = ["The cat sat", HELLO, llm.encode("One day")]
    answers = llm.generate(prompts, Sampling(temperature=1.0, max_tokens=8, seed=7, n=2))
    assert [a.timings.prompt_tokens for a in answers] == [len(llm.encode(p)) for p in prompts for _ in range(2)]
    assert [a.index for a in answers] == [0, 1] * 3 and answers[0].text != answers[1].text


def test_both_paths_of_logits_agree(llm: LLM) -> None:
    ids = llm.encode("Once upon a time there was a little mouse.")
    prefill, decode = llm.logits(ids), llm.logits(ids, "decode")
    assert prefill.shape == (len(ids), llm.vocab) and prefill.dtype == torch.float32
    p = prefill.log_softmax(-1)
    assert (p.exp() * (p - decode.log_softmax(-1))).sum(-1).mean() < 1e-3


@pytest.mark.parametrize(("ids", "path"), [([], "prefill"), ([9999999], "prefill"), ([1], "sideways")])
def test_bad_token_ids_and_paths_are_refused(llm: LLM, ids: list[int], path: str) -> None:
    with pytest.raises(BadRequest):
        llm.logits(ids, path)


def test_the_report_names_every_layer_and_each_self_test_passes(llm: LLM) -> None:
    report = llm.report()
    assert {l for l, row in report.rows if row.part == "experts"} == set(range(8))
    assert all(row.format == "int8_g32" for _, row in report.rows if row.part == "experts")
    assert report.checks and all(c.passed for c in report.checks)
    assert "self-test" in report.text() and report.record()["layers"]


def test_speeds_are_counters_over_ceilings(llm: LLM) -> None:
    """Bytes that the CPU reads for one token: every layer's top-k records, and each dense matrix once."""
    llm.generate(["The cat"], Sampling(temperature=0.0, max_tokens=8, ignore_eos=True))
    found, stats, top_k = llm.speeds(), llm.engine.stats(), llm.source.config["num_experts_per_tok"]
    experts = sum(store.record_nbytes * top_k for store in llm.bank.stores.values())
    dense = sum(row.nbytes for _, row in llm.placed.decoder.report() if row.part not in ("experts", "embed"))
    assert dense > 8 << 20 and stats.decode_steps >= 7
    assert found["CPU GB/s"] == pytest.approx(stats.decode_steps * (experts + dense) / stats.decode_s / 1e9)
    assert found["CPU share of DRAM ceiling"] == pytest.approx(found["CPU GB/s"] / found["DRAM ceiling GB/s"])
    assert "expert cache hit ratio" not in found and "DRAM ceiling" in llm.report().text()
    assert not any("PCIe" in name for name in found)         # nothing is streamed where there is no GPU


def test_streamed_bytes_are_a_rate_over_the_time_of_prompts() -> None:
    """Copied bytes over the seconds of steps with prompts; before a first prompt no rate, without streaming yet 0."""
    machine = Machine(cores=16, ram_bytes=1 << 36, dram_bytes_s=100e9, cpu_flops=5e12, pcie_bytes_s=50e9)
    found = reached(Stats(prefill_s=2.0), machine, (1.0, 1.0), None, 80_000_000_000)
    assert found == {"DRAM ceiling GB/s": 100.0, "PCIe ceiling GB/s": 50.0, "PCIe GB/s": 40.0, "PCIe share of ceiling": 0.8}
    assert reached(Stats(prefill_s=2.0), machine, (1.0, 1.0), None, 0)["PCIe GB/s"] == 0.0
    assert "PCIe GB/s" not in reached(Stats(), machine, (1.0, 1.0), None, 10**9) | reached(Stats(prefill_s=2.0), machine, (1.0, 1.0), None, None)


def test_not_a_number_ends_one_request_with_an_error_that_names_the_layer(llm: LLM) -> None:
    data = llm.placed.decoder.blocks[3].attention.out.linear.data
    kept = data.copy()
    data.view("uint16")[:] = 0x7FC0                      # bf16 NaN
    answer = llm.chat(HELLO, GREEDY)
    data[:] = kept
    assert answer.finish_reason == "error" and answer.text == ""
    assert answer.error is not None and "layer 3" in answer.error
    assert llm.chat(HELLO, GREEDY).error is None


def test_an_unknown_option_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="thread"):
        LLM(cache_dir=str(tmp_path), thread=2)


def test_routing_that_would_be_ignored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="routing"):
        LLM(cache_dir=str(tmp_path), routing="uniform")
