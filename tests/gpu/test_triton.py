"""Runs the Triton kernels with no GPU: against their twins in Triton's interpreter, and compiled for every generation of cards that is served."""

import dataclasses
import inspect
import os
import pathlib
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="there is no triton for this platform")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cpu_kernels import FORMATS
from hetero.arch import spec
from hetero.gpu import attention, experts, few, launch, linear, mailbox, norm, rope, router
from hetero.gpu.ops import KV, LatentKV, Step

HERE = pathlib.Path(__file__).parent
CARDS = (75, 80, 86, 89, 90, 120)
SHARED_BYTES = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}   # per block: CUDA programming guide, table of compute capabilities


def interpreted(*arguments):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "triton_cases.py"), *arguments], env=environment,
                          cwd=HERE.parents[1], capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_every_kernel_equals_its_twin_in_the_interpreter():
    interpreted("-m", "not slow")


@pytest.mark.slow
def test_every_kernel_equals_its_twin_in_the_interpreter_on_many_shapes():
    interpreted("-m", "slow")


@pytest.fixture
def launches(monkeypatch):
    """Kernel launches are recorded instead of made."""
    seen = []
    monkeypatch.setattr(triton.runtime.JITFunction, "run", lambda self, *args, grid, warmup, **more: seen.append((self, args, more)))
    return seen


def typed(value):
    if isinstance(value, torch.Tensor):
        return "*" + {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
                      torch.int16: "i16", torch.int8: "i8"}[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 1 << 31 else "i64"


def compiled(launch, card):
    """The recorded launch compiled for sm_`card`, as the launcher would, pointers taken as 16-byte aligned."""
    kernel, args, more = launch
    options = {"enable_fp_fusion": True} | {k: more.pop(k) for k in ("num_warps", "num_stages", "launch_pdl") if k in (more := dict(more))}
    bound = inspect.signature(kernel.fn).bind(*args, **more).arguments
    fixed = {p.name for p in kernel.params if p.is_constexpr}
    signature = {n: "constexpr" if n in fixed else typed(v) for n, v in bound.items()}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(signature) if signature[n].startswith("*")}
    source = ASTSource(kernel, signature, {n: v for n, v in bound.items() if n in fixed}, attrs)
    return triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)


