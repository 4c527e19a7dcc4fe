"""The few calls of the CUDA driver that torch does not offer, through ctypes: registered memory, stream memory operations, host functions, copies.

Knows no tensor. Nothing is loaded before the first call. Source of the signatures: CUDA Driver API reference, 13.0.
"""

import ctypes
import functools
from collections.abc import Callable

from hetero.errors import UnusableHardware

PORTABLE, MAPPED = 1, 2                  # CU_MEMHOSTREGISTER_*
EQUAL = 1                                # CU_STREAM_WAIT_VALUE_EQ
_U32, _U64, _P, _N = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t
_SIGNATURES = {
    "cuMemHostRegister_v2": (_P, _N, ctypes.c_uint), "cuMemHostUnregister": (_P,),
    "cuMemHostGetDevicePointer_v2": (ctypes.POINTER(_U64), _P, ctypes.c_uint),
    "cuMemcpyHtoDAsync_v2": (_U64, _P, _N, _P),
    "cuStreamWaitValue32_v2": (_P, _U64, _U32, ctypes.c_uint), "cuLaunchHostFunc": (_P, _P, _P),
}


@functools.cache
def _functions() -> dict[str, Callable[..., int]]:
    library = ctypes.CDLL("libcuda.so.1")
    found: dict[str, Callable[..., int]] = {}
    for name, arguments in _SIGNATURES.items():
        function = library[name]
        function.argtypes = arguments
        found[name] = function
    return found


def call(name: str, *arguments: object) -> None:
    """One driver call; UnusableHardware with its error number when it fails."""
    code = _functions()[name](*arguments)
    if code:
        raise UnusableHardware(f"{name}: CUDA driver error {code}", "see the CUDA Driver API's table of errors")


def register(address: int, nbytes: int) -> None:
    """Pins existing memory and maps it into the GPU, at the same address on both sides. Raises UnusableHardware."""
    call("cuMemHostRegister_v2", address, nbytes, PORTABLE | MAPPED)
    seen = _U64()
    call("cuMemHostGetDevicePointer_v2", ctypes.byref(seen), address, 0)
    if seen.value != address:
        raise UnusableHardware("registered memory has another address on the GPU", "this driver has no unified addressing for registered memory")


def unregister(address: int) -> None:
    call("cuMemHostUnregister", address)


def copy_in(target: int, source: int, nbytes: int, stream: int, piece_bytes: int = 64 << 20) -> None:
    """Host to device on a stream, in pieces; source registered or pinned, so that nothing waits."""
    for at in range(0, nbytes, piece_bytes):
        call("cuMemcpyHtoDAsync_v2", target + at, source + at, min(piece_bytes, nbytes - at), stream)


def wait_flag(stream: int, address: int, value: int = 1) -> None:
    call("cuStreamWaitValue32_v2", stream, address, value, EQUAL)


def host_function(stream: int, function: int, data: int) -> None:
    """Calls the C function at address `function` with `data` on a thread of the driver, in stream order."""
    call("cuLaunchHostFunc", stream, function, data)
