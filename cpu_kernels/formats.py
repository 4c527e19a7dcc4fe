"""The table of weight formats: name, tile, bytes, activation partner. Knows nothing of how a tile is packed or multiplied (`rows/`, `pack`).

Every matrix [rows, cols] is stored as tiles of 16 rows × 64 columns, [rows/16][cols/64] of them, each contiguous and a multiple of
32 B; a matrix is padded to whole tiles in the layout (zeros), so that nobody above pads. A record begins at a multiple of 64 B.
"""
from dataclasses import dataclass
from typing import NamedTuple

ROWS, COLS, GROUP = 16, 64, 32
ORDERED = ":ordered"                                 # behind the name of a format: each expert has an order of its inputs


def padded(n: int, to: int) -> int:
    """`n` rounded up to a multiple of `to`."""
    return -(-n // to) * to


class Field(NamedTuple):
    """A field of a tile's head: `per_row` numbers per row, [per_row][16 rows] of `dtype` (numpy's name), or one for the whole tile (per_row 0)."""
    name: str
    dtype: str
    per_row: int

    @property
    def nbytes(self) -> int:
        return int(self.dtype[1]) * (ROWS * self.per_row or 1)


@dataclass(frozen=True)
class Coded:
    """A tile of codes: the head's fields one after another, padded to 32 B; lines of codes; lines with the codes' upper bits.

    codes: "nibble", 8 lines of 64 B, byte n·4 + kk of line j holds q[n, 4j + kk] in its low and q[n, 32 + 4j + kk] in its high nibble;
    "byte", 16 lines, byte n·4 + kk of line i is q[n, 4i + kk]. `planes`: upper bits that nibbles lack, as 32-bit words of rows: bit
    8·kk + planes·(j % (8/planes)) + i of word n of line (half · planes + j // (8/planes)) is upper bit i of q[n, 32·half + 4j + kk].
    `low`: bits of a code in the lines; 2 make 4 lines: bits 2s, 2s + 1 of byte n·4 + kk of line j are of q[n, 16s + 4j + kk], and upper bits begin
    at bit 2. weight = (table[q] − zero) · scale, less a minimum where the head has "minimums" or "zeros" (scale · zero), or q · scale + offset
    where it has "offsets". `group`: columns per scale.
    """
    codes: str
    head: tuple[Field, ...]
    group: int = GROUP
    zero: int = 0
    planes: int = 0
    table: tuple[int, ...] = ()
    low: int = 4

    @property
    def lines_at(self) -> int:
        return padded(sum(f.nbytes for f in self.head), 32)

    @property
    def planes_at(self) -> int:
        return self.lines_at + 64 * self.lines

    @property
    def lines(self) -> int:
        return 2 * self.low if self.codes == "nibble" else 16

    @property
    def nbytes(self) -> int:
        return self.planes_at + 128 * self.planes

    def at(self, name: str) -> int:
        """Where a field of the head begins."""
        names = [f.name for f in self.head]
        return sum(f.nbytes for f in self.head[:names.index(name)])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.head)

    @property
    def shifts(self) -> bool:
        """True when a group's weights have something added to them: a minimum, or a zero point of its own."""
        return bool({"minimums", "zeros", "offsets"} & set(self.names))


@dataclass(frozen=True)
class Format:
    """How weights are kept. `scale` is the type of one scale per row and group ("" for none); `partner` is what the
    activation becomes before it is multiplied: "f32", or "int8" codes with one float32 scale per 32. `bits`: of a code."""
    name: str
    code: int
    tile_nbytes: int
    partner: str
    scale: str
    bits: int
    coded: Coded | None = None

    def nbytes(self, rows: int, cols: int) -> int:
        """Bytes of a packed [rows, cols] matrix, padding included."""
        return padded(rows, ROWS) // ROWS * (padded(cols, COLS) // COLS) * self.tile_nbytes

    @property
    def bits_per_weight(self) -> float:
        """Scales included, padding not."""
        return self.tile_nbytes * 8 / (ROWS * COLS)


E2M1 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)        # twice the four-bit float, plus 12
IQ4 = (0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240)     # ggml's sixteen values, plus 127

SUPER = (Field("scales", "u1", 2), Field("minimums", "u1", 2), Field("supers", "f2", 1), Field("least", "f2", 1))


def _row(name: str, code: int, scale: str, bits: int, coded: Coded, partner: str = "int8") -> Format:
    return Format(name, code, coded.nbytes, partner, scale, bits, coded)


