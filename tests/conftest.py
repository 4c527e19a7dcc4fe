"""Fixtures shared by the floors: tiny random models, made once per session."""

import importlib.util
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent


def load(name, path):
    """A test-side module by path: tests are no package."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def make():
    """tests/tiny/make.py as a module."""
    return load("tiny_make", HERE / "tiny" / "make.py")


@pytest.fixture(scope="session")
def tiny(make, tmp_path_factory):
    """tiny(family, dtype=float32) -> folder of a tiny random checkpoint, made once."""
    made = {}

    def get(family, dtype="float32"):
        import torch
        if (family, dtype) not in made:
            made[family, dtype] = make.save(family, tmp_path_factory.mktemp(f"{family}-{dtype}"), getattr(torch, dtype))
        return made[family, dtype]
    return get


@pytest.fixture(scope="session")
def oracle():
    """tests/arch/oracle.py as a module: the plain decoder that every fast path is measured against."""
    return load("arch_oracle", HERE / "arch" / "oracle.py")
