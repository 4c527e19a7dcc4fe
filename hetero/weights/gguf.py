"""Reads the GGUF container, whole or split: metadata and tensors with their byte ranges; knows nothing of what they mean.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Counts and lengths are checked against what is
left of the file before anything of their size is made.
"""

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from hetero.errors import BadCheckpoint, UnsupportedModel
from hetero.weights.ggml import BLOCKS, BY_NUMBER
from hetero.weights.stored import DAMAGED, DTYPES, Mapped, Stored

NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8"}
BOOL, STRING, ARRAY = 7, 8, 9
SPLIT = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")
REFUSED = {9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M", 34: "TQ1_0",
           35: "TQ2_0", 40: "NVFP4"}


class Cursor:
    """A place in a file's head. Every step is checked against the end of the file."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path, self.data, self.at, self.what = path, data, 0, "the header"

    def take(self, nbytes: int) -> int:
        """The start of the next nbytes, which are inside the file."""
        start = self.at
        if nbytes > len(self.data) - start:
            where = f"{self.path}: {self.what}: bytes {start}..{start + nbytes}"
            raise BadCheckpoint(f"{where} are past the end of the file ({len(self.data)} bytes)", DAMAGED)
        self.at += nbytes
        return start

    def number(self, code: str, nbytes: int) -> Any:
        return struct.unpack_from("<" + code, self.data.data, self.take(nbytes))[0]

    def u32(self) -> int:
        return self.number("I", 4)

    def u64(self) -> int:
        return self.number("Q", 8)

    def text(self) -> str:
        nbytes = self.u64()
        start = self.take(nbytes)
        return self.data[start:start + nbytes].tobytes().decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        """One metadata value: a number, bool, string, numpy array of numbers, or list."""
        if kind == STRING:
            return self.text()
        if kind in NUMBERS:
            dtype = np.dtype(NUMBERS[kind])
            found = self.data[(s := self.take(dtype.itemsize)):s + dtype.itemsize].view(dtype)[0]
            return bool(found) if kind == BOOL else float(str(found)) if kind == 6 else found.item()    # 1e-6 was written, not its nearest float32
        if kind != ARRAY or depth > 3:
            raise BadCheckpoint(f"{self.path}: {self.what}: no value of type {kind} at byte {self.at}", DAMAGED)
        inner, count = self.u32(), self.u64()
        if inner in NUMBERS:
            dtype = np.dtype(NUMBERS[inner])
            start = self.take(count * dtype.itemsize)
            return np.frombuffer(self.data[start:self.at].tobytes(), dtype)
        if count * (8 if inner == STRING else 12) > len(self.data) - self.at:
            raise BadCheckpoint(f"{self.path}: {self.what}: {count} values at byte {self.at} do not fit {len(self.data)} bytes", DAMAGED)
        return [self.value(inner, depth + 1) for _ in range(count)]


def read_one(path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Metadata and tensors of one file. Raises BadCheckpoint naming file, tensor and byte range, UnsupportedModel for block types we cannot read."""
    try:
        if path.stat().st_size < 24:
            raise BadCheckpoint(f"{path}: {path.stat().st_size} bytes, too short for a GGUF file", DAMAGED)
        file = Mapped(path)
    except OSError as e:
        raise BadCheckpoint(f"{path}: {e.strerror or e}", "the file cannot be read: is it there, whole, and readable by you?") from e
    try:
        return read_head(path, Cursor(path, file.raw(0, file.nbytes)), file.nbytes)
    finally:
        file.close()