FORMATS: dict[str, Format] = {f.name: f for f in (
    Format("f32", 0, 4096, "f32", "", 32),          # the oracle: float32 from end to end
    Format("bf16", 1, 2048, "f32", "", 16),         # bf16 weights × float32 activations, float32 sums
    Format("int8_g32", 2, 1088, "int8", "bf16", 8),
    Format("int4_g32", 3, 576, "int8", "f16", 4),
    Format("f16", 4, 2048, "f32", "", 16),
    # four-bit floats: E8M0 − 1 (the table is doubled) per 32; E4M3 per 16 and a float32, half the tensor's, per tile
    _row("mxfp4", 5, "e8m0", 4, Coded("nibble", (Field("scales", "u1", 2),), 32, 12, 0, E2M1)),
    _row("nvfp4", 6, "e4m3", 4, Coded("nibble", (Field("scales", "u1", 4), Field("overall", "f4", 0)), 16, 12, 0, E2M1)),
    # integers with float32 scales and zero points per 64 or 32: GPTQ, AWQ, compressed-tensors with any scale type and group
    _row("int4_g64z", 7, "f32", 4, Coded("nibble", (Field("scales", "f4", 1), Field("zeros", "u1", 1)), 64, 8)),
    _row("int4_g32z", 8, "f32", 4, Coded("nibble", (Field("scales", "f4", 2), Field("zeros", "u1", 2)), 32, 8)),
    _row("q8_0", 9, "f16", 8, Coded("byte", (Field("scales", "f2", 2),))),
    _row("int8_g64", 10, "f32", 8, Coded("byte", (Field("scales", "f4", 1),), 64)),
    _row("int8_g64z", 11, "f32", 8, Coded("byte", (Field("scales", "f4", 1), Field("zeros", "i1", 1)), 64)),
    _row("fp8", 12, "f32", 8, Coded("byte", (Field("scales", "f4", 1),), 64), "f32"),      # E4M3: blocks of 128 × 128, channels, tensors
    # super-blocks of 256: six-bit (q6_k: int8) scales and minimums times fp16 `supers` and `least`
    _row("q4_k", 13, "u6", 4, Coded("nibble", SUPER, 32, 8)),
    _row("q5_k", 14, "u6", 5, Coded("nibble", SUPER, 32, 16, 1)),
    _row("q6_k", 15, "i8", 6, Coded("nibble", (Field("scales", "i1", 4), Field("supers", "f2", 1)), 16, 32, 2)),
    _row("q3_k", 16, "i8", 3, Coded("nibble", (Field("scales", "i1", 4), Field("supers", "f2", 1)), 16, 4, 1, low=2)),
    _row("q4_1", 17, "f16", 4, Coded("nibble", (Field("scales", "f2", 2), Field("offsets", "f2", 2)), 32, 8)),
    _row("q5_1", 18, "f16", 5, Coded("nibble", (Field("scales", "f2", 2), Field("offsets", "f2", 2)), 32, 16, 1)),
    _row("q5_0", 22, "f16", 5, Coded("nibble", (Field("scales", "f2", 2),), 32, 16, 1)),
    _row("iq4_nl", 19, "f16", 4, Coded("nibble", (Field("scales", "f2", 2),), 32, 127, 0, IQ4)),
    _row("q2_k", 21, "u4", 2, Coded("nibble", (Field("scales", "u1", 4), Field("minimums", "u1", 4), *SUPER[2:]), 16, 2, low=2)),
    _row("iq4_xs", 20, "i8", 4, Coded("nibble", (Field("scales", "i1", 2), Field("supers", "f2", 1)), 32, 127, 0, IQ4)),
)}


def format_of(name: "str | Format") -> Format:
    """The row of the table named `name`; ValueError names the rows there are."""
    if isinstance(name, Format):
        return name
    if name not in FORMATS:
        raise ValueError(f"format {name!r} is not known; known formats: {', '.join(FORMATS)}")
    return FORMATS[name]


def formats_of(form: "str | Format") -> tuple[Format, Format]:
    """(format of gate and up, format of down) of an expert: one name for both, or two joined by "+" ("q4_k+q6_k"), perhaps ORDERED."""
    if isinstance(form, Format):
        return form, form
    first, _, down = form.removesuffix(ORDERED).partition("+")
    return format_of(first), format_of(down or first)


def expert_nbytes(form: "str | Format", hidden: int, inter: int, gated: bool = True) -> int:
    """Bytes of one expert's record gate | up | down (up | down when it is not gated), and where ORDERED the order of inputs, int32 [hidden]. gate
    and up have their rows padded to 64, because they are the columns of down."""
    return padded(order_at(form, hidden, inter, gated) + 4 * hidden * is_ordered(form), 64)


def order_at(form: "str | Format", hidden: int, inter: int, gated: bool) -> int:
    """Where a record's order of inputs begins."""
    first, down = formats_of(form)
    return (1 + gated) * first.nbytes(padded(inter, COLS), hidden) + down.nbytes(hidden, inter)


def is_ordered(form: "str | Format") -> bool:
    return isinstance(form, str) and form.endswith(ORDERED)
