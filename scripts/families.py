#!/usr/bin/env python3
"""Prints the table of model families as Markdown, from the code: how each runs, and the formats its routed experts may be kept in."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cpu_kernels.formats import FORMATS
from hetero.arch.bridged import BRIDGED
from hetero.arch.families import FAMILIES, TEXT_PARTS


def rows() -> list[tuple[str, str, str]]:
    """(class name in config.json, how it runs, formats of routed experts)."""
    formats = ", ".join(FORMATS)
    native = [(name, "native", formats) for name in FAMILIES] + [(name, "native, text part", formats) for name in TEXT_PARTS]
    return sorted(native) + sorted((name, "not yet: for the bridge", "") for name in BRIDGED)


def main() -> None:
    print("| `architectures` in config.json | runs | formats of routed experts |\n|---|---|---|")
    for name, way, formats in rows():
        print(f"| {name} | {way} | {formats} |")


if __name__ == "__main__":
    main()