def read_head(path: Path, c: Cursor, size: int) -> tuple[dict[str, Any], dict[str, Stored]]:
    magic, version = c.data[c.take(4):4].tobytes(), c.u32()
    if magic != b"GGUF":
        raise BadCheckpoint(f"{path}: begins with {magic!r}, not GGUF", "not a GGUF file, or a damaged download")
    if version not in (2, 3):
        raise UnsupportedModel(f"{path}: GGUF version {version}", "supported: 2 and 3, little-endian")
    tensors, pairs = c.u64(), c.u64()
    if tensors * 24 > size or pairs * 13 > size:
        raise BadCheckpoint(f"{path}: {tensors} tensors and {pairs} metadata keys do not fit {size} bytes", DAMAGED)
    metadata: dict[str, Any] = {}
    for i in range(pairs):
        c.what = f"metadata key {i}"
        key = c.text()
        c.what = f"metadata {key[:100]!r}"
        if key in metadata:
            raise BadCheckpoint(f"{path}: {c.what} stands twice", DAMAGED)
        metadata[key] = c.value(c.u32())
    found = [read_tensor(path, c, i) for i in range(tensors)]
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or isinstance(align, bool) or not 0 < align <= 1 << 20 or align & (align - 1):
        raise BadCheckpoint(f"{path}: general.alignment = {align!r}, not a power of two", DAMAGED)
    return metadata, placed(path, found, -(-c.at // align) * align, align, size)


def read_tensor(path: Path, c: Cursor, i: int) -> Stored:
    """One tensor, its start still relative to the data."""
    c.what = f"tensor {i}"
    name = c.text()
    c.what = f"tensor {name[:100]!r}"
    count = c.u32()
    if not 1 <= count <= 4:
        raise BadCheckpoint(f"{path}: {c.what} has {count} dimensions, 1 to 4 are possible", DAMAGED)
    shape = tuple(c.u64() for _ in range(count))[::-1]
    number, start = c.u32(), c.u64()
    if number not in BY_NUMBER:
        kind = f"{number} ({REFUSED[number]})" if number in REFUSED else str(number)
        raise UnsupportedModel(f"{path}: {c.what} is of block type {kind}",
                               f"take another file of this model, such as Q4_K_M; supported: {', '.join(sorted(BY_NUMBER.values()))}")
    kind, elements = BY_NUMBER[number], 1
    for side in shape:
        elements *= side
    if kind in BLOCKS and shape[-1] % BLOCKS[kind].weights:
        raise BadCheckpoint(f"{path}: {c.what}: rows of {shape[-1]} are not whole blocks of {kind} ({BLOCKS[kind].weights})", DAMAGED)
    nbytes = elements // BLOCKS[kind].weights * BLOCKS[kind].nbytes if kind in BLOCKS else elements * np.dtype(DTYPES[kind]).itemsize
    return Stored(name, kind, shape, path, start, nbytes)


def placed(path: Path, found: list[Stored], base: int, align: int, size: int) -> dict[str, Stored]:
    """The tensors by name, at their byte ranges in the file: inside it, aligned, apart."""
    tensors: dict[str, Stored] = {}
    end, before = base, "the header"
    for t in sorted(found, key=lambda t: (t.start, t.nbytes)):
        start, where = base + t.start, f"{path}: tensor {t.name[:100]!r}: bytes {base + t.start}..{base + t.start + t.nbytes}"
        if start + t.nbytes > size:
            raise BadCheckpoint(f"{where} are past the end of the file ({size} bytes)", DAMAGED)
        if t.start % align:
            raise BadCheckpoint(f"{where} do not begin at a multiple of {align}", DAMAGED)
        if start < end:
            raise BadCheckpoint(f"{where} overlap {before[:100]!r}, which ends at {end}", DAMAGED)
        if t.name in tensors:
            raise BadCheckpoint(f"{where}: a second tensor of that name", DAMAGED)
        tensors[t.name] = Stored(t.name, t.dtype, t.shape, path, start, t.nbytes)
        end, before = start + t.nbytes, t.name
    if found and size - end > max(align, 4096):
        raise BadCheckpoint(f"{path}: {size - end} bytes after the last tensor, which ends at {end}",
                            "split files joined with cat? give the split files themselves")
    return tensors


def parts_of(path: Path) -> list[Path]:
    """All files of a split model, from the name of any of them; one file otherwise. Raises BadCheckpoint naming the missing one."""
    m = SPLIT.match(path.name)
    if m is None:
        return [path]
    files = [path.with_name(f"{m[1]}-{i:05}-of-{m[3]}.gguf") for i in range(1, int(m[3]) + 1)]
    for f in files:
        if not f.is_file():
            raise BadCheckpoint(f"{f}: missing, one of {len(files)} files of this model",
                                "incomplete download? fetch all the split files into one folder")
    return files


def read(path: Path) -> tuple[dict[str, Any], dict[str, Stored], list[Path]]:
    """Metadata (of the first file), tensors of all files, the files."""
    files = parts_of(path)
    heads = [read_one(f) for f in files]
    metadata = heads[0][0]
    count = metadata.get("split.count", 1)
    if count != len(files):
        raise BadCheckpoint(f"{path}: says that the model has {count} files, its name says {len(files)}",
                            "keep the names that split files were published under")
    tensors: dict[str, Stored] = {}
    for f, (own, found) in zip(files, heads, strict=True):
        if own.get("split.count", 1) != count or (count > 1 and own.get("split.no") != files.index(f)):
            raise BadCheckpoint(f"{f}: is file {own.get('split.no')} of {own.get('split.count')}, its name says otherwise",
                                "mixed downloads? fetch the model again")
        if twice := tensors.keys() & found.keys():
            raise BadCheckpoint(f"{f}: tensor {min(twice)!r} lies in {tensors[min(twice)].file.name} too", DAMAGED)
        tensors |= found
    total = metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise BadCheckpoint(f"{path}: {len(tensors)} tensors, split.tensors.count says {total}", DAMAGED)
    return metadata, tensors, files
