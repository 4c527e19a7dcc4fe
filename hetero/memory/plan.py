"""The plan: where every byte will live and what speed follows, before anything is loaded; a pure function of spec, machine and options.

Bytes of packed matrices come from the kernels' own table of formats; everything else is counted here, item by item, so that what was measured
after loading can stand beside what was planned.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from cpu_kernels import formats
from cpu_kernels.formats import FORMATS, ORDERED, formats_of
from hetero.arch import tensors
from hetero.arch.rope import short_context
from hetero.arch.spec import GQA, MLA, Dense, Foreign, GatedDeltaNet, Model, MoE
from hetero.errors import BadOption, UnusableHardware
from hetero.memory import kv as kept
from hetero.memory.cost import Machine, Term, decode_terms, prefill_terms
from hetero.options import Options, written

MiB, GiB = 1 << 20, 1 << 30
RING_SLOTS, SLOT_BYTES = 3, 128 * MiB           # prefill's ring of expert groups
CACHE_FLOOR = 3                                 # below this many times top-k slots per layer, an expert cache costs more than it brings
HEADROOM_BYTES = 512 * MiB                      # what an expert cache that nobody sized leaves to prefill and to the allocator's gaps
PROCESS_BYTES = 700 * MiB                       # interpreter, torch, kernels' code


@dataclass(frozen=True)
class Piece:
    """Weights of one kind in one layer (None: not in a layer) on one device."""

    layer: int | None
    kind: str                                   # attention | mlp | shared | router | experts | norms | embed | head | other
    device: str                                 # cpu | cuda:0
    format: str
    nbytes: int
    parameters: int


@dataclass(frozen=True)
class Plan:
    """What will live where. All sizes in bytes. `vram` and `ram` list their items by name; `changes` are what to do when it does not fit."""

    family: str
    pieces: tuple[Piece, ...]
    device: str
    expert_formats: tuple[str, ...]             # one per routed layer, in layer order
    dense_format: str
    kv_dtype: str
    ctx: int
    kv: tuple[kept.Group, ...]                  # by what layers see, those that see furthest first
    max_batch: int
    chunk: int
    cache_slots: int                            # GPU slots for hot experts, per routed layer
    cache_note: str
    vram: Mapping[str, int]
    ram: Mapping[str, int]
    vram_limit_bytes: int
    ram_limit_bytes: int
    pinned_bytes: int
    peak_load_ram_bytes: int
    total_params: int
    active_params: int
    active_params_with_embedding: int
    decode: tuple[Term, ...]
    prefill: tuple[Term, ...]
    prefill_by: str                             # streamed | cpu: where experts of a full chunk are computed
    assumed: tuple[str, ...] = ()               # numbers of the machine that were not measured
    changes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def kv_tokens(self) -> int:
        """In the pool of the layers that see furthest, all sequences together."""
        return self.kv[0].tokens

    @property
    def kv_bytes_per_token(self) -> int:
        """In those layers."""
        return self.kv[0].token_nbytes

    @property
    def vram_bytes(self) -> int:
        return sum(self.vram.values())

    @property
    def ram_bytes(self) -> int:
        return sum(self.ram.values())

    @property
    def vram_short_bytes(self) -> int:
        return max(0, self.vram_bytes - self.vram_limit_bytes)

    @property
    def ram_short_bytes(self) -> int:
        return max(0, max(self.ram_bytes, self.peak_load_ram_bytes) - self.ram_limit_bytes)

    @property
    def fits(self) -> bool:
        return not self.vram_short_bytes and not self.ram_short_bytes

    @property
    def decode_tok_s(self) -> float:
        return 1.0 / sum(t.seconds for t in self.decode)

    @property
    def prefill_tok_s(self) -> float:
        return self.chunk / sum(t.seconds for t in self.prefill)

    @property
    def shortfall(self) -> str:
        """One line naming what is missing; empty when it fits."""
        both = (("GPU memory", self.vram_short_bytes, self.vram_limit_bytes), ("system memory", self.ram_short_bytes, self.ram_limit_bytes))
        parts = [f"{size(short)} more {what} than the {size(limit)} there are" for what, short, limit in both if short]
        return "needs " + " and ".join(parts) if parts else ""


def size(nbytes: float) -> str:
    """Bytes for people: 17.3 GiB, 340 MiB, 12 KiB."""
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes:.0f} B"


def expert_format(wanted: str, arriving: str) -> str:
    """Of routed experts, or two (see `formats_of`). `auto`: as they arrive where kernels read that, else int8_g32 (5 to 8 bits), int4_g32."""
    if wanted != "auto":
        if not set(wanted.split("+")) <= set(FORMATS):
            raise BadOption(f"expert_format = {wanted!r} is no format of the kernels", f"known: {', '.join(FORMATS)}")
        return wanted
    return "+".join(dict.fromkeys(_kept_as(part) for part in arriving.removesuffix(ORDERED).split("+"))) + ORDERED * arriving.endswith(ORDERED)


def _kept_as(arriving: str) -> str:
    if arriving in FORMATS and FORMATS[arriving].bits < 16:
        return arriving
    bits = max((int(n) for n in re.findall(r"(?:int|fp|f|q)(\d+)", arriving)), default=16)
    return "int8_g32" if 4 < bits <= 8 else "int4_g32"


def plan(model: Model, machine: Machine, options: Options, arriving: str | Sequence[str] = "bf16", dense_arrives: str = "bf16") -> Plan:
    """Where everything of `model` goes on `machine` under `options`; what the user pinned is kept and the rest planned around it.

    arriving: the format in which the checkpoint brings routed experts, one for all or one per routed layer. Never raises because
    something does not fit: `fits`, `shortfall` and `changes` say so. Raises BadOption and UnusableHardware for what cannot be meant.
    """
    found = _lay_out(model, machine, options, arriving, dense_arrives)
    return found if found.fits else replace(found, changes=_changes(found, model, machine, options, arriving, dense_arrives))


def imagined(machine: Machine, options: Options) -> Machine:
    """The machine with the memory, and a usual GPU, that the options speak of and it lacks: for planning a purchase, never for loading."""
    if options.ram and options.ram > machine.ram_bytes:
        machine = replace(machine, ram_bytes=options.ram, assumed=(*machine.assumed, "ram_bytes"))
    if options.vram and 0 < machine.vram_bytes < options.vram:
        machine = replace(machine, vram_bytes=options.vram, assumed=(*machine.assumed, "vram_bytes"))
    if machine.vram_bytes or not (options.vram or options.device.startswith("cuda")):
        return machine
    return replace(machine, gpu="imagined GPU", vram_bytes=options.vram or 8 * GiB, vram_bytes_s=360e9, gpu_flops=60e12, pcie_bytes_s=25e9,
                   assumed=(*machine.assumed, "gpu"))


def _device(machine: Machine, options: Options) -> str:
    if options.device == "auto":
        return "cuda:0" if machine.vram_bytes else "cpu"
    if options.device.startswith("cuda") and not machine.vram_bytes:
        raise UnusableHardware(f"device = {options.device!r}, and there is no usable GPU", "hetero doctor says why; --device cpu runs without one")
    return options.device if options.device != "cuda" else "cuda:0"


def _dense_format(options: Options, device: str, vram: int, arrives: str) -> str:
    """16 bits stay 16 bits, except on cards where decode is bound by these bytes."""
    if options.dense_format != "auto":
        if options.dense_format not in FORMATS:
            raise BadOption(f"dense_format = {options.dense_format!r} is no format of the kernels", f"known: {', '.join(FORMATS)}")
        return options.dense_format
    if device != "cpu":
        return "int8_g32" if vram < 30 * GiB else "bf16"
    return "f32" if arrives in ("f32", "float32") else "bf16"


def dense_nbytes(key: str, shape: tuple[int, ...], device: str, form: str) -> tuple[str, int]:
    """(format, bytes) of one dense tensor: matrices in `form`, vectors and the router in f32, the embedding table in 16 bits."""
    if len(shape) != 2 or key in ("router", "shared_gate"):
        return "f32", 4 * prod(shape)
    if key == "embed":
        return ("f32", 4 * prod(shape)) if form == "f32" else ("bf16", 2 * prod(shape))
    return form, prod(shape) * FORMATS[form].bits // 8 if device != "cpu" and form in ("bf16", "f32") else FORMATS[form].nbytes(*shape)


KINDS = {"attn": "attention", "delta": "attention", "router": "router", "mlp": "mlp", "shared": "shared", "shared_gate": "shared",
         "embed": "embed", "head": "head", "other": "other"}


def _pieces(model: Model, device: str, dense: str, experts: Sequence[str]) -> list[Piece]:
    """Weights by layer and kind. A tied head is a copy of its own: the table is read by rows, the head by the kernels' tiles."""
    sums: dict[tuple[int | None, str, str, str], list[int]] = {}

    def add(layer: int | None, kind: str, where: str, form: str, nbytes: int, parameters: int) -> None:
        entry = sums.setdefault((layer, kind, where, form), [0, 0])
        entry[0] += nbytes
        entry[1] += parameters

    for l, key, shape in tensors.dense(model):
        form, nbytes = dense_nbytes(key, shape, device, dense)
        if model.foreign and device == "cpu" and key == "embed":         # as transformers keeps it
            form, nbytes = "f32", 4 * prod(shape)
        add(l, KINDS.get(key.split(".")[0], "norms"), device, form, nbytes, prod(shape))
    routed = iter(experts)
    for l in model.moe_layers:
        moe, form = model.layers[l].ffn, next(routed)
        assert isinstance(moe, MoE)
        E, each = moe.router.experts, sum(prod(shape) for _, shape in tensors.expert_shapes(model, moe))
        add(l, "experts", "cpu", form, E * expert_nbytes(model, moe, form), E * each)
    if model.tied:
        add(None, "head", device, *dense_nbytes("head", (model.vocab, model.hidden), device, dense), 0)
    return [Piece(l, kind, where, form, nbytes, parameters) for (l, kind, where, form), (nbytes, parameters) in sums.items()]


