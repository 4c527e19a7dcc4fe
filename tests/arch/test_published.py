"""Published configs that a native row reads: each counts the parameters that its publisher states; what no row reads is refused in words."""

import importlib.util
import json
import math
import pathlib

import pytest

from hetero.arch import families, tensors
from hetero.errors import UnsupportedModel

HERE = pathlib.Path(__file__).resolve()
spec = importlib.util.spec_from_file_location("checkpoints", HERE.parents[1] / "configs" / "checkpoints.py")
facts = importlib.util.module_from_spec(spec)
spec.loader.exec_module(facts)
PUBLISHED = HERE.parents[3] / "shared" / "model-configs"
FILES = sorted(PUBLISHED.glob("*.json")) if PUBLISHED.is_dir() else []


def rounds(value, published, cut=False):
    """Whether `published` billions is how `value` is written with as many digits (some publishers cut the rest off)."""
    digits = len(str(published).partition(".")[2].rstrip("0"))
    return (math.floor(value / 1e9 * 10 ** digits) / 10 ** digits if cut else round(value / 1e9, digits)) == published


@pytest.mark.parametrize("name", sorted(facts.CHECKPOINTS))
def test_a_checkpoint_written_from_facts_is_read_and_counts_as_published(name):
    config, total, active, counted = facts.CHECKPOINTS[name]
    model = families.read(config)
    assert families.native(config)
    found, used = tensors.parameters(model)
    table = 0 if model.tied else model.vocab * model.hidden
    assert rounds(found, total) or "total is" in counted, (name, found)
    shown = used + (table if counted.startswith("table") else 0)
    assert rounds(shown, active, "cut rather" in counted), (name, shown)


def test_there_are_at_least_thirty_checkpoints():
    assert len(facts.CHECKPOINTS) >= 30


@pytest.mark.skipif(not FILES, reason="the folder of published configs is not beside the checkout")
@pytest.mark.parametrize("file", FILES, ids=lambda p: p.stem)
def test_a_published_config_is_read_or_refused_in_words(file):
    config = json.loads(file.read_text())
    name = config["architectures"][0]
    if not families.native(config):
        with pytest.raises(UnsupportedModel, match=name) as e:
            families.read(config)
        assert "supported:" in e.value.hint
        return
    total, active = tensors.parameters(families.read(config))
    assert 0 < active < total


@pytest.mark.skipif(not FILES, reason="the folder of published configs is not beside the checkout")
@pytest.mark.parametrize(("stem", "total", "active"), [
    ("DeepSeek-R1", 671, 37), ("Kimi-K2-Instruct", 1026, 32), ("Qwen3-235B-A22B", 235, 22), ("gpt-oss-20b", 20.9, 3.6), ("Hunyuan-A13B", 80, 13),
    ("Qwen2-57B-A14B@pr1", 57, 14), ("OLMoE-1B-7B-0924-SFT", 7, 1), ("Ling-lite-chat", 16.8, 2.5)])
def test_published_counts_of_proven_configs_are_met(stem, total, active):
    found, used = tensors.parameters(families.read(json.loads((PUBLISHED / f"{stem}.json").read_text())))
    assert rounds(found, total) and rounds(used, active), (found, used)