def launch_all(dtype, kv_dtype, card):
    """Calls every wrapper once on small CPU tensors of the kinds that are served."""
    def z(*shape, dtype=dtype):
        return torch.zeros(*shape, dtype=dtype)

    i32, i64, f32 = torch.int32, torch.int64, torch.float32
    fp8 = kv_dtype == torch.float8_e4m3fn
    norm.norm(z(1, 2048), z(2048, dtype=f32), 1e-6)
    norm.add_norm(z(1, 2880), z(1, 2880), z(2880, dtype=f32), 1e-6, z(2880, dtype=f32), center=True)
    router.route(spec.Router(128, 8, "softmax", True), z(1, 128, dtype=f32), None)
    router.route(spec.Router(256, 8, "sigmoid", True, groups=8, top_groups=4, group_score="top2", correction=True), z(1, 256, dtype=f32), z(256, dtype=f32))
    router.route(spec.Router(32, 4, "topk_softmax", False), z(1, 32, dtype=f32), None)
    norm.add(z(2, 2048), z(2, 2048), gate=z(2, 1))
    linear.glu(spec.Act("silu", 1.702, 7.0, 1.0), z(2, 768))
    for T in (1, 4, 32, 64, 512):
        linear.gemm(z(T, 2048), z(5120, 2048, dtype=torch.int8), z(5120, 16, dtype=f32), None, dtype)
    linear.gemm(z(4, 2048), z(2048, 2048, dtype=torch.int8), z(2048, 16, dtype=f32), z(2048), f32)
    linear.expand(z(5120, 2048, dtype=torch.int8), z(5120, 16, dtype=f32), dtype)
    linear.gemv(z(1, 2048), z(5120, 2048, dtype=torch.int8), z(5120, 16, dtype=f32), None, dtype)
    linear.gemv(z(1, 2048), z(2048, 2048), None, z(2048), dtype)
    linear.gemv(z(4, 2048), z(128, 2048, dtype=f32), None, None, f32)
    chosen, to = (z(4, 8, dtype=i32), z(4, 8, dtype=f32)), (z(4, 2048), z(4, 8, dtype=i32), z(4, 8, dtype=f32))
    slots = mailbox.Slots(z(128, dtype=i32), z(4, 8, dtype=i32), *chosen[:1], z(4, 8, dtype=i32), chosen[1])
    for choice in (chosen, mailbox.Choice(spec.Router(128, 8, "softmax", True), z(4, 128, dtype=f32), None)):
        for kept in (None, slots):
            mailbox.post(z(4, 2048), choice, z(1, dtype=i32), to, z(1, dtype=i32), 1 << 40, kept)
    awaited = mailbox.Awaited(z(4, 2048, dtype=f32), 1 << 40, 1 << 40, 1000, torch.device("cpu"), dtype)
    awaited.take()
    for answer in (awaited, dataclasses.replace(awaited, hits=z(4, 2048, dtype=f32)).plus(z(4, 2048), z(4, 1))):
        answer.add_norm(z(4, 2048), z(2048, dtype=f32), 1e-6, None, 1.0)
    mailbox.end(1 << 40, to[1])
    for format, tokens in (("int4_g32", 4), ("int4_g32", 512), ("int8_g32", 4), ("bf16", 4), ("f32", 4), ("int4_g32:ordered", 4),
                           *((f, 4) for f in FORMATS if FORMATS[f].code > 3)):
        shape = experts.Shape(format, 8, 2048, 768, True, spec.Act())
        grouped = experts.group(torch.zeros(tokens, 8, dtype=i32), z(tokens, 8, dtype=f32), 8)
        product = experts.Product(shape, z(tokens, 2048), grouped)
        product.run(torch.zeros(1, dtype=torch.uint8), 0, 8)
        product.out()
        few.few(shape, z(4, 2048), chosen[0], chosen[0], chosen[1], torch.zeros(1, dtype=torch.uint8))
    for longest, splits in ((1, 8), (64, 1)):
        step = Step(z(64, dtype=i64), z(64, dtype=i32), z(2, dtype=i32), z(1, dtype=i32), z(1, 9, dtype=i32), z(64, dtype=i64), z(1, dtype=i32), z(1, dtype=i64), longest)
        for heads, kv_heads, dim, kind in ((32, 4, 128, "head"), (64, 8, 64, "none"), (16, 2, 256, "full")):
            part = spec.GQA(heads, kv_heads, dim, spec.Rope(dim, 1e4), kind, window=128 if dim == 64 else None, sinks=dim == 64)
            kv = KV(z(4, kv_heads, 16, dim, dtype=kv_dtype), z(4, kv_heads, 16, dim, dtype=kv_dtype), *([z(4, kv_heads, 16, dtype=f32)] * 2 if fp8 else []))
            w = z(heads * dim, dtype=f32)
            q = rope.place(part, 1e-6, z(64, (heads + 2 * kv_heads) * dim), kv, step, z(9, dim // 2, dtype=f32), z(9, dim // 2, dtype=f32), w, w)
            attention.attend(q, kv, step, 0.1, part.window, w if part.sinks else None, splits)
            if SHARED_BYTES[card] >= 161 << 10:
                attention.attend(q, kv, step, 0.1, part.window, w if part.sinks else None, splits, True)
        latent = LatentKV(z(4, 16, 576, dtype=kv_dtype), z(4, 16, dtype=f32) if fp8 else None)
        rope.place_latent(z(64, 128, 192), z(64, 576), latent, step, z(9, 32, dtype=f32), z(9, 32, dtype=f32), z(512, dtype=f32), 1e-6, 128, True)
        attention.attend_latent(z(64, 128, 576), latent, step, 512, 0.1, splits)


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS)
def test_every_kernel_compiles_for_every_card(card, launches, monkeypatch):
    dtype = torch.float16 if card < 80 else torch.bfloat16
    if card >= 90:
        monkeypatch.setattr(launch, "early", lambda x: {"EARLY": x.shape[0] <= launch.FEW, "launch_pdl": x.shape[0] <= launch.FEW})
        for module in (attention, few, linear, mailbox, norm, rope, router):
            monkeypatch.setattr(module, "early", launch.early)
    for kv_dtype in (dtype, torch.float8_e4m3fn):
        launch_all(dtype, kv_dtype, card)
    done = set()
    for made in launches:
        key = repr([made[0].fn.__name__, [typed(v) if isinstance(v, torch.Tensor) else v for v in made[1]], sorted(made[2].items())])
        if key in done or (card == 75 and made[0].fn.__name__ == "_attend_latent"):      # refused there: more shared memory than it has
            continue
        done.add(key)
        kernel = compiled(made, card)
        assert kernel.asm["cubin"], made[0].__name__
        assert kernel.metadata.shared <= SHARED_BYTES[card], (made[0].__name__, kernel.metadata.shared)
