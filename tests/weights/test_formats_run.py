"""The embedded model in each published format through the engine: what packing and kernels add to the converted weights stays within the bound."""
import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPACKED = {"bf16"}
NAMES = ["bf16", "ct_int4_g32", "ct_int4_g128", "gptq_g128", "gptq_g64_act_order", "awq_g128", "fp8_block", "fp8_channel", "mxfp4", "nvfp4", "Q8_0", "Q5_1", "Q4_1", "IQ4_NL", "Q5_0",
         "Q4_0", "MXFP4", "Q6_K", "Q5_K", "Q4_K", "IQ4_XS", "Q3_K", "Q2_K"]


@pytest.fixture(scope="module")
def formats():
    spec = importlib.util.spec_from_file_location("formats", ROOT / "scripts" / "formats.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_format_answers_as_its_own_weights_do(name, formats, tmp_path):
    lines = [json.loads(line)["text"] for line in formats.TEXT.read_text().splitlines()[:1]]
    path = formats.convert(name, tmp_path / name)
    own, _ = formats.logits(path, "f32", lines)
    got, row = formats.logits(path, "auto", lines)
    kl, top = formats.divergence(own, got)
    assert kl <= (2e-3 if row["packed"] == "int8_g32" or row["kept"] else 5e-2) and top > 0.85
    assert row["kept"] == (name not in REPACKED)
