"""The deterministic promise: a request's log-probabilities are the same bits alone, among fifteen others, on warm pages, in other chunks, on other threads."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero.llm import LLM
from hetero.request import Sampling
from hetero.weights.source import EMBEDDED

TINY = EMBEDDED.parent / "tiny"
TEXT = "Once upon a time there was a small mouse who lived in a house by the sea. Every day the mouse went to the garden and"
MINE = Sampling(temperature=0.8, seed=11, max_tokens=10, logprobs=4)
OTHERS = [("A dog and a cat " * n)[:60 * n] for n in range(1, 16)]


def opened(folder: Path, **options: Any) -> LLM:
    return LLM(TINY, cache_dir=str(folder), deterministic=True, max_batch=16, ctx=512, **options)


def said(answer: Any) -> list[Any]:
    return [(p.token, p.logprob, p.top) for p in answer.logprobs]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    with opened(tmp_path_factory.mktemp("one"), threads=1) as llm:
        return said(llm.generate(TEXT, MINE)[0])


@pytest.mark.parametrize(("threads", "chunk"), [(2, 128), (1, 16)])
def test_neighbours_warm_pages_chunks_and_threads_change_no_bit(threads: int, chunk: int, alone: list[Any], tmp_path: Path) -> None:
    with opened(tmp_path, threads=threads, chunk=chunk) as llm:
        assert said(llm.generate(TEXT, MINE)[0]) == alone
        warm = llm.generate(TEXT, MINE)[0]
        assert warm.timings.cached_tokens > 0 and said(warm) == alone
        busy = Sampling(temperature=1.0, seed=3, max_tokens=20, logprobs=0)
        mixed = llm.generate([*OTHERS[:8], TEXT, *OTHERS[8:]], busy)
        assert said(mixed[8]) == said(llm.generate(TEXT, busy)[0])


def test_both_paths_of_logits_are_the_same_bits(tmp_path: Path) -> None:
    with opened(tmp_path, threads=2, chunk=16) as llm:
        ids = llm.encode(TEXT)
        assert (llm.logits(ids) == llm.logits(ids, "decode")).all()
