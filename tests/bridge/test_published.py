"""Published configs: each is native, bridged or refused in the expected words; what plan --config-only counts is what its publisher says."""

import json
import math
import pathlib
import re

import pytest

from hetero import forecast
from hetero.arch import families
from hetero.bridge import known
from hetero.errors import UnsupportedModel
from hetero.options import Options

HERE = pathlib.Path(__file__).resolve()
PUBLISHED = HERE.parents[3] / "shared" / "model-configs"
FILES = sorted(PUBLISHED.glob("*.json")) if PUBLISHED.is_dir() else []
REFUSED = {"ArcticForCausalLM", "DbrxForCausalLM", "JetMoEForCausalLM", "KimiK3ForConditionalGeneration", "Llama4ForConditionalGeneration"}
# Levels A and B whose publisher counts or writes otherwise, and why.
EXCEPTIONS = {
    "GLM-4.5": "355 and 358 count parts of the layer that predicts a second token, which is not run",
    "GLM-4.7@pr49": "358 counts the layer that predicts a second token, which is not run",
    "Kimi-Linear-48B-A3B-Instruct": "49.1, by every tensor of its shape, is written 48",
    "Ling-plus-base@pr2": "the config holds 292.5 billion, of which 30.3 are used; 290 / 28.8 are those of its sibling",
    "Ling-plus-chat": "28.8 lies between what is used without (28.3) and with (29.0) the embedding table",
    "MiniMax-M2@fbd8a14_v5style": "228.7 is written 230",
}
pytestmark = pytest.mark.skipif(not FILES, reason="the folder of published configs is not beside the checkout")


def table():
    """(file stem, level, total, active as written) of the folder's own table; None where it does not say."""
    for line in (PUBLISHED / "README.md").read_text().splitlines():
        cells = [c.strip() for c in line.split("|")]
        if len(cells) > 5 and cells[5] in ("A", "B", "C") and (PUBLISHED / f"{cells[1]}.json").exists():
            said = re.match(r"([\d.]+)([BT]) / ([\d.]+)([BT])", cells[3])
            yield cells[1], cells[5], said and [(said[1], said[2]), (said[3], said[4])]


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.stem)
def test_a_published_config_is_native_bridged_or_refused_in_words(file):
    config = json.loads(file.read_text())
    name = config["architectures"][0]
    if name in REFUSED:
        with pytest.raises(UnsupportedModel, match=name) as e:
            known.require(config)
        assert "supported:" in e.value.hint and not families.native(config)
    elif not families.native(config):
        assert known.require(config) in known.bridgeable()


def written(value, published):
    """Whether `value` is how (digits, unit) was written, rounded or cut to as many digits."""
    digits, unit = published
    shown = value / {"B": 1e9, "T": 1e12}[unit]
    places = len(digits.partition(".")[2])
    return round(shown, places) == float(digits) or math.floor(shown * 10 ** places) / 10 ** places == float(digits)


COUNTED = [row for row in (table() if FILES else []) if row[1] in "AB" and row[2]]


def native(stem):
    return families.native(json.loads((PUBLISHED / f"{stem}.json").read_text()))


@pytest.mark.parametrize(("stem", "level", "said"), [pytest.param(*row, id=row[0], marks=() if native(row[0]) else pytest.mark.slow) for row in COUNTED])
def test_plan_counts_what_the_publisher_of_a_proven_config_says(stem, level, said, tmp_path):
    config = json.loads((PUBLISHED / f"{stem}.json").read_text())
    if config["architectures"][0] in REFUSED:
        return
    plan, _ = forecast.forecast(str(PUBLISHED / f"{stem}.json"), Options(cache_dir=tmp_path), config_only=True)
    total, active = said
    got = (written(plan.total_params, total), written(plan.active_params, active) or written(plan.active_params_with_embedding, active))
    assert (got == (True, True)) == (stem not in EXCEPTIONS), (plan.total_params / 1e9, plan.active_params / 1e9, plan.active_params_with_embedding / 1e9)
