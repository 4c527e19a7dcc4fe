"""What a batch is, beside its output: input, model, formats, sampling, seed, version; a resumed batch must be the same one. Knows no row."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hetero import __version__
from hetero.batch.journal import sync_folder
from hetero.errors import BadOption, NotWritable
from hetero.weights.source import SIDE_FILES, Source

LOOKED_AT = 64 << 10                     # bytes of a weight file at its start, middle and end
COMPARED = ("input.sha256", "model.fingerprint", "formats", "sampling", "seed", "context", "served", "deterministic", "version")


def place(output: Path) -> Path:
    return output.with_name(output.name + ".manifest.json")


def fingerprint(source: Source) -> str:
    """A hash of the model's small files, and of names, sizes and samples of its weight files: the same on every machine that has the same files."""
    found = hashlib.sha256(json.dumps(source.config, sort_keys=True).encode())
    for name in SIDE_FILES:
        found.update(f"{name}\0{source.text(name) if name != 'tokenizer.model' else ''}\0".encode("utf-8", "surrogatepass"))
    for path in source.weights:
        size = path.stat().st_size
        found.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for at in (0, size // 2, max(0, size - LOOKED_AT)):
                file.seek(at)
                found.update(file.read(LOOKED_AT))
    return found.hexdigest()


def write(path: Path, manifest: Mapping[str, Any]) -> None:
    """All or nothing. Raises NotWritable."""
    new = path.with_name(path.name + ".new")
    try:
        with new.open("w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        sync_folder(path.parent)
    except OSError as e:
        raise NotWritable(f"{path}: {e.strerror}", "the manifest stands beside the output: make room there, or give another -o") from e


def read(path: Path) -> dict[str, Any] | None:
    """None when there is none. Raises BadOption for what is no manifest."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise BadOption(f"{path}: cannot be read: {e}", "start again with another -o") from e
    if not isinstance(found, dict) or "input" not in found:
        raise BadOption(f"{path}: is no manifest of a batch", "start again with another -o")
    return found


def of(input: str, sha256: str, rows: int, source: Source, formats: Mapping[str, Any], sampling: Mapping[str, Any], seed: int, context: int,
       served: str, deterministic: bool, created: int, means: Mapping[str, float]) -> dict[str, Any]:
    return {"version": __version__, "created": created, "input": {"name": input, "sha256": sha256, "rows": rows, **means},
            "model": {"name": source.name, "fingerprint": fingerprint(source)}, "formats": dict(formats), "sampling": dict(sampling), "seed": seed,
            "context": context, "served": served, "deterministic": deterministic}


def flat(found: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(found, dict):
        for key, value in found.items():
            yield from flat(value, f"{name}.{key}" if name else key)
    else:
        yield name, found


def check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises BadOption naming every key that differs, with both values."""
    old, new = (dict(flat(json.loads(json.dumps(m)))) for m in (before, now))
    differing = [f"{k} was {old.get(k)!r} and is {new.get(k)!r}" for k in sorted(old.keys() | new.keys())
                 if old.get(k) != new.get(k) and any(k == c or k.startswith(f"{c}.") for c in COMPARED)]
    if differing:
        raise BadOption(f"{path}: another batch than this one: {'; '.join(differing)}",
                        "resume with the same input, model and options, or give another -o")
