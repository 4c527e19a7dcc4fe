"""The table of weight formats: name, tile, bytes, activation partner. Knows nothing of how a tile is packed or multiplied (`rows/`, `pack`).

Every matrix [rows, cols] is stored as tiles of 16 rows × 64 columns, [rows/16][cols/64] of them, each contiguous and a multiple of
64 B; a matrix is padded to whole tiles in the layout (zeros), so that nobody above pads.
"""
from dataclasses import dataclass

ROWS, COLS, GROUP = 16, 64, 32


def padded(n: int, to: int) -> int:
    """`n` rounded up to a multiple of `to`."""
    return -(-n // to) * to


@dataclass(frozen=True)
class Format:
    """How weights are kept. `scale` is the dtype of one scale per row and 32 columns ("" for none); `partner` is what the
    activation becomes before it is multiplied: "f32", or "int8" codes with one float32 scale per 32."""
    name: str
    code: int
    tile_nbytes: int
    partner: str
    scale: str
    bits: int

    def nbytes(self, rows: int, cols: int) -> int:
        """Bytes of a packed [rows, cols] matrix, padding included."""
        return padded(rows, ROWS) // ROWS * (padded(cols, COLS) // COLS) * self.tile_nbytes

    def expert_nbytes(self, hidden: int, inter: int, gated: bool = True) -> int:
        """Bytes of one expert's record gate | up | down (up | down when it is not gated). gate and up have their rows padded to 64,
        because they are the columns of down."""
        return (1 + gated) * self.nbytes(padded(inter, COLS), hidden) + self.nbytes(hidden, inter)

    @property
    def bits_per_weight(self) -> float:
        """Scales included, padding not."""
        return self.tile_nbytes * 8 / (ROWS * COLS)


FORMATS: dict[str, Format] = {f.name: f for f in (
    Format("f32", 0, 4096, "f32", "", 32),          # the oracle: float32 from end to end
    Format("bf16", 1, 2048, "f32", "", 16),         # bf16 weights × float32 activations, float32 sums
    Format("int8_g32", 2, 1088, "int8", "bf16", 8),
    Format("int4_g32", 3, 576, "int8", "f16", 4),
)}


def format_of(name: "str | Format") -> Format:
    """The row of the table named `name`; ValueError names the rows there are."""
    if isinstance(name, Format):
        return name
    if name not in FORMATS:
        raise ValueError(f"format {name!r} is not known; known formats: {', '.join(FORMATS)}")
    return FORMATS[name]
