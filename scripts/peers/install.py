#!/usr/bin/env python3
"""Makes an environment for each peer below .peers, from PyPI: llama (llama-cpp-python, built here for this CPU; needs a compiler), kt (kt-kernel
without its torch pin), hf (transformers). Nothing of it touches the project's own environment.

    python scripts/peers/install.py llama kt hf
"""

import argparse
import os
import subprocess
import venv
from pathlib import Path

PLACE = Path(__file__).resolve().parents[2] / ".peers"
BUILD = "-DGGML_NATIVE=ON -DGGML_OPENMP=ON -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_CURL=OFF"
TORCH = ["torch>=2.11"]
# a CUDA build is 3 GB that no peer here uses
CPU_INDEX = ["--timeout", "5", "--retries", "0", "--index-url", "https://download.pytorch.org/whl/cpu"]
RECIPES: dict[str, list[list[str]]] = {
    "llama": [["scikit-build-core", "cmake", "ninja", "numpy", "typing-extensions", "diskcache", "jinja2"],
              ["--no-binary", "llama-cpp-python", "--no-build-isolation", "--no-deps", "llama-cpp-python==0.3.36"]],
    "kt": [TORCH, ["numpy", "safetensors", "gguf", "pyyaml", "typer", "rich", "httpx"], ["--no-deps", "kt-kernel==0.7.2"]],
    "hf": [TORCH, ["transformers>=5.17", "numpy"]],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", help=f"of {', '.join(RECIPES)}; default: all")
    names = parser.parse_args().peers or list(RECIPES)
    if unknown := [name for name in names if name not in RECIPES]:
        parser.error(f"unknown peers: {', '.join(unknown)}; known: {', '.join(RECIPES)}")
    for name in names:
        folder = PLACE / name
        if not (folder / "bin" / "python").exists():
            venv.create(folder, with_pip=True, symlinks=True)
        for packages in RECIPES[name]:
            environment = os.environ | {"CMAKE_ARGS": BUILD, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
            install = ["nice", str(folder / "bin" / "python"), "-m", "pip", "install", "-q"]
            if packages is TORCH and subprocess.run([*install, *CPU_INDEX, *packages], stderr=subprocess.DEVNULL).returncode == 0:
                continue
            subprocess.run([*install, *packages], check=True, env=environment)
        print(f"{name}: {folder}")


if __name__ == "__main__":
    main()
