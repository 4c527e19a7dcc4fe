"""Numpy twins of `formats.Coded`: codes and fields to bytes and back, their values in float64, and the nearest codes of floats. Slow and obvious.

Fields are arrays [rows, groups] under the names of the tile's head, as files have them: a group spans the tile's own or any whole number of them
(a super-block's 256 columns, a channel). "overall" is one float32 for the matrix. E8M0 and E4M3 are given as bytes. Knows no kernel.
"""
from collections.abc import Mapping
from typing import Any

import numpy as np

from .formats import COLS, ROWS, Coded, Field, Format, padded

Array = np.ndarray[Any, Any]
Fields = Mapping[str, Array]
LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])      # of E2M1


def _e4m3() -> Array:
    """The 127 finite values of E4M3 that are not negative (OCP 8-bit floating point specification, 2023)."""
    code = np.arange(127)
    e, m = code >> 3, code & 7
    return np.where(e == 0, m * 2.0 ** -9, (8 + m) * 2.0 ** (e - 10.0))


E4M3 = _e4m3()
FP8 = np.concatenate([E4M3, [np.nan], -E4M3, [np.nan]])


def coded(format: Format) -> Coded:
    if format.coded is None:
        raise ValueError(f"format {format.name} has no codes of this kind")
    return format.coded


def per_tile(field: Field) -> int:
    """Columns that share one of a field's numbers."""
    return COLS // field.per_row


