"""Which of the installed transformers' classes can be bridged, found by looking; knows no weights and builds no model.

A class belongs here when it makes text and the file that defines it hands its routed experts to transformers' experts interface. A checkpoint's
own code (`auto_map`) is never looked at.
"""

import logging
import re
import warnings
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

from hetero.arch.families import FAMILIES, TEXT_PARTS, architecture
from hetero.arch.fields import HARMLESS
from hetero.errors import UnsupportedModel

SPEAKS = re.compile(r"For(CausalLM|ConditionalGeneration)$")
LEAST = (5, 17)


@cache
def bridgeable() -> dict[str, tuple[str, ...]]:
    """Class names, each with the model types that its config may have, the preferred one first."""
    check_version()
    root = Path(transformers.__file__).parent / "models"
    inside = {path.parent.name for path in root.glob("*/modeling_*.py") if "@use_experts_implementation" in path.read_text(encoding="utf-8")}
    found: dict[str, tuple[str, ...]] = {}
    for mapping in (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
                    modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES):
        for kind, names in mapping.items():
            for name in (names,) if isinstance(names, str) else names:
                if model_type_to_module_name(kind) in inside and SPEAKS.search(name) and kind in CONFIG_MAPPING_NAMES:
                    found[name] = tuple(dict.fromkeys((*found.get(name, ()), kind)))
    return dict(sorted(found.items()))


def check_version() -> None:
    """The interface, and the conversions of checkpoints that come with it, are those of 5.17 and later."""
    if tuple(int(n) for n in transformers.__version__.split(".")[:2]) < LEAST:
        raise UnsupportedModel(f"transformers {transformers.__version__} is installed, and the bridge needs {LEAST[0]}.{LEAST[1]} or newer",
                               "pip install -U transformers")


def name_of(config: dict[str, Any]) -> str | None:
    """The installed class that runs this config: the one that it names, else the one for its model_type; None when there is none to bridge."""
    known = bridgeable()
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if name in known:
        return name
    if name and not SPEAKS.search(name):
        return None                                                  # a classifier, a draft model: its model_type's class is another model
    alike = [n for n in known if n.lower() == name.lower()]          # Ernie4_5_VLMoe and Ernie4_5_VL_Moe
    kind = config.get("model_type")
    return alike[0] if alike else next((n for n, kinds in known.items() if kind in kinds), None)


def require(config: dict[str, Any]) -> str:
    """The same, or UnsupportedModel for what is neither native nor on the interface."""
    if (name := name_of(config)) is not None:
        return name
    asked = architecture(config)
    names = (*FAMILIES, *TEXT_PARTS, *bridgeable())
    stems = {known.split("For")[0]: known for known in names}
    near = [stems[stem] for stem in get_close_matches(asked.split("For")[0], stems, 1, 0.6)]
    raise UnsupportedModel(f"config key architectures = {asked!r} is not a family that hetero knows, and the installed transformers "
                           f"({transformers.__version__}) has no class of this name whose experts go through its experts interface",
                           (f"nearest: {near[0]}; " if near else "") + f"supported: {', '.join(sorted(names))}")


def read_config(config: dict[str, Any]) -> tuple[str, Any]:
    """(class name, transformers' own config record). Raises UnsupportedModel with transformers' words when it refuses a key's value."""
    name = require(config)
    kinds = bridgeable()[name]
    kind = config.get("model_type") if config.get("model_type") in kinds else kinds[0]
    made = transformers.CONFIG_MAPPING[kind]
    plain = plainly(config)
    quiet = logging.getLogger("transformers")
    level = quiet.level
    quiet.setLevel(logging.ERROR)                                     # its notes on keys are ours to give
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")                           # old spellings are spellings
            return name, made.from_dict(plain)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as e:
        raise UnsupportedModel(f"config of {name}: transformers {transformers.__version__} does not take it: {' '.join(str(e).split())[:200]}",
                               "a newer transformers may") from e
    finally:
        quiet.setLevel(level)


def plainly(value: Any) -> Any:
    """A config without what says how its files are packed or names code, and with infinities, which transformers writes as {"__float__": ...}."""
    if isinstance(value, list):
        return [plainly(v) for v in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"__float__"}:
        return float(value["__float__"])
    return {k: plainly(v) for k, v in value.items() if k not in ("quantization_config", "compression_config", "auto_map")}


def unread(config: dict[str, Any], made: Any) -> list[str]:
    """Keys that transformers' record only carries along: its class has no field for them. For the report."""
    def strange(given: dict[str, Any], kind: Any, where: str) -> list[str]:
        fields = set(vars(kind())) | set(vars(kind)) | set(kind.attribute_map) | HARMLESS
        known = fields | {"text_config", "auto_map", "rope_scaling", "rope_theta"}
        return [where + k for k, v in given.items() if k not in known and v is not None]
    inner = config.get("text_config")
    found = strange(config, type(made), "")
    return found + (strange(inner, type(made.text_config), "text_config.") if isinstance(inner, dict) else [])