def expert_nbytes(model: Model, moe: MoE, form: str) -> int:
    """Bytes of one routed expert: its packed record, and biases in f32."""
    hidden = moe.hidden or model.hidden
    return formats.expert_nbytes(form, hidden, moe.width, moe.gated) + 4 * moe.bias * ((1 + moe.gated) * moe.width + hidden)


def scratch_nbytes(model: Model, chunk: int, batch: int, width: int = 2) -> int:
    """Activations of a chunk, and logits of a batch twice in float32. The widest layer counts, for layers share their scratch."""
    wide = 0
    for layer in model.layers:
        a, f = layer.attention, layer.ffn
        if isinstance(a, Foreign):
            qkv = sum(shape[0] for _, shape in a.tensors if len(shape) == 2)
        elif isinstance(a, GatedDeltaNet):
            qkv = 3 * a.channels + 2 * a.values
        else:
            qkv = (a.heads + 2 * a.kv_heads) * a.head_dim if isinstance(a, GQA) else a.heads * (2 * (a.nope_dim + a.rope.dim) + a.v_dim)
        ffn = 3 * f.width if isinstance(f, Dense) else f.router.top_k * (2 * f.width + model.hidden) + 3 * f.shared
        wide = max(wide, qkv, ffn)
    return chunk * (8 * model.hidden + wide) * width + 2 * batch * model.vocab * 4


