"""Options: sizes, precedence, sources, configs by name, and errors that name the nearest known option."""

import argparse
import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, strategies

from hetero import options
from hetero.errors import BadOption

NOWHERE: dict[str, str] = {}


def test_sizes_are_powers_of_1024():
    assert options.size("8G") == 8 << 30
    assert options.size("7.5GiB") == 7.5 * (1 << 30)
    assert options.size("512m") == 512 << 20
    assert options.size("123") == 123
    assert options.size("auto") is None
    assert options.cache_size("off") == 0
    assert options.count("32k") == 32768
    assert options.core_list("0-2,8") == (0, 1, 2, 8)


def test_defaults_come_without_any_source():
    found = options.resolve({}, NOWHERE)
    assert found.expert_format == "auto" and found.threads is None and found.packed_cache and found.max_batch == 8
    assert {source for _, _, source in found.rows()} == {"default"}
    assert found.cache_dir.name == "hetero"


def test_flag_beats_environment_beats_file_beats_measurement_beats_default(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text('ctx = "4k"\nmax-batch = 3\nvram = "6G"\nthreads = 2\n')
    found = options.resolve({"config": str(file), "ctx": "1k"}, {"HETERO_CTX": "2k", "HETERO_MAX_BATCH": "5"}, {"threads": 7, "chunk": 512})
    assert (found.ctx, found.source("ctx")) == (1024, "flag")
    assert (found.max_batch, found.source("max_batch")) == (5, "environment HETERO_MAX_BATCH")
    assert (found.vram, found.source("vram")) == (6 << 30, str(file))
    assert (found.threads, found.source("threads")) == (2, str(file))
    assert (found.chunk, found.source("chunk")) == (512, "remembered")
    assert found.source("seed") == "default"


def test_the_environment_may_name_the_config():
    assert options.resolve({}, {"HETERO_CONFIG": "8gb"}).kv_dtype == "fp8"


def test_every_installed_config_holds_only_known_options():
    assert set(options.config_names()) >= {"cpu", "8gb", "12gb", "24gb", "server", "batch"}
    for name in options.config_names():
        found = options.resolve({"config": name}, NOWHERE)
        assert sum(source.endswith(f"{name}.toml") for _, _, source in found.rows()) >= 2


@pytest.mark.parametrize(("flags", "environ", "message", "hint"), [
    ({"max_batsh": "3"}, {}, "unknown option 'max_batsh'", "nearest: max_batch"),
    ({"vram": "8Q"}, {}, "--vram: vram = '8Q' cannot be meant", "a size like 8G"),
    ({"ctx": "-5"}, {}, "--ctx: ctx = '-5' cannot be meant", "a whole number above 0"),
    ({"device": "gpu"}, {}, "device = 'gpu'", "cuda"),
    ({"kv_dtype": "fp9"}, {}, "kv_dtype = 'fp9'", "misspelt fp8?"),
    ({"threads": True}, {}, "threads = True", "threads"),
    ({"config": "9gb"}, {}, "no installed config '9gb'", "nearest: 8gb"),
    ({"config": "/no/such.toml"}, {}, "no file /no/such.toml", "installed names"),
    ({}, {"HETERO_CONTEXT": "3"}, "environment HETERO_CONTEXT: unknown option 'context'", "HETERO_"),
    ({}, {"HETERO_RAM": "lots"}, "environment HETERO_RAM: ram = 'lots'", "a size"),
])
def test_what_cannot_be_meant_is_an_error_naming_place_and_remedy(flags, environ, message, hint):
    with pytest.raises(BadOption) as e:
        options.resolve(flags, environ)
    assert message in e.value.message and hint in e.value.hint


def test_an_unknown_key_of_a_file_names_the_file_and_the_nearest_key(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("max_bach = 3\n")
    with pytest.raises(BadOption, match=r"a\.toml: unknown option 'max_bach'") as e:
        options.resolve({"config": str(file)}, NOWHERE)
    assert e.value.hint == "nearest: max_batch"
    file.write_text("max_batch = [\n")
    with pytest.raises(BadOption, match=r"a\.toml: not TOML"):
        options.resolve({"config": str(file)}, NOWHERE)


def test_python_arguments_take_numbers_paths_and_booleans():
    found = options.resolve({"vram": 8 << 30, "cores": [0, 1], "deterministic": True, "cache_dir": Path("/x"), "packed_cache": False, "expert_cache": "off",
                             "max_stall_ms": 50, "seed": -3}, NOWHERE, given_as="argument")
    assert (found.vram, found.cores, found.deterministic, found.cache_dir) == (8 << 30, (0, 1), True, Path("/x"))
    assert (found.packed_cache, found.expert_cache, found.max_stall_ms, found.seed) == (False, 0, 50.0, -3)
    assert found.source("vram") == "argument"


def test_flags_are_made_from_the_same_table():
    parser = argparse.ArgumentParser()
    options.add_flags(parser)
    found = options.from_flags(parser.parse_args(["--max-batch", "2", "--no-overlap", "--packed-cache", "off", "--deterministic", "--expert-cache", "2G"]), NOWHERE)
    assert (found.max_batch, found.overlap, found.packed_cache, found.deterministic, found.expert_cache) == (2, False, False, True, 2 << 30)
    assert found.source("overlap") == "flag" and found.source("ctx") == "default"
    assert all("--" + name.replace("_", "-") in parser.format_help() for name in options.TABLE)


def test_hub_offline_is_honoured_and_kernel_variables_are_left_alone():
    found = options.resolve({}, {"HF_HUB_OFFLINE": "1", "HETERO_ISA": "avx2"})
    assert found.offline and found.source("offline") == "environment HF_HUB_OFFLINE"


def test_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.resolve({}, NOWHERE).ctx = 3
    assert options.resolve({}, NOWHERE).with_values("planned", ctx=7).source("ctx") == "planned"


@given(strategies.sampled_from(sorted(options.TABLE)), strategies.text(max_size=12))
def test_any_text_is_a_value_or_a_bad_option(name, text):
    if name == "config":
        return
    try:
        value = options.read(name, text, "flag")
    except BadOption as e:
        assert name in e.message and e.hint
        return
    if name not in ("cache_dir", "seed"):
        again = options.read(name, options.written(value) if value is not None else None, "flag")
        assert again == value
