"""Reads the safetensors container: an 8-byte length, a JSON header, the bytes; knows nothing of what the tensors mean.

Format: https://github.com/huggingface/safetensors#format. Everything is checked against the file's size before a byte of data is touched.
"""

import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from hetero.errors import BadCheckpoint
from hetero.weights.stored import DAMAGED, DTYPES, Stored

LARGEST_HEADER = 100_000_000
BITS = {name: 8 * np.dtype(dtype).itemsize for name, dtype in DTYPES.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


def read_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of one file by name, and its metadata. Raises BadCheckpoint naming file, tensor and byte range."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            head = file.read(8)
            if len(head) < 8:
                raise BadCheckpoint(f"{path}: {size} bytes, too short for a safetensors file", DAMAGED)
            length = struct.unpack("<Q", head)[0]
            if length > size - 8 or length > LARGEST_HEADER:
                raise BadCheckpoint(f"{path}: header bytes 8..{8 + length} do not fit a file of {size} bytes", DAMAGED)
            text = file.read(length)
    except OSError as e:
        raise BadCheckpoint(f"{path}: {e.strerror or e}", "the file cannot be read: is it there, whole, and readable by you?") from e
    header = parse(path, text)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise BadCheckpoint(f"{path}: __metadata__ is {type(metadata).__name__}, not an object", DAMAGED)
    tensors = {name: entry(path, name, fields, 8 + length, size) for name, fields in header.items()}
    check_ranges(path, list(tensors.values()), 8 + length, size)
    return tensors, metadata


def parse(path: Path, text: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = Counter(k for k, _ in pairs).most_common(1)[0][0]
            raise BadCheckpoint(f"{path}: header names {twice[:200]!r} twice", DAMAGED)
        return found

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as e:
        raise BadCheckpoint(f"{path}: header is not JSON ({str(e)[:100]})", DAMAGED) from e
    if not isinstance(header, dict):
        raise BadCheckpoint(f"{path}: header is not a JSON object", DAMAGED)
    return header


def whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def entry(path: Path, name: str, fields: Any, base: int, size: int) -> Stored:
    where = f"{path}: tensor {name[:200]!r}"
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= set(fields):
        raise BadCheckpoint(f"{where} lacks dtype, shape or data_offsets", DAMAGED)
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise BadCheckpoint(f"{where} has the unknown type {str(dtype)[:40]!r}", f"known: {', '.join(sorted(BITS))}")
    if not isinstance(shape, list) or len(shape) > 16 or not all(map(whole, shape)):
        raise BadCheckpoint(f"{where} has the shape {str(shape)[:100]}", DAMAGED)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(whole, offsets)) or offsets[0] > offsets[1]:
        raise BadCheckpoint(f"{where} has the byte range {str(offsets)[:100]}", DAMAGED)
    start, end = offsets[0] + base, offsets[1] + base
    if end > size:
        raise BadCheckpoint(f"{where}: bytes {start}..{end} are past the end of the file ({size} bytes)", DAMAGED)
    bits = BITS[dtype]
    for side in shape:
        bits *= side
    if bits != 8 * (end - start):
        raise BadCheckpoint(f"{where}: bytes {start}..{end} hold {end - start} bytes, but {dtype} {shape} needs {bits // 8}", DAMAGED)
    return Stored(name, dtype, tuple(shape), path, start, end - start)


def check_ranges(path: Path, tensors: list[Stored], base: int, size: int) -> None:
    """No overlap, no hole, nothing after the last: what the format promises."""
    at, before = base, "the header"
    for t in sorted(tensors, key=lambda t: (t.start, t.nbytes)):
        if t.start != at:
            what = "overlap" if t.start < at else "leave a hole after"
            where = f"{path}: tensor {t.name[:200]!r}: bytes {t.start}..{t.start + t.nbytes}"
            raise BadCheckpoint(f"{where} {what} {before[:200]!r}, which ends at {at}", DAMAGED)
        at, before = t.start + t.nbytes, t.name
    if at != size:
        raise BadCheckpoint(f"{path}: {size - at} bytes after the last tensor, which ends at {at}", DAMAGED)
