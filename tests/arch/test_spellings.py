"""Other published spellings of known checkpoints: the same model, the model that they mean, or a refusal by key."""

import importlib.util
import json
import pathlib

import pytest

from hetero.arch import families
from hetero.errors import UnsupportedModel

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"


def module(name):
    place = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}.py")
    found = importlib.util.module_from_spec(place)
    place.loader.exec_module(found)
    return found


facts, spellings = module("checkpoints"), module("spellings")


def config_of(base, changes):
    return json.loads(json.dumps(spellings.inside(facts.CHECKPOINTS[base][0], changes)))


@pytest.mark.parametrize("n", range(len(spellings.SAME)), ids=lambda n: f"{n}-{spellings.SAME[n][0]}")
def test_another_spelling_is_the_same_model(n):
    base, changes = spellings.SAME[n]
    assert families.read(config_of(base, changes)) == families.read(config_of(base, {}))


@pytest.mark.parametrize("n", range(len(spellings.OTHER)), ids=lambda n: f"{n}-{spellings.OTHER[n][0]}")
def test_a_changed_key_changes_what_it_says(n):
    base, changes, path, value = spellings.OTHER[n]
    found = families.read(config_of(base, changes))
    for step in path.split("."):
        found = found[int(step)] if step.isdigit() else getattr(found, step)
    assert found == value


@pytest.mark.parametrize("n", range(len(spellings.REFUSED)), ids=lambda n: f"{n}-{spellings.REFUSED[n][0]}")
def test_a_key_that_means_other_arithmetic_is_refused_by_name(n):
    base, changes, word = spellings.REFUSED[n]
    with pytest.raises(UnsupportedModel, match=word):
        families.read(config_of(base, changes))
