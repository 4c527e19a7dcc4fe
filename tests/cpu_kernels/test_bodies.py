"""Bodies for other CPUs than this one: the generic one runs as a CPU of 2008 would see it, the vector ones compile to their instructions.
And no body touches memory that is not its own."""
import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cpu_kernels import FORMATS, ExpertLayer, ExpertStore, cpu, lanes
from cpu_kernels.formats import expert_nbytes
from cpu_kernels.team import Team

ROOT = Path(__file__).resolve().parents[2]

RUN = """
import sys
import numpy as np
from cpu_kernels import Act, ExpertLayer, ExpertStore, Team, cpu, plain
print(cpu.isas())
for name in sys.argv[1:]:
    rng = np.random.default_rng(0)
    store = ExpertStore(name, 3, 72, 40)
    for e in range(3):
        store.put(e, *((rng.standard_normal(s) / 8).astype(np.float32) for s in ((40, 72), (40, 72), (72, 40))))
    x, ids = rng.standard_normal((5, 72)).astype(np.float32), rng.integers(0, 3, (5, 2)).astype(np.int32)
    weights, out = rng.random((5, 2)).astype(np.float32), np.empty((5, 72), np.float32)
    matrices = lambda e: tuple(store.dequantize(e, n) for n in ("gate", "up", "down"))
    with Team(threads=1) as team:
        ExpertLayer(store, Act("gelu_tanh")).run(x, ids, weights, out, team)
    ref = plain.moe(store.form, x, ids, weights, matrices, ("gelu_tanh", 1.0, None, 0.0), rounded=True)
    error = np.linalg.norm(out - ref) / np.linalg.norm(ref)
    assert error < 1e-3, (name, error)
    print(name, error)
"""

COMPILE = """
import sys
import numba
from cpu_kernels import FORMATS, ffn, rows
from cpu_kernels.lanes import op
body = sys.argv[1]
shape = (numba.types.int64,) * 4
for name in FORMATS:
    for streams, tokens in ((4, 1), (1, rows.MANY)):
        run = op(4, rows.emitter(FORMATS[name], body, False, streams, tokens))
        @numba.njit(nogil=True)
        def walk(a, b, c, d):
            run(a, b, c, d)
            return 0
        walk.compile(shape)
        asm = walk.inspect_asm(shape)
        print(name, streams, tokens, asm.count("vpdpbusd"), asm.count("zmm"), asm.count("ymm"), asm.count("vfmadd"))
"""


def python(code, *arguments, **environment):
    made = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=500,
                          env={**os.environ, "PYTHONPATH": str(ROOT), **environment})
    assert made.returncode == 0, made.stderr[-3000:]
    return made.stdout


@pytest.mark.skipif(cpu.isas()[0] != "generic" or not {"sse4.2"} <= cpu.features(), reason="an x86-64-v2 CPU is needed")
def test_a_cpu_without_avx_runs_the_generic_body():
    out = python(RUN, "int4_g32", NUMBA_CPU_NAME="nehalem", NUMBA_CPU_FEATURES="+sse4.2,+ssse3,+popcnt,+cx16")
    assert out.startswith("('generic',)")


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in cpu.isas(), reason="this CPU has no AVX2")
def test_a_haswell_runs_the_avx2_body():
    out = python(RUN, "int4_g32", "int8_g32", NUMBA_CPU_NAME="haswell", HETERO_ISA="avx2",
                 NUMBA_CPU_FEATURES="+avx2,+avx,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt,+movbe,+cx16,+sse4.2,+ssse3")
    assert "'avx2')" in out


@pytest.mark.parametrize("isa", [i for i in lanes.BODIES if i not in ("generic", "avx2")])
def test_vector_bodies_compile_to_their_instructions(isa):
    """Nothing is executed: works on any x86 CPU."""
    name = {"avx_vnni": "alderlake", "avx512_vnni": "sapphirerapids"}[isa]
    features = "+avx2,+avx,+fma,+f16c,+bmi,+bmi2,+popcnt,+sse4.2,+ssse3" + (
        ",+avxvnni" if isa == "avx_vnni" else ",+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd,+avx512vnni,+avx512bf16")
    rows = [line.split() for line in python(COMPILE, isa, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features).splitlines()]
    for format, streams, tokens, dots, zmm, ymm, fmas in rows:
        lines = 16 if FORMATS[format].partner == "int8" else 0
        assert int(dots) >= lines * int(streams) * int(tokens) * (1 if isa == "avx512_vnni" else 2), (format, dots)
        assert (int(zmm) > 0) == (isa == "avx512_vnni") and (int(zmm) or int(ymm)) and (lines or int(fmas) > 0)


def test_an_instruction_set_that_this_cpu_lacks_is_refused():
    lacking = [i for i in cpu.ISAS if i not in cpu.isas()]
    if not lacking:
        pytest.skip("this CPU has them all")
    with pytest.raises(ValueError, match="HETERO_ISA"):
        ExpertLayer(ExpertStore("f32", 1, 16, 16), isa=lacking[-1])


class Fence:
    """Memory whose neighbours on both sides cannot be touched."""

    def __init__(self, nbytes, at_end):
        self.pages = -(-nbytes // mmap.PAGESIZE) + 2
        self.map = mmap.mmap(-1, self.pages * mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for page in (0, self.pages - 1):
            assert protect(ctypes.c_void_p(start + page * mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        skip = mmap.PAGESIZE * (self.pages - 1) - nbytes if at_end else mmap.PAGESIZE
        self.data = np.frombuffer(self.map, np.uint8, nbytes, skip)

    def like(self, a):
        self.data.view(a.dtype)[:] = a.reshape(-1)
        return self.data.view(a.dtype).reshape(a.shape)


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("isa", [i for i in cpu.isas() if lanes.body_of(i) == i])
@pytest.mark.parametrize("format", [f if i < 4 or f in ("mxfp4", "q6_k") else pytest.param(f, marks=pytest.mark.slow) for i, f in enumerate(FORMATS)])
def test_nothing_outside_the_arrays_is_touched(format, isa, at_end):
    rng = np.random.default_rng(0)
    size = 2 * expert_nbytes(format, 72, 40)
    weights_fence = Fence(size, at_end)
    store = ExpertStore(format, 2, 72, 40, buffer=weights_fence.data)
    fenced = [Fence(72 * 40 * 4, at_end) for _ in range(3)]
    for e in range(2):
        store.put(e, *(f.like((rng.standard_normal(s) / 8).astype(np.float32)) for f, s in zip(fenced, ((40, 72), (40, 72), (72, 40)), strict=True)))
    with Team(threads=2) as team:
        for tokens in (1, 5):
            x, ids = rng.standard_normal((tokens, 72)).astype(np.float32), rng.integers(0, 2, (tokens, 2)).astype(np.int32)
            weights = rng.random((tokens, 2)).astype(np.float32)
            fences = [Fence(a.nbytes, at_end) for a in (x, ids, weights, x)]
            plain_out, out = np.empty_like(x), fences[3].like(np.empty_like(x))
            layer = ExpertLayer(store, isa=isa)
            layer.run(fences[0].like(x), fences[1].like(ids), fences[2].like(weights), out, team)
            layer.run(x, ids, weights, plain_out, team)
            assert np.array_equal(out, plain_out)
