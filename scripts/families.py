#!/usr/bin/env python3
"""Prints the table of model families as Markdown, from the code and the installed transformers: how each runs, and the formats of its experts."""

import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cpu_kernels.formats import FORMATS
from hetero.arch.families import FAMILIES, TEXT_PARTS
from hetero.bridge.known import bridgeable


def stems(names: Iterable[str]) -> str:
    """Class names without their tails, each once."""
    found = dict.fromkeys(n.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration") for n in sorted(names, key=str.lower))
    return ", ".join(found)


def rows() -> list[tuple[str, str, str]]:
    """(class names in config.json, how they run, formats of routed experts)."""
    formats = ", ".join(FORMATS)
    bridged = [n for n in bridgeable() if n not in FAMILIES and n not in TEXT_PARTS]
    return [(stems(FAMILIES), "native", formats), (stems(TEXT_PARTS), "native, text part", formats), (stems(bridged), "bridge", formats)]


def main() -> None:
    print("| `architectures` in config.json (without ForCausalLM, ForConditionalGeneration) | runs | formats of routed experts |\n|---|---|---|")
    for names, way, formats in rows():
        print(f"| {names} | {way} | {formats} |")


if __name__ == "__main__":
    main()
