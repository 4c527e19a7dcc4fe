"""Every published spelling of rotary scaling: one record, and the numbers of transformers."""

import importlib.util
import json
import math
import pathlib
import warnings

import numpy as np
import pytest
import torch

from hetero.arch import rope
from hetero.arch.fields import Fields
from hetero.arch.spec import Rope, Scaling
from hetero.errors import UnsupportedModel

transformers = pytest.importorskip("transformers")
BASE = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2, "vocab_size": 64, "max_position_embeddings": 4096, "rope_theta": 10000.0}
HEAD = 64
YARN = {"factor": 8.0, "original_max_position_embeddings": 512}
SPELLINGS = {
    "none": {}, "null": {"rope_scaling": None}, "empty": {"rope_scaling": {}}, "theta": {"rope_theta": 1000000}, "default": {"rope_scaling": {"rope_type": "default"}},
    "linear old": {"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "llama3": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}},
    "yarn": {"rope_scaling": {"type": "yarn"} | YARN}, "yarn betas": {"rope_scaling": {"type": "yarn", "beta_fast": 16, "beta_slow": 2} | YARN},
    "yarn null betas": {"rope_scaling": {"rope_type": "yarn", "beta_fast": None, "beta_slow": None} | YARN},
    "yarn truncate": {"rope_scaling": {"rope_type": "yarn", "truncate": False} | YARN},
    "yarn attention": {"rope_scaling": {"rope_type": "yarn", "attention_factor": 0.7} | YARN},
    "yarn mscale": {"rope_scaling": {"type": "yarn", "mscale": 0.707, "mscale_all_dim": 1.0} | YARN},
    "yarn one mscale": {"rope_scaling": {"type": "yarn", "mscale": 0.707} | YARN},
    "yarn no original": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "longrope": {"rope_scaling": {"type": "longrope", "short_factor": [1.0 + i / 32 for i in range(32)], "long_factor": [2.0 + i for i in range(32)],
                                  "original_max_position_embeddings": 512}},
    "longrope factor": {"original_max_position_embeddings": 512, "rope_scaling": {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 32, "long_factor": [3.0] * 32}},
    "longrope attention": {"rope_scaling": {"rope_type": "longrope", "attention_factor": 1.5, "short_factor": [1.0] * 32, "long_factor": [3.0] * 32,
                                            "original_max_position_embeddings": 512}},
    "parameters": {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0}},
    "parameters beside theta": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0} | YARN},
    "both": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    "partial": {"partial_rotary_factor": 0.5}, "partial inside": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}},
    "partial linear": {"partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
}


