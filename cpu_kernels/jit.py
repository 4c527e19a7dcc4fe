"""`@kernel`: this package's njit options and its on-disk cache of machine code. Knows no format, no thread and no instruction set.

Numba's own cache cannot see an edit to the module that defines an intrinsic, nor tell apart closures of one function. Ours lives in a
folder named by a hash of every source of the package and of the compiler's versions; a closure says its `key`. Its symbols carry the key too: Numba
tells closures of one function apart by a counter that starts anew in each process, and the linker takes the first symbol of a name that it meets, so
a kernel from the cache would call another process's helper, or be called in its place.
"""
import functools
import hashlib
import os
import pathlib
import pickle
import platform
import shutil
import tempfile
from collections.abc import Callable, Hashable
from typing import Any

import llvmlite
import numba
from numba.core.caching import CompileResultCacheImpl, NullCache

KEPT_FOLDERS = 4

Watch = Callable[[str], None]
_watchers: list[Watch] = []


def watch_compiles(watch: Watch) -> None:
    """`watch(name)` is called each time a kernel had to be compiled (not loaded): for a progress line at a cold start."""
    _watchers.append(watch)


@functools.cache
def sources_key() -> str:
    """Hash of the package's sources and of everything else that decides what machine code they become."""
    root = pathlib.Path(__file__).parent
    h = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {platform.python_version()} {platform.machine()}".encode())
    for path in sorted(root.rglob("*.py")):
        h.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return h.hexdigest()[:20]


@functools.cache
def cache_folder() -> pathlib.Path | None:
    """Where compiled kernels are kept, or None when no such folder can be written (then every start compiles)."""
    given = os.environ.get("HETERO_CACHE_DIR")
    base = pathlib.Path(given) if given else pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "hetero"
    try:
        kernels = base.expanduser() / "kernels"
        folder = kernels / sources_key()
        if not folder.is_dir():
            folder.mkdir(parents=True)
            old = sorted((p for p in kernels.iterdir() if p.is_dir() and p != folder), key=lambda p: p.stat().st_mtime, reverse=True)
            for path in old[KEPT_FOLDERS - 1:]:
                shutil.rmtree(path, ignore_errors=True)
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.R_OK) else None


class _Cache(NullCache):
    """One file per kernel and signature: sha256 of the payload, then the payload. A torn or foreign file is as good as none."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _path(self, sig: Any, codegen: Any) -> pathlib.Path | None:
        folder = cache_folder()
        key = hashlib.sha256(repr((self.name, sig, codegen.magic_tuple())).encode()).hexdigest()[:32]
        return folder / key if folder else None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        path = self._path(sig, target_context.codegen())
        try:
            data = path.read_bytes() if path else b""
        except OSError:
            return None
        if len(data) <= 32 or hashlib.sha256(data[32:]).digest() != data[:32]:
            return None
        return CompileResultCacheImpl.rebuild(None, target_context, pickle.loads(data[32:]))

    def save_overload(self, sig: Any, cres: Any) -> None:
        for watch in _watchers:
            watch(self.name)
        path = self._path(sig, cres.codegen)
        if path is None or not CompileResultCacheImpl.check_cachable(None, cres):
            return
        data = numba.core.serialize.dumps(CompileResultCacheImpl.reduce(None, cres))
        try:
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as f:
                f.write(hashlib.sha256(data).digest() + data)
            pathlib.Path(f.name).replace(path)
        except OSError:
            return                                        # a full or read-only disk costs the next start a compile, nothing else


def kernel(function: Any = None, *, key: Hashable = None, inline: bool = False, inner: bool = False) -> Any:
    """njit without the GIL, bounds checks and Python's division errors, cached on disk.

    `inner`: called from other kernels or by address only; compiles in half the time, and Python cannot call it.
    A function that closes over anything must say a `key` (of plain values) that determines what it closes over: TypeError otherwise.
    """
    if function is None:
        return functools.partial(kernel, key=key, inline=inline, inner=inner)
    if function.__closure__ and key is None:
        raise TypeError(f"kernel {function.__qualname__} is a closure and has no key")
    name = f"{function.__module__}.{function.__qualname__}:{key!r}"
    if key is not None:
        function.__qualname__ += f"[{hashlib.sha256(repr(key).encode()).hexdigest()[:12]}]"
    made = numba.njit(nogil=True, boundscheck=False, error_model="numpy", inline="always" if inline else "never",
                      no_cpython_wrapper=inner, no_cfunc_wrapper=inner)(function)
    template = made.get_call_template
    made.get_call_template = lambda args, kws: template(tuple(numba.types.unliteral(a) for a in args), kws)   # not one compile per literal
    if function.__module__.startswith(f"{__package__}."):                # the hash covers no other package's sources
        made._cache = _Cache(name)
    return made


def address(made: Any, arguments: int) -> int:
    """Machine code of a kernel of that many int64 arguments that returns an int64: what `lanes.invoke` calls. Compiles or loads it."""
    shape = (numba.types.int64,) * arguments
    made.compile(shape)
    compiled = made.overloads[shape]
    if numba.types.unliteral(compiled.signature.return_type) != numba.types.int64:
        raise TypeError(f"kernel {made.__name__} returns {compiled.signature.return_type}, not an int64")
    code = compiled._asdict()["library"]
    return int(code.get_pointer_to_function(compiled.fndesc.llvm_func_name))
