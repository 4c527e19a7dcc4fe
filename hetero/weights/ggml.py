"""The block types of GGUF files as exact arithmetic: bytes of whole blocks to float32; knows no file.

Layouts: https://github.com/ggml-org/ggml (ggml-common.h). In blocks of 32 the low nibbles are weights 0..15 and the high ones 16..31.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hetero.arch.spec import GatedDeltaNet
from hetero.errors import BadCheckpoint
from hetero.weights.layout import Place
from hetero.weights.minifloats import TWICE
from hetero.weights.reading import Codes, Parts, Reading
from hetero.weights.stored import E8M0, Stored, to_f32

IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def half(b: np.ndarray, at: int) -> np.ndarray:
    """The fp16 at byte `at` of each block, float32 [n, 1]."""
    return np.ascontiguousarray(b[:, at:at + 2]).view(np.float16).astype(np.float32)


def pairs(q: np.ndarray) -> np.ndarray:
    """Bytes [n, 16] to nibbles [n, 32]: all low ones, then all high ones."""
    return np.concatenate([q & 15, q >> 4], 1)


def fifth_bits(b: np.ndarray, at: int) -> np.ndarray:
    """The 32 bits at byte `at`, [n, 32] of 0 or 16."""
    return np.unpackbits(b[:, at:at + 4], axis=1, bitorder="little") << 4


def q4_0(b: np.ndarray) -> np.ndarray:
    return half(b, 0) * (pairs(b[:, 2:]).astype(np.int8) - 8)


def q4_1(b: np.ndarray) -> np.ndarray:
    return half(b, 0) * pairs(b[:, 4:]) + half(b, 2)


def q5_0(b: np.ndarray) -> np.ndarray:
    return half(b, 0) * ((pairs(b[:, 6:]) | fifth_bits(b, 2)).astype(np.int8) - 16)


def q5_1(b: np.ndarray) -> np.ndarray:
    return half(b, 0) * (pairs(b[:, 8:]) | fifth_bits(b, 4)) + half(b, 2)


def q8_0(b: np.ndarray) -> np.ndarray:
    return half(b, 0) * b[:, 2:].view(np.int8)


def mxfp4(b: np.ndarray) -> np.ndarray:
    return E8M0[b[:, :1]] * np.float32(0.5) * TWICE[pairs(b[:, 1:])]


def iq4_nl(b: np.ndarray) -> np.ndarray:
    return half(b, 0) * IQ4[pairs(b[:, 2:])]


def scales_iq4_xs(b: np.ndarray) -> np.ndarray:
    """int8 [n, 8]"""
    high = np.ascontiguousarray(b[:, 2:4]).view(np.uint16)
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], 2).reshape(-1, 8)
    return (low | ((high >> (2 * np.arange(8, dtype=np.uint16))) & 3).astype(np.uint8) << 4).astype(np.int8) - np.int8(32)


def iq4_xs(b: np.ndarray) -> np.ndarray:
    q = pairs(b[:, 8:].reshape(-1, 16)).reshape(-1, 8, 32)
    return ((half(b, 0) * scales_iq4_xs(b))[:, :, None] * IQ4[q]).reshape(-1, 256)


def scales_k4(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight 6-bit scales and eight 6-bit minimums in 12 bytes, uint8 [n, 8] each."""
    first, second, third = b[:, 0:4], b[:, 4:8], b[:, 8:12]
    return (np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], 1),
            np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], 1))


def halves_of_64(q: np.ndarray) -> np.ndarray:
    """Bytes [n, 128] to nibbles [n, 8, 32]: of every 32 bytes the low nibbles, then the high ones."""
    q = q.reshape(-1, 4, 1, 32)
    return np.concatenate([q & 15, q >> 4], 2).reshape(-1, 8, 32)


def q4_k(b: np.ndarray) -> np.ndarray:
    scale, least = scales_k4(b[:, 4:16])
    return ((half(b, 0) * scale)[:, :, None] * halves_of_64(b[:, 16:]) - (half(b, 2) * least)[:, :, None]).reshape(-1, 256)


def q5_k(b: np.ndarray) -> np.ndarray:
    scale, least = scales_k4(b[:, 4:16])
    return ((half(b, 0) * scale)[:, :, None] * codes_q5_k(b) - (half(b, 2) * least)[:, :, None]).reshape(-1, 256)


def q6_k(b: np.ndarray) -> np.ndarray:
    q = codes_q6_k(b).astype(np.int8) - 32
    scale = half(b, 208) * b[:, 192:208].view(np.int8)
    return (scale[:, :, None] * q.reshape(-1, 16, 16)).reshape(-1, 256)


