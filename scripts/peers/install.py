#!/usr/bin/env python3
"""Makes an environment for each peer below .peers, from PyPI: llama (llama-cpp-python, built here for this CPU; needs a compiler), kt (kt-kernel
without its torch pin), hf (transformers). Nothing of it touches the project's own environment.

    python scripts/peers/install.py llama kt hf
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

PLACE = Path(__file__).resolve().parents[2] / ".peers"
BUILD = "-DGGML_NATIVE=ON -DGGML_OPENMP=ON -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_CURL=OFF"
RECIPES: dict[str, list[list[str]]] = {
    "llama": [["scikit-build-core", "cmake", "ninja", "numpy", "typing-extensions", "diskcache", "jinja2"],
              ["--no-binary", "llama-cpp-python", "--no-build-isolation", "--no-deps", "llama-cpp-python==0.3.36"]],
    "kt": [["torch", "numpy", "safetensors", "gguf", "pyyaml", "typer", "rich", "httpx"], ["--no-deps", "kt-kernel==0.7.2"]],
    "hf": [["torch", "transformers>=5.17", "numpy"]],
}


def main() -> None:
    for name in sys.argv[1:] or list(RECIPES):
        folder = PLACE / name
        venv.create(folder, with_pip=True)
        for packages in RECIPES[name]:
            environment = os.environ | {"CMAKE_ARGS": BUILD, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
            subprocess.run(["nice", str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *packages], check=True, env=environment)
        print(f"{name}: {folder}")


if __name__ == "__main__":
    main()