def unpacked_nbytes(model: Model, ctx: int, dense: str) -> int:
    """What a prompt on the GPU unpacks for torch's own kernels, one layer at a time, in 16 bits: its largest matrix, and the gathered KV twice
    (which they cannot use under a window or with sinks)."""
    matrix = max((prod(shape) for l, key, shape in tensors.dense(model) if l is not None and len(shape) == 2), default=0)
    kv = max((kept.layer_nbytes(a, "bfloat16") for layer in model.layers if not isinstance(a := layer.attention, GQA) or not (a.window or a.sinks)),
             default=0)
    return (0 if dense in ("f32", "bf16") else 4 * matrix) + 2 * ctx * kv


def _lay_out(model: Model, machine: Machine, options: Options, arriving: str | Sequence[str], dense_arrives: str) -> Plan:
    model = model.first(options.layers)
    device = _device(machine, options)
    on_gpu = device != "cpu"
    vram = min(options.vram or machine.vram_bytes, machine.vram_bytes) if on_gpu else 0
    ram = min(options.ram or machine.ram_bytes, machine.ram_bytes)
    dense = _dense_format(options, device, vram, dense_arrives)
    per_layer = [arriving] * len(model.moe_layers) if isinstance(arriving, str) else list(arriving)
    forms = tuple(expert_format(options.expert_format, a) for a in per_layer)
    kv_dtype = options.kv_dtype if options.kv_dtype != "auto" else "bfloat16"
    pieces = _pieces(model, device, dense, forms)
    arena = sum(p.nbytes for p in pieces if p.kind == "experts")
    weights = sum(p.nbytes for p in pieces if p.kind != "experts")
    batch = options.max_batch
    record = max(records := [expert_nbytes(model, f, form) for f, form in zip(_moes(model), forms, strict=True)], default=0)
    ring = RING_SLOTS * min(max(SLOT_BYTES, record), max((f.router.experts for f in _moes(model)), default=0) * record) * (not model.foreign)
    limit, own = (vram, weights + ring + machine.context_bytes) if on_gpu else (ram, weights + arena + PROCESS_BYTES)
    chunk = options.chunk or _chunk(model, batch, limit - own, on_gpu)
    scratch = scratch_nbytes(model, chunk, batch, 2 if on_gpu else 4)
    states = (2 * batch + 1) * kept.state_nbytes(model)       # of running sequences, as many to go on from, and one for rows that pad a step
    ctx, pools = _kv(model, options, kv_dtype, chunk, limit - own - scratch - states)
    scratch += unpacked_nbytes(model, ctx, dense) if on_gpu else 0
    kv = sum(group.nbytes for group in pools)
    slots, cache, note = _cache(model, options, sum(records), limit - own - scratch - states - kv - HEADROOM_BYTES if on_gpu else 0, on_gpu)
    item = {"attention, shared experts, head": weights, "KV cache": kv, "states": states, "scratch": scratch}
    on_card = item | {"prefill ring": ring, "expert cache": cache, "CUDA context": machine.context_bytes} if on_gpu else {}
    in_ram = {"experts": arena} | ({} if on_gpu else item) | {"KV of evicted pages": options.kv_ram or 0, "staging": (64 * MiB if on_gpu else 0),
                                                             "process": PROCESS_BYTES}
    total, active = tensors.parameters(model)
    embed = 0 if model.tied else model.vocab * model.hidden
    cost = (model, machine, pieces, on_gpu, slots)
    prefill_by, prefill = prefill_terms(*cost, chunk)
    return Plan(model.family, tuple(pieces), device, forms, dense, kv_dtype, ctx, pools, batch, chunk, slots, note,
                _filled(on_card), _filled(in_ram), vram, ram, (arena + 64 * MiB + (options.kv_ram or 0)) if on_gpu else 0,
                sum(in_ram.values()) + _load_extra(model, machine.cores), total, active, active + embed, decode_terms(*cost), prefill, prefill_by,
                machine.assumed)