def twos(q: np.ndarray) -> np.ndarray:
    """Bytes [n, 64] to 2-bit codes [n, 16, 16]: of every 32 bytes bits 0-1 first, then 2-3, 4-5, 6-7."""
    return ((q.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)) & 3).reshape(-1, 16, 16)


def q2_k(b: np.ndarray) -> np.ndarray:
    scale, least = half(b, 80) * (b[:, :16] & 15), half(b, 82) * (b[:, :16] >> 4)
    return (scale[:, :, None] * twos(b[:, 16:80]) - least[:, :, None]).reshape(-1, 256)


def scales_q3_k(b: np.ndarray) -> np.ndarray:
    """int8 [n, 16]"""
    packed = b[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], 1)
    high = ((packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)) & 3).reshape(-1, 16)
    return (low | high << 4).astype(np.int8) - np.int8(32)


def codes_q3_k(b: np.ndarray) -> np.ndarray:
    """int8 [n, 16, 16], -4 .. 3"""
    mask = ((b[:, None, :32] >> np.arange(8, dtype=np.uint8).reshape(8, 1)) & 1).reshape(-1, 16, 16)
    return twos(b[:, 32:96]).astype(np.int8) - ((mask ^ 1) << 2).astype(np.int8)


def q3_k(b: np.ndarray) -> np.ndarray:
    return ((half(b, 108) * scales_q3_k(b))[:, :, None] * codes_q3_k(b)).reshape(-1, 256)


Kept = tuple[str, Callable[[np.ndarray, int], Codes]]


def kept(format: str, read: Callable[[np.ndarray], dict[str, np.ndarray]]) -> Kept:
    """(kernel format, blocks of some rows -> Codes) from what `read` finds in blocks: codes, scales and more, a row of numbers per block."""
    def codes(b: np.ndarray, rows: int) -> Codes:
        found = {k: np.ascontiguousarray(v.reshape(rows, -1)) for k, v in read(b).items()}
        return Codes(format, found.pop("codes"), found.pop("scales"), found)

    return format, codes


def super_k(b: np.ndarray, q: np.ndarray) -> dict[str, np.ndarray]:
    scale, least = scales_k4(b[:, 4:16])
    return {"codes": q, "scales": scale, "minimums": least, "supers": half(b, 0), "least": half(b, 2)}


def codes_q5_k(b: np.ndarray) -> np.ndarray:
    return halves_of_64(b[:, 48:]) | ((b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None]) & 1) << 4


