"""Quality figures on logits whose divergence is known, and texts that are none."""
import math

import pytest
import torch

from hetero.bench.quality import Sums, texts
from hetero.errors import BadOption


def test_equal_logits_diverge_by_nothing_and_known_ones_by_what_they_should():
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    after = torch.tensor([1, 2, 3, 4, 5])
    same, other = Sums(), Sums()
    same.take(logits, logits.clone(), after, 1.0)
    row = same.row("prefill")
    assert row["KL"] == pytest.approx(0, abs=1e-6) and row["top-1"] == 1 and row["perplexity"] == row["reference perplexity"] and row["tokens"] == 5
    flat = torch.zeros(5, 2)
    tilted = torch.tensor([[math.log(3.0), 0.0]]).repeat(5, 1)
    other.take(flat, tilted, torch.zeros(5, dtype=torch.long), 1.0)
    row = other.row("decode")
    assert row["KL"] == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25), rel=1e-5)
    assert row["perplexity"] == pytest.approx(4 / 3, rel=1e-5) and row["reference perplexity"] == pytest.approx(2, rel=1e-5)


def test_texts_are_spread_over_the_file_and_bad_ones_named(tmp_path):
    plain, rows = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("\n".join(f"line {i}" for i in range(10)) + "\n\n")
    assert texts(plain, 5) == [f"line {i}" for i in range(0, 10, 2)] and len(texts(plain, 0)) == 10
    rows.write_text('{"text": "x"}\n{"other": 1}\n')
    for bad in (rows, tmp_path / "none.txt"):
        with pytest.raises(BadOption, match="--text"):
            texts(bad, 1)
    plain.write_text("\n")
    with pytest.raises(BadOption, match="no line"):
        texts(plain, 1)
