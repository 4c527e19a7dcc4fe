"""What the engine says against transformers in float32 on the same dequantized weights: KL, and greedy tokens wherever the margin allows."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hetero.bench import quality
from hetero.llm import LLM
from hetero.request import Sampling

PROMPTS = ["Tell me a story about a mouse.", "What is the sky?", "How do I make tea?", "Write a short poem about rain.", "Who lives in the sea?"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(cache_dir=str(tmp_path_factory.mktemp("cache"))) as made:
        yield made


@pytest.mark.slow
def test_kl_is_at_most_a_thousandth_on_both_paths(llm: LLM) -> None:
    found = quality.bench(llm, quality.by_transformers(llm), "transformers", quality.texts(quality.TEXT, 6), quality.TEXT, quality.PATHS)
    assert [row["path"] for row in found.rows] == ["prefill", "decode"]
    assert all(row["KL"] <= 1e-3 and row["top-1"] >= 0.98 for row in found.rows), found.rows


@pytest.mark.slow
def test_kv_in_fp8_costs_at_most_five_thousandths_more(tmp_path: Path) -> None:
    with LLM(cache_dir=str(tmp_path), kv_dtype="fp8") as llm:
        found = quality.bench(llm, quality.by_transformers(llm), "transformers", quality.texts(quality.TEXT, 6), quality.TEXT, quality.PATHS)
    assert all(row["KL"] <= 6e-3 and row["top-1"] >= 0.96 for row in found.rows), found.rows


@pytest.mark.slow
@torch.no_grad()
def test_greedy_tokens_are_those_of_transformers_wherever_its_margin_exceeds_twice_the_logit_error(llm: LLM) -> None:
    model, decided = quality.reference(llm), 0
    for prompt in PROMPTS:
        ids = llm.encode([{"role": "user", "content": prompt}])
        said = llm.generate(ids, Sampling(temperature=0.0, max_tokens=64, ignore_eos=True))[0].token_ids
        theirs = model(torch.tensor([[*ids, *said[:-1]]])).logits[0, len(ids) - 1:, :llm.vocab]
        ours = llm.logits([*ids, *said[:-1]])[len(ids) - 1:]
        error = (theirs - ours).abs().amax(-1)
        top = theirs.topk(2, -1)
        sure = top.values[:, 0] - top.values[:, 1] > 2 * error
        decided += int(sure.sum())
        assert torch.equal(top.indices[sure, 0], torch.tensor(said)[sure])
    assert decided > 250                                 # of 320
