"""The cache of machine code: an edit anywhere in the package is a new folder; a folder that cannot be used costs a compile, nothing else."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cpu_kernels import jit

ROOT = Path(__file__).resolve().parents[2]
USE = """
import sys
from cpu_kernels import jit
compiled = []
jit.watch_compiles(compiled.append)
from cpu_kernels.lanes import I64, const, op
import cpu_kernels.answer as answer
print(answer.ask(1), len(compiled))
"""
ANSWER = """
from .jit import kernel
from .lanes import I64, const, op
answer = op(1, lambda b, a: b.add(a, const(I64, 41)), gives=True)

@kernel
def ask(a: int) -> int:
    return answer(a)
"""

MIX = "        a = (a * 31 + n) ^ (a >> 7)\n" * 80              # too much to be inlined
CLOSURES = f"""
from cpu_kernels.jit import kernel
def maker(n):
    @kernel(key=("helper", n))
    def helper(a: int) -> int:
{MIX}        return a
    @kernel(key=("outer", n))
    def outer(a: int) -> int:
        return helper(a) + 1
    return outer
"""


def ask(package, cache, use=USE, **more):
    made = subprocess.run([sys.executable, "-c", use], cwd=package, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": str(package), "HETERO_CACHE_DIR": str(cache), **more})
    assert made.returncode == 0, made.stderr[-2000:]
    return made.stdout.split()


@pytest.fixture
def package(tmp_path):
    (tmp_path / "cpu_kernels").mkdir()
    for name in ("jit", "lanes"):
        shutil.copy(ROOT / "cpu_kernels" / f"{name}.py", tmp_path / "cpu_kernels")
    (tmp_path / "cpu_kernels" / "__init__.py").write_text("")
    (tmp_path / "cpu_kernels" / "answer.py").write_text(ANSWER)
    return tmp_path


def test_a_second_start_loads_and_an_edited_intrinsic_is_compiled_again(package):
    cache = package / "cache"
    assert ask(package, cache) == ["42", "1"]
    assert ask(package, cache) == ["42", "0"]
    source = package / "cpu_kernels" / "answer.py"
    source.write_text(ANSWER.replace("41", "99"))
    assert ask(package, cache) == ["100", "1"]
    source.write_text(ANSWER)
    assert ask(package, cache) == ["42", "0"]


def test_a_torn_file_is_compiled_again(package):
    cache = package / "cache"
    ask(package, cache)
    for path in (cache / "kernels").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-7])
    assert ask(package, cache) == ["42", "1"]
    assert ask(package, cache) == ["42", "0"]


def test_a_cache_folder_that_cannot_be_made_is_no_error(package):
    blocked = package / "file"
    blocked.write_text("")
    assert ask(package, blocked / "below") == ["42", "1"]
    assert ask(package, "/proc/none") == ["42", "1"]


def test_a_cached_kernel_calls_its_own_helper_beside_another_of_that_name(package):
    """What was packed as bf16 by a first process was packed as float32 by a second that had packed float32 before."""
    (package / "cpu_kernels" / "closures.py").write_text(CLOSURES)
    use = "from cpu_kernels.closures import maker\nprint(*(maker(n)(1) for n in {0}))"
    alone = [*ask(package, package / "cache", use.format((1,))), *ask(package, package / "other", use.format((2,)))]
    assert alone[0] != alone[1]
    assert ask(package, package / "cache", use.format((2, 1))) == alone[::-1]
    assert ask(package, package / "cache", use.format((1, 2))) == alone


@pytest.mark.slow
def test_old_folders_go(package):
    cache = package / "cache"
    for i in range(7):
        (package / "cpu_kernels" / "answer.py").write_text(ANSWER + f"# {i}\n")
        ask(package, cache)
    assert len(list((cache / "kernels").iterdir())) == jit.KEPT_FOLDERS


def test_a_closure_must_say_its_key():
    n = 3
    with pytest.raises(TypeError, match="no key"):
        @jit.kernel
        def f(a: int) -> int:
            return a + n