def codes_q6_k(b: np.ndarray) -> np.ndarray:
    halves = b[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([halves & 15, halves >> 4], 2).reshape(-1, 8, 32)
    high = (b[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)) & 3
    return low | high.reshape(-1, 8, 32) << 4


@dataclass(frozen=True)
class Block:
    """A block type: ggml's number, weights and bytes per block, bits (scales left out), its floats, a kernel format that keeps it exactly."""

    number: int
    weights: int
    nbytes: int
    bits: int
    floats: Callable[[np.ndarray], np.ndarray]
    kept: Kept | None = None


BLOCKS: dict[str, Block] = {
    "Q4_0": Block(2, 32, 18, 4, q4_0, kept("int4_g32", lambda b: {"codes": pairs(b[:, 2:]).astype(np.int8) - 8, "scales": half(b, 0)})),
    "Q4_1": Block(3, 32, 20, 4, q4_1, kept("q4_1", lambda b: {"codes": pairs(b[:, 4:]), "scales": half(b, 0), "offsets": half(b, 2)})),
    "Q5_0": Block(6, 32, 22, 5, q5_0, kept("q5_0", lambda b: {"codes": pairs(b[:, 6:]) | fifth_bits(b, 2), "scales": half(b, 0)})),
    "Q5_1": Block(7, 32, 24, 5, q5_1, kept("q5_1", lambda b: {
        "codes": pairs(b[:, 8:]) | fifth_bits(b, 4), "scales": half(b, 0), "offsets": half(b, 2)})),
    "Q8_0": Block(8, 32, 34, 8, q8_0, kept("q8_0", lambda b: {"codes": b[:, 2:].view(np.int8), "scales": half(b, 0)})),
    "Q2_K": Block(10, 256, 84, 2, q2_k, kept("q2_k", lambda b: {
        "codes": twos(b[:, 16:80]), "scales": b[:, :16] & 15, "minimums": b[:, :16] >> 4, "supers": half(b, 80), "least": half(b, 82)})),
    "Q3_K": Block(11, 256, 110, 3, q3_k, kept("q3_k", lambda b: {
        "codes": (codes_q3_k(b) + 4).view(np.uint8), "scales": scales_q3_k(b), "supers": half(b, 108)})),
    "Q4_K": Block(12, 256, 144, 4, q4_k, kept("q4_k", lambda b: super_k(b, halves_of_64(b[:, 16:])))),
    "Q5_K": Block(13, 256, 176, 5, q5_k, kept("q5_k", lambda b: super_k(b, codes_q5_k(b)))),
    "Q6_K": Block(14, 256, 210, 6, q6_k, kept("q6_k", lambda b: {
        "codes": codes_q6_k(b), "scales": b[:, 192:208].view(np.int8), "supers": half(b, 208)})),
    "IQ4_NL": Block(20, 32, 18, 4, iq4_nl, kept("iq4_nl", lambda b: {"codes": pairs(b[:, 2:]), "scales": half(b, 0)})),
    "IQ4_XS": Block(23, 256, 136, 4, iq4_xs, kept("iq4_xs", lambda b: {
        "codes": pairs(b[:, 8:].reshape(-1, 16)).reshape(-1, 256), "scales": scales_iq4_xs(b), "supers": half(b, 0)})),
    "MXFP4": Block(39, 32, 17, 4, mxfp4, kept("mxfp4", lambda b: {"codes": pairs(b[:, 1:]), "scales": b[:, :1]})),
}
PLAIN_TYPES = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
BY_NUMBER = {block.number: name for name, block in BLOCKS.items()} | PLAIN_TYPES


def floats_of(raw: np.ndarray, stored: Stored) -> np.ndarray:
    """float32 of a whole tensor's shape, from bytes [rows, bytes of a row] (blocks) or an array (plain types)."""
    if stored.dtype not in BLOCKS:
        return to_f32(raw, stored.dtype)
    block = BLOCKS[stored.dtype]
    return block.floats(np.ascontiguousarray(raw).reshape(-1, block.nbytes)).reshape(stored.shape)


def split_kv(place: Place, shape: tuple[int, ...], _: dict) -> Reading | None:
    """Latent attention's kv_b, stored as k_b [heads, rank, nope] (turned) and v_b [heads, v, rank]: per head nope rows, then v rows."""
    if set(place.parts) != {"k_b", "v_b"}:
        return None
    k, v = place.parts["k_b"].stored, place.parts["v_b"].stored
    if len(k.shape) != 3 or len(v.shape) != 3 or k.shape[1] != shape[1] or (v.shape[0], v.shape[2]) != (k.shape[0], shape[1]) or \
            k.shape[0] * (k.shape[2] + v.shape[1]) != shape[0]:
        raise BadCheckpoint(f"{k.file}: {k.name!r} {list(k.shape)} and {v.name!r} {list(v.shape)} do not make {list(shape)}")

    def dequantize(p: Parts) -> np.ndarray:
        return np.concatenate([floats_of(p["k_b"], k).swapaxes(1, 2), floats_of(p["v_b"], v)], 1).reshape(shape)

    return Reading(f"{k.dtype}+{v.dtype}".lower(), 32, shape, place.parts, dequantize)


def plain_delta(key: str, part: GatedDeltaNet, tiled: bool, data: np.ndarray) -> np.ndarray:
    """A delta net's tensor as its published code has it: the decay's logarithm, and value heads beside their key head. GGUF has the decay itself,
    negative, and when `tiled` the first value head of every key head, then the second of each."""
    if key == "delta.a_log":
        data = np.log(-data)
    if not tiled or key in ("delta.norm", "delta.qkvz", "delta.ba"):
        return data
    axis, each = data.ndim - 1 if key == "delta.o" else 0, part.value_dim if key in ("delta.qkv", "delta.z", "delta.conv", "delta.o") else 1
    before, values = np.split(data, [data.shape[axis] - each * part.value_heads], axis)
    shape = values.shape
    heads = values.reshape(*shape[:axis], part.value_heads // part.key_heads, part.key_heads, each, *shape[axis + 1:])
    return np.concatenate([before, heads.swapaxes(axis, axis + 1).reshape(shape)], axis)


def blocks(place: Place, shape: tuple[int, ...], _: dict) -> Reading | None:
    """A GGUF tensor of whole blocks along its last axis. It arrives as uint8 [rows, bytes of a row]."""
    w = place.parts.get("weight")
    block = None if w is None else BLOCKS.get(w.stored.dtype)
    if w is None or block is None:
        return None
    if w.shape != shape or w.turned:
        raise BadCheckpoint(f"{w.stored.file}: tensor {w.stored.name!r} has the shape {list(w.shape)}, the config says {list(shape)}")

    def split(p: Parts) -> np.ndarray:
        return np.ascontiguousarray(p["weight"]).reshape(-1, block.nbytes)

    name, codes = block.kept or ("", None)
    return Reading(w.stored.dtype.lower(), block.bits, shape, {"weight": w}, lambda p: block.floats(split(p)).reshape(shape),
                   None if codes is None else lambda p: codes(split(p), shape[0]), name)