def theirs(keys, length):
    """transformers' inverse frequencies and cos/sin factor for a sequence of `length`."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.Glm4MoeConfig(**{k: v for k, v in (BASE | {"head_dim": HEAD, "partial_rotary_factor": 1.0} | keys).items() if v is not None})
        kind = config.rope_parameters["rope_type"]
        if kind == "default":
            from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding
            assert LlamaRotaryEmbedding
            freq, size = Glm4MoeRotaryEmbedding.compute_default_rope_parameters(config)
        else:
            freq, size = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    return freq.numpy(), size


@pytest.mark.parametrize("length", [100, 4096, 10000])
@pytest.mark.parametrize("name", sorted(SPELLINGS))
def test_frequencies_and_their_factor_are_those_of_transformers(name, length):
    keys = json.loads(json.dumps(SPELLINGS[name]))
    found = rope.read(Fields(BASE | keys), HEAD)
    freq, size = rope.frequencies(found, length)
    want, factor = theirs(json.loads(json.dumps(keys)), length)
    assert freq.dtype == np.float32 and freq.shape == want.shape
    np.testing.assert_allclose(freq, want, rtol=2e-6)
    assert size == pytest.approx(factor, rel=1e-9)


def test_a_fixed_alpha_stretches_the_base_whatever_the_length():
    found = rope.read(Fields(BASE | {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0, "beta_fast": 32}}), 128)
    base = 10000.0 * 1000.0 ** (128 / 126)
    for length in (0, 100, 100000):
        np.testing.assert_allclose(rope.frequencies(found, length)[0], base ** (-np.arange(0, 128, 2) / 128), rtol=1e-6)


def test_su_is_longrope_and_published_mscales_replace_the_computed_ones():
    keys = {"rope_scaling": {"type": "su", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "short_mscale": 1.1, "long_mscale": 1.2},
            "original_max_position_embeddings": 512}
    found = rope.read(Fields(BASE | keys), HEAD)
    assert rope.frequencies(found, 512)[1] == 1.1 and rope.frequencies(found, 513)[1] == 1.2
    np.testing.assert_allclose(rope.frequencies(found, 512)[0], 2 * rope.frequencies(found, 513)[0], rtol=1e-6)


def test_a_context_says_whether_it_turns_short_texts_otherwise():
    keys = {"rope_scaling": {"type": "su", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}, "original_max_position_embeddings": 512}
    longrope, plain = rope.read(Fields(BASE | keys), HEAD), rope.read(Fields(BASE), HEAD)
    assert not rope.stretched([longrope, plain, None], 512) and rope.stretched([plain, longrope], 513) and not rope.stretched([plain, None], 10 ** 6)
    dynamic = rope.read(Fields(BASE | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}), HEAD)
    assert not rope.stretched([dynamic], 4096) and rope.stretched([dynamic], 8192)


def test_rope_parameters_per_layer_type_are_chosen_by_layer_type():
    keys = {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e6} | YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                                "none_attention": None}}
    f = Fields(BASE | keys)
    assert rope.read(f, HEAD).scaling.kind == "yarn" and rope.read(f, HEAD, kind="full_attention").theta == 1e6
    assert rope.read(f, HEAD, kind="sliding_attention") == Rope(HEAD, 1e4, context=4096)
    assert rope.read(f, HEAD, kind="none_attention") is None
    with pytest.raises(UnsupportedModel, match="rope_parameters"):
        rope.read(f, HEAD, kind="chunked_attention")


def test_sections_of_multimodal_positions_change_nothing_for_text():
    keys = {"rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}}
    assert rope.read(Fields(BASE | keys), HEAD) == rope.read(Fields(BASE | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 8, 8]}}), HEAD)


def test_deepseeks_softmax_grows_with_the_square_of_mscale_all_dim():
    found = rope.read(Fields(BASE | {"rope_scaling": {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "factor": 40, "original_max_position_embeddings": 4096}}), 64)
    assert rope.softmax_growth(found) == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    assert rope.frequencies(found)[1] == 1.0
    assert rope.softmax_growth(Rope(64, 1e4)) == 1.0


@pytest.mark.parametrize(("keys", "words"), [
    ({"rope_scaling": {"type": "ntk-by-magic", "factor": 2.0}}, ["rope_scaling.rope_type = 'ntk-by-magic'", "linear", "longrope"]),
    ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor"]),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["factor", "above 0"]),
    ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, ["factor = '2'"]),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "secret": 3}}, ["rope_scaling.secret"]),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 32}}, ["short_factor", "32 numbers"]),
    ({"rope_scaling": [1]}, ["rope_scaling", "a dictionary"]),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 3.0}}, ["the same as rope_parameters"]),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}}, ["high_freq_factor"]),
    ({"rope_theta": 0.5}, ["theta 0.5"]), ({"partial_rotary_factor": 1.5}, ["96 of 64"]),
])
def test_what_is_not_understood_is_refused_by_key_and_value(keys, words):
    with pytest.raises(UnsupportedModel) as e:
        rope.read(Fields(BASE | keys), HEAD)
    assert all(word in str(e.value) for word in words), str(e.value)


def test_an_unscaled_rope_of_the_spec_needs_no_length():
    freq, size = rope.frequencies(Rope(8, 100.0))
    np.testing.assert_allclose(freq, [1.0, 100 ** -0.25, 0.1, 100 ** -0.75], rtol=1e-6)
    assert size == 1.0
    assert rope.frequencies(Rope(8, 100.0, scaling=Scaling("linear", (("factor", 2.0),))))[0][0] == 0.5


def test_every_checkpoint_written_from_facts_has_finite_frequencies():
    from hetero.arch import families
    spec = importlib.util.spec_from_file_location("checkpoints", pathlib.Path(__file__).resolve().parents[1] / "configs" / "checkpoints.py")
    facts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(facts)
    for name, (config, *_) in facts.CHECKPOINTS.items():
        freq, size = rope.frequencies(families.read(config).layers[-1].attention.rope, 8192)
        assert np.isfinite(freq).all() and (freq > 0).all() and (np.diff(freq) < 0).all() and 0.5 < size < 2, name
