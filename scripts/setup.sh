# Makes .venv with what hetero needs; sourced by quickstart and test. Safe to run twice: what is there is kept.
# PYTHON=… picks the interpreter, VENV=… the folder.

say() { printf '%s\n' "$*" >&2; }

find_python() {
    local p
    for p in ${PYTHON:-} python3.13 python3.12 python3.11 python3; do
        if command -v "$p" >/dev/null && "$p" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$p"
            return
        fi
    done
    say "hetero needs Python 3.11 or newer, and none was found."
    say ""
    say "hint: install one (for example: apt install python3.11 python3.11-venv) or set PYTHON=/path/to/python3.11"
    exit 1
}

has_nvidia_gpu() { [ -e /proc/driver/nvidia/version ] || { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }; }

# A CUDA build of torch is 3 GB of downloads that a machine without an NVIDIA GPU can never use.
install_torch() {
    if "$VENV/bin/python" -c 'import torch' 2>/dev/null; then return; fi
    if has_nvidia_gpu; then
        say "An NVIDIA GPU is here: installing torch with CUDA."
        "$VENV/bin/pip" install -q "torch>=2.11"
        return
    fi
    say "No NVIDIA GPU: installing the CPU build of torch."
    if "$VENV/bin/pip" install -q --timeout 5 --retries 0 --index-url https://download.pytorch.org/whl/cpu "torch>=2.11" 2>/dev/null; then return; fi
    # PyTorch's own index cannot be reached: take what pip finds elsewhere, if that is a CPU build.
    local found
    found=$("$VENV/bin/pip" install -q --dry-run --no-deps --report - "torch==2.13.0" 2>/dev/null |
        "$VENV/bin/python" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["download_info"]["url"])' 2>/dev/null || true)
    case "$(uname -m):$found" in
    *:*cpu* | aarch64:?*) "$VENV/bin/pip" install -q "torch==2.13.0" ;;
    *)
        say "The CPU build of torch could not be fetched from https://download.pytorch.org/whl/cpu."
        say ""
        say "hint: check the network, or install a torch >= 2.11 of your choice into $VENV and run this again"
        exit 1
        ;;
    esac
}

# prepare EXTRAS: a venv with hetero installed from this folder, editable
prepare() {
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    VENV=${VENV:-.venv}
    if [ ! -x "$VENV/bin/pip" ]; then
        local python
        python=$(find_python)
        say "Making $VENV with $python"
        "$python" -m venv "$VENV"
    fi
    install_torch
    local stamp="$VENV/.hetero$1" sum
    sum=$(cksum <pyproject.toml)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$sum" ]; then
        say "Installing hetero$1"
        "$VENV/bin/pip" install -q -e ".$1"
        printf '%s' "$sum" >"$stamp"
    fi
}