def _spread(field: Field, given: Array, rows: int, cols: int) -> Array:
    """[rows, groups] -> [rows, the tile's own groups]; ValueError when the groups do not fit."""
    own = -(-cols // per_tile(field))
    groups = given.shape[1] if given.ndim == 2 else 0
    if groups == own or field.name in ("supers", "least"):
        each = 1 if groups == own else 256 // COLS
    else:                                            # a whole number of groups where it divides, else a power of two
        each = own // groups if groups and own % groups == 0 else 1 << max(0, -(-own // max(groups, 1)) - 1).bit_length()
    if given.shape[0] != rows or -(-own // each) != groups:
        raise ValueError(f"{field.name}: shape {given.shape} for a matrix of {rows} × {cols}, {per_tile(field)} columns to a number")
    return np.repeat(given, each, 1)[:, :own] if each > 1 else given


def check(format: Format, codes: Array, fields: Fields) -> None:
    """ValueError naming what a matrix of this format cannot be."""
    c = coded(format)
    want = np.int8 if c.codes == "byte" and format.partner == "int8" else np.uint8
    if codes.ndim != 2 or codes.dtype != want:
        raise ValueError(f"codes: {codes.dtype} {codes.shape}, expected {np.dtype(want)} of two dimensions")
    if c.codes == "nibble" and codes.size and int(codes.max()) >= 1 << format.bits:
        raise ValueError(f"codes: above {(1 << format.bits) - 1}")
    if format.name == "fp8" and ((codes & 127) == 127).any():
        raise ValueError("codes: NaN")
    if set(fields) != set(c.names):
        raise ValueError(f"fields: {', '.join(sorted(fields)) or 'none'}; {format.name} has {', '.join(c.names)}")
    for f in c.head:
        a = fields[f.name]
        if f.dtype[0] == "f" and not np.isfinite(a).all():
            raise ValueError(f"{f.name}: NaN or infinity")
        if f.dtype[0] in "ui" and a.dtype != np.dtype(f.dtype):
            raise ValueError(f"{f.name}: {a.dtype}, expected {np.dtype(f.dtype)}")
        if f.dtype == "f2" and not np.array_equal(a.astype(np.float16).astype(np.float32), a.astype(np.float32)):
            raise ValueError(f"{f.name}: {format.name} keeps fp16, and these are not exactly that")
    scales = fields["scales"]
    if scales.size and ((format.scale == "e8m0" and int(scales.max()) == 255) or (format.scale == "e4m3" and int(scales.max()) >= 127)):
        raise ValueError("scales: NaN or negative")
    if format.scale == "u6" and scales.size and max(int(scales.max()), int(fields["minimums"].max())) > 63:
        raise ValueError("scales, minimums: above 63")


def stored(format: Format, f: Field, a: Array) -> Array:
    """A field's numbers as the tile has them: the table of four-bit floats is doubled, so their scales are halved."""
    if f.name == "scales" and format.scale == "e8m0":
        return np.maximum(a, 1) - np.uint8(1)
    if f.name == "overall":
        return np.asarray(a, np.float32) / np.float32(2)
    return a.astype(f.dtype)


def heads(format: Format, fields: Fields, rows: int, cols: int) -> Array:
    """uint8 [row blocks, tiles, bytes of a head], zeros beyond the matrix."""
    c = coded(format)
    nb, kb = padded(rows, ROWS) // ROWS, padded(cols, COLS) // COLS
    out = np.zeros((nb, kb, c.lines_at), np.uint8)
    for f in c.head:
        at = c.at(f.name)
        if not f.per_row:
            one = stored(format, f, fields[f.name]).reshape(1).view(np.uint8)
            out[:, :, at:at + f.nbytes] = one
            continue
        full = np.zeros((nb * ROWS, kb * f.per_row), f.dtype)
        part = stored(format, f, _spread(f, fields[f.name], rows, cols))
        full[:rows, :part.shape[1]] = part
        lines = np.ascontiguousarray(full.reshape(nb, ROWS, kb, f.per_row).transpose(0, 2, 3, 1))
        out[:, :, at:at + f.nbytes] = lines.view(np.uint8).reshape(nb, kb, -1)
    return out


def pack(format: Format, codes: Array, fields: Fields) -> Array:
    """Bytes [rows/16, cols/64, tile]."""
    c, (rows, cols) = coded(format), codes.shape
    nb, kb = padded(rows, ROWS) // ROWS, padded(cols, COLS) // COLS
    full = np.zeros((nb * ROWS, kb * COLS), np.uint8)
    full[:rows, :cols] = codes.view(np.uint8)
    if c.codes == "byte":
        lines = full.reshape(nb, ROWS, kb, 16, 4).transpose(0, 2, 3, 1, 4).reshape(nb, kb, -1)
        return np.concatenate([heads(format, fields, rows, cols), lines], 2)
    t = full.reshape(nb, ROWS, kb, 2, 8, 4).transpose(0, 2, 3, 4, 1, 5)          # [half][j][row][kk]
    shifts = (c.low * np.arange(8 // c.low, dtype=np.uint8))[:, None, None, None]
    slots = (t & ((1 << c.low) - 1)).reshape(nb, kb, 8 // c.low, c.lines, ROWS, 4) << shifts
    parts = [heads(format, fields, rows, cols), slots.sum(2, dtype=np.uint8).reshape(nb, kb, -1)]
    if c.planes:
        per = 8 // c.planes
        upper = (t >> c.low).reshape(nb, kb, 2 * c.planes, per, ROWS, 4)
        parts.append((upper << (c.planes * np.arange(per, dtype=np.uint8))[:, None, None]).sum(3, dtype=np.uint8).reshape(nb, kb, -1))
    return np.concatenate(parts, 2)


def unpack(format: Format, data: Array, rows: int, cols: int) -> tuple[Array, dict[str, Array]]:
    """The inverse of `pack`: codes, and fields with a number per group of the tile's own."""
    c = coded(format)
    nb, kb = padded(rows, ROWS) // ROWS, padded(cols, COLS) // COLS
    t = np.ascontiguousarray(data).view(np.uint8).reshape(nb, kb, format.tile_nbytes)
    fields: dict[str, Array] = {}
    for f in c.head:
        raw = np.ascontiguousarray(t[:, :, c.at(f.name):c.at(f.name) + f.nbytes]).view(f.dtype)
        if not f.per_row:
            fields[f.name] = raw.reshape(-1)[:1] * np.float32(2)
            continue
        a = raw.reshape(nb, kb, f.per_row, ROWS).transpose(0, 3, 1, 2).reshape(nb * ROWS, -1)[:rows, :-(-cols // per_tile(f))]
        fields[f.name] = a + (a > 0).astype(np.uint8) if f.name == "scales" and format.scale == "e8m0" else a
    q = t[:, :, c.lines_at:]
    if c.codes == "byte":
        v = q.reshape(nb, kb, 16, ROWS, 4).transpose(0, 3, 1, 2, 4)
    else:
        lines = q[:, :, :64 * c.lines].reshape(nb, kb, c.lines, ROWS, 4)
        t2 = np.stack([(lines >> s) & ((1 << c.low) - 1) for s in range(0, 8, c.low)], 2).reshape(nb, kb, 2, 8, ROWS, 4)     # [half][j][row][kk]
        if c.planes:
            per = 8 // c.planes
            words = q[:, :, 64 * c.lines:].reshape(nb, kb, 2 * c.planes, 1, ROWS, 4)
            upper = (words >> (c.planes * np.arange(per, dtype=np.uint8))[:, None, None]) & ((1 << c.planes) - 1)
            t2 = t2 | (upper.reshape(t2.shape) << c.low)
        v = t2.transpose(0, 4, 1, 2, 3, 5)
    v = v.reshape(nb * ROWS, kb * COLS)[:rows, :cols]
    return (v.view(np.int8) if c.codes == "byte" and format.partner == "int8" else v), fields


def _per_column(f: Field, a: Array, rows: int, cols: int) -> Array:
    return np.repeat(_spread(f, a, rows, cols), per_tile(f), 1)[:, :cols]


def values(format: Format, codes: Array, fields: Fields) -> Array:
    """float64 [rows, cols]: what the codes and fields mean."""
    c, (rows, cols) = coded(format), codes.shape
    head = {f.name: f for f in c.head}

    def of(name: str) -> Array:
        return _per_column(head[name], fields[name], rows, cols)
    s = of("scales")
    if format.scale == "e8m0":
        scale: Array = np.where(s > 1, np.ldexp(1.0, s.astype(np.int32) - 128), 0)
    elif format.scale == "e4m3":
        scale = FP8[s].astype(np.float32) * (np.asarray(fields["overall"], np.float32).reshape(-1)[0] / np.float32(2))
    else:
        scale = s.astype(np.float64) * (of("supers").astype(np.float64) if "supers" in head else 1)
    if format.name == "fp8":
        return FP8[codes] * scale
    q = np.array(c.table, np.float64)[codes] - c.zero if c.table else codes.astype(np.float64)
    if "zeros" in head:
        return scale * (q - of("zeros"))
    if "minimums" in head:
        return scale * q - of("minimums").astype(np.float64) * of("least")
    if "offsets" in head:
        return scale * q + of("offsets").astype(np.float64)
    return scale * (q if c.table else q - c.zero)


# ---- the nearest codes of floats ---------------------------------------------------------------------------------------------------

def _groups(w: Array, size: int) -> Array:
    """[rows, cols] -> [rows, groups, size], zeros beyond."""
    full = np.zeros((w.shape[0], padded(w.shape[1], size)), np.float32)
    full[:, :w.shape[1]] = w
    return full.reshape(w.shape[0], -1, size)


def _flat(q: Array, like: Array) -> Array:
    return np.ascontiguousarray(q.reshape(like.shape[0], -1)[:, :like.shape[1]])


def _over(x: Array, scale: Array) -> Array:
    """x / scale, 0 where the scale is 0."""
    return np.divide(x, scale, out=np.zeros(np.broadcast(x, scale).shape, np.float32), where=scale != 0)


def nearest_e4m3(x: Array) -> Array:
    """Bytes of the nearest E4M3, magnitudes above 448 clamped."""
    code = np.searchsorted((E4M3[1:] + E4M3[:-1]) / 2, np.abs(x)).astype(np.uint8)
    return code | np.where(x < 0, np.uint8(128), np.uint8(0))


def nearest_e2m1(x: Array) -> Array:
    code = np.searchsorted((LEVELS[1:] + LEVELS[:-1]) / 2, np.abs(x)).astype(np.uint8)
    return code | np.where(x < 0, np.uint8(8), np.uint8(0))


def _nearest(c: Coded, x: Array) -> Array:
    """Codes of the table's values nearest to x."""
    table = np.array(c.table, np.float32) - np.float32(c.zero)
    return np.searchsorted((table[1:] + table[:-1]) / 2, x).astype(np.uint8)


def quantize(format: Format, w: Array) -> tuple[Array, dict[str, Array]]:
    """float32 [rows, cols] -> codes and fields near it: scales by the largest magnitude, or by the least and the largest."""
    c = coded(format)
    g = _groups(w, 256 if "supers" in c.names else c.group)
    top = np.abs(g).max(-1)
    if format.name == "mxfp4":
        raw = np.clip(np.floor(np.log2(np.maximum(top, 1e-37))) + 125, 1, 254).astype(np.uint8)
        return _flat(nearest_e2m1(g / np.ldexp(np.float32(1), raw.astype(np.int32) - 127)[..., None]), w), {"scales": raw}
    if format.name == "nvfp4":
        overall = np.array([max(float(top.max(initial=0)), 1e-30) / (448 * 6)], np.float32)
        raw = nearest_e4m3(top / (6 * overall))
        scale = FP8[raw].astype(np.float32) * overall
        return _flat(nearest_e2m1(_over(g, scale[..., None])), w), {"scales": raw, "overall": overall}
    if format.name == "fp8":
        scale = top / np.float32(448)
        return _flat(nearest_e4m3(_over(g, scale[..., None])), w), {"scales": scale}
    if "supers" in c.names:
        return _quantize_super(format, g, w)
    if "zeros" in c.names:
        low, high = np.minimum(g.min(-1), 0), np.maximum(g.max(-1), 0)
        most, bottom = (15, 0) if c.codes == "nibble" else (127, -128)
        scale = (high - low) / np.float32(most - bottom)
        zero = np.clip(np.rint(bottom - _over(low, scale)), bottom, most)
        q = np.clip(np.rint(_over(g, scale[..., None])) + zero[..., None], bottom, most)
        f = next(f for f in c.head if f.name == "zeros")
        return _flat(q, w).astype(np.uint8 if most == 15 else np.int8), {"scales": scale, "zeros": zero.astype(f.dtype)}
    if "offsets" in c.names:
        low = np.clip(g.min(-1), -65504, 65504).astype(np.float16).astype(np.float32)
        scale = ((g.max(-1) - low) / np.float32((1 << format.bits) - 1)).clip(0, 65504).astype(np.float16).astype(np.float32)
        q = np.clip(np.rint(_over(g - low[..., None], scale[..., None])), 0, (1 << format.bits) - 1)
        return _flat(q, w).astype(np.uint8), {"scales": scale, "offsets": low}
    scale = top / np.float32(127 if c.table or c.codes == "byte" else c.zero - 1)
    if format.scale == "f16":
        scale = np.minimum(scale, 65504).astype(np.float16).astype(np.float32)
    if c.table:
        return _flat(_nearest(c, _over(g, scale[..., None])), w), {"scales": scale}
    if c.codes == "nibble":
        return _flat(np.clip(np.rint(_over(g, scale[..., None])) + c.zero, 0, 2 * c.zero - 1), w).astype(np.uint8), {"scales": scale}
    return _flat(np.clip(np.rint(_over(g, scale[..., None])), -127, 127), w).astype(np.int8), {"scales": scale}


def _quantize_super(format: Format, g: Array, w: Array) -> tuple[Array, dict[str, Array]]:
    """Blocks of 256: the groups' scales (and minimums) as whole multiples of the block's fp16."""
    c = coded(format)
    x = g.reshape(len(g), -1, 256 // c.group, c.group)
    if format.scale == "i8":
        scale, most = np.abs(x).max(-1) / np.float32(c.zero if c.table else c.zero - 1), 127
        low = np.zeros_like(scale)
    else:
        low, most = np.minimum(x.min(-1), 0), 63 if format.scale == "u6" else 15
        scale = (np.maximum(x.max(-1), 0) - low) / np.float32((1 << format.bits) - 1)
    half = [np.minimum(v.max(-1) / np.float32(most), 65504).astype(np.float16).astype(np.float32) for v in (scale, -low)]
    s, m = (np.clip(np.rint(_over(v, h[..., None])), 0, most) for v, h in zip((scale, -low), half, strict=True))
    real, least = s * half[0][..., None], m * half[1][..., None]
    add = c.zero if format.scale == "i8" else 0
    q = np.clip(np.rint(_over(x + least[..., None], real[..., None])) + add, 0, (1 << format.bits) - 1).astype(np.uint8)
    if c.table:
        q = _nearest(c, _over(x, real[..., None]))
    f = c.head[0]
    count = -(-w.shape[1] // c.group)
    fields = {"scales": _flat(s, np.empty((len(w), count))).astype(f.dtype), "supers": half[0]}
    if "minimums" in c.names:
        fields |= {"minimums": _flat(m, np.empty((len(w), count))).astype(np.uint8), "least": half[1]}
    return _flat(q, w), fields