def _filled(items: Mapping[str, int]) -> dict[str, int]:
    return {name: nbytes for name, nbytes in items.items() if nbytes}


def _moes(model: Model) -> list[MoE]:
    return [f for l in model.moe_layers if isinstance(f := model.layers[l].ffn, MoE)]


def _load_extra(model: Model, cores: int) -> int:
    """What loading holds beyond the final state: one matrix of one expert per packing thread (as it came, and in float32), and one dense tensor."""
    matrix = max((f.width * (f.hidden or model.hidden) for f in _moes(model)), default=0)
    return cores * matrix * (2 + 4) + min(model.vocab * model.hidden * 2, 256 * MiB)


def _chunk(model: Model, batch: int, free: int, on_gpu: bool) -> int:
    """The largest chunk whose scratch takes a sixth of what is free: prefill is proportional to it until compute passes the copy."""
    chunk = 8192 if on_gpu else 512
    while chunk > 128 and scratch_nbytes(model, chunk, batch, 2 if on_gpu else 4) * 6 > free:
        chunk //= 2
    return chunk


def _kv(model: Model, options: Options, dtype: str, chunk: int, free: int) -> tuple[int, tuple[kept.Group, ...]]:
    """(ctx, pools of pages). A pinned ctx is kept whatever it costs; else the pools take half of what is free."""
    short = short_context(a.rope for layer in model.layers if isinstance(a := layer.attention, (GQA, MLA)))
    ctx = options.ctx or short or model.context or 4096      # a longer one turns short texts otherwise than trained: only when asked for

    def pools(ctx: int) -> tuple[kept.Group, ...]:
        return kept.pools(model, dtype, ctx, options.max_batch, chunk, free // 2)
    while options.ctx is None and ctx > 2048 and sum(group.nbytes for group in pools(ctx)) > free // 2:
        ctx = max(2048, ctx // 2)
    return ctx, pools(ctx)


def _cache(model: Model, options: Options, slot: int, spare: int, on_gpu: bool) -> tuple[int, int, str]:
    """(slots per routed layer, bytes, why none). A pinned size is kept, else the spare taken. `slot`: bytes of one in every layer."""
    if not on_gpu or not model.moe_layers:
        return 0, 0, "no GPU"
    if options.expert_cache == 0:
        return 0, 0, "off"
    moes = _moes(model)
    most = max(f.router.experts for f in moes)
    if len({f.router.experts for f in moes}) > 1:
        return 0, 0, "layers have different numbers of experts"
    wanted = max(0, spare) if options.expert_cache is None else options.expert_cache
    slots = min(most, wanted // slot)
    floor = CACHE_FLOOR * max(f.router.top_k for f in moes)
    if slots < min(floor, most):
        least = size(min(floor, most) * slot)
        asked = f"{size(wanted)} of spare GPU memory" if options.expert_cache is None else f"expert_cache = {written(options.expert_cache)}"
        return 0, 0, f"{asked} is below {CACHE_FLOOR} x top-k slots per layer ({least})"
    return slots, slots * slot, ""


def _changes(found: Plan, model: Model, machine: Machine, options: Options, arriving: str | Sequence[str], dense_arrives: str) -> tuple[str, ...]:
    """Three concrete changes, each tried: those that make it fit first, then the ones that save most. Ends with the memory that would do."""
    tries: list[tuple[str, Options]] = []

    def attempt(flag: str, **values: Any) -> None:
        tries.append((flag, options.with_values("tried", **values)))
    if any(f.bits > 4 for form in found.expert_formats for f in formats_of(form)):
        attempt("--expert-format int4_g32", expert_format="int4_g32")
    if found.dense_format in ("f32", "bf16"):
        attempt("--dense-format int8_g32", dense_format="int8_g32")
    if found.kv_dtype != "fp8":
        attempt("--kv-dtype fp8", kv_dtype="fp8")
    for ctx in (found.ctx // 2, found.ctx // 8):
        if ctx >= 1024:
            attempt(f"--ctx {ctx}", ctx=ctx)
    if found.max_batch > 1:
        attempt("--max-batch 1", max_batch=1)
    if options.expert_cache:
        attempt("--expert-cache off", expert_cache=0)
    if options.kv_ram:
        attempt("--kv-ram off", kv_ram=0)
    if found.chunk > 512:
        attempt("--chunk 512", chunk=512)
    if options.vram and options.vram < machine.vram_bytes and found.vram_short_bytes:
        attempt(f"--vram {machine.vram_bytes // MiB}M", vram=machine.vram_bytes)
    if options.ram and options.ram < machine.ram_bytes and found.ram_short_bytes:
        attempt(f"--ram {machine.ram_bytes // MiB}M", ram=machine.ram_bytes)
    scored = []
    for flag, values in tries:
        new = _lay_out(model, machine, values, arriving, dense_arrives)
        saved = (found.vram_short_bytes - new.vram_short_bytes) + (found.ram_short_bytes - new.ram_short_bytes)
        if saved > 0:
            scored.append((new.fits, saved, f"{flag}: " + ("then it fits" if new.fits else f"saves {size(saved)}")))
    short = found.vram_short_bytes + found.ram_short_bytes
    lines = [line for fits, saved, line in sorted(scored, key=lambda s: (-s[0], -s[1])) if fits or saved * 20 > short][:3]
    if found.ram_short_bytes:
        lines.append(f"a machine with {size(max(found.ram_bytes, found.peak_load_ram_bytes))} of free system memory")
    if found.vram_short_bytes:
        lines += [f"a GPU with {size(found.vram_bytes)}", "--device cpu: attention on the CPU too, in system memory"]
    return (*lines, "a smaller model: hetero plan --suggest lists what fits here",
            *(["fewer other programs: system memory is counted as it is free now"] if len(lines) < 2 else []))
