"""Published configs that run through the bridge, written from facts: the class that runs each, and its counts as published."""

import importlib.util
import json
import math
import pathlib

import pytest

from hetero import forecast
from hetero.arch import families
from hetero.bridge import known
from hetero.errors import UnsupportedModel
from hetero.options import Options

place = importlib.util.spec_from_file_location("bridged_facts", pathlib.Path(__file__).resolve().parents[1] / "configs" / "bridged.py")
facts = importlib.util.module_from_spec(place)
place.loader.exec_module(facts)
QUICK = ("K-EXAONE-236B-A23B", "LFM2-8B-A1B")


def rounds(value, published, cut):
    digits = len(str(published).partition(".")[2])
    return (math.floor(value / 1e9 * 10 ** digits) / 10 ** digits if cut else round(value / 1e9, digits)) == published


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in facts.CHECKPOINTS])
def test_a_bridged_checkpoint_written_from_facts_is_read_and_counts_as_published(name, tmp_path):
    config, runs, total, active, counted = facts.CHECKPOINTS[name]
    assert known.require(config) == runs and not families.native(config)
    (tmp_path / "c.json").write_text(json.dumps(config))
    plan, _ = forecast.forecast(str(tmp_path / "c.json"), Options(cache_dir=tmp_path), config_only=True)
    assert rounds(plan.total_params, total, False), plan.total_params
    used = plan.active_params_with_embedding if counted.startswith("table") else plan.active_params
    assert active is None or rounds(used, active, "cut rather" in counted), used


@pytest.mark.parametrize("name", ["Qwen3MoeForSequenceClassification", "DeepseekV3ForCausalLMNextN", "JambaModel"])
def test_a_class_that_does_not_make_text_is_not_run_as_its_model_types_own(name):
    kind = {"Q": "qwen3_moe", "D": "deepseek_v3", "J": "jamba"}[name[0]]
    with pytest.raises(UnsupportedModel, match=name):
        known.require({"architectures": [name], "model_type": kind})
