"""Where a model's files are: a folder, a GGUF file, a hub name, or the embedded model; knows no tensor.

A local path wins over a hub name that looks like it. Nothing is written into a model's folder.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hetero.arch import families
from hetero.arch import gguf as arch_gguf
from hetero.arch.spec import Model
from hetero.errors import BadCheckpoint, HeteroError, UnsupportedModel
from hetero.weights import gguf, gguf_text, safetensors
from hetero.weights.stored import DAMAGED, Stored

HUB_NAME = re.compile(r"^[\w.-]+/[\w.-]+(@[\w./-]+)?(:[\w.-]+)?$")
EMBEDDED = Path(__file__).parents[1] / "embedded" / "model-int8"
SIDE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
              "special_tokens_map.json", "vocab.json", "merges.txt", "added_tokens.json", "tokenizer.model", "hf_quant_config.json")


@dataclass(frozen=True)
class Source:
    """A model's files. `texts` holds small files that the container carries inside itself (GGUF), by the name a folder would give them."""

    name: str                            # as the user gave it, or "the embedded model"
    folder: Path
    config: dict[str, Any]
    weights: tuple[Path, ...]            # the files to read tensors from, none of them a stray
    index: dict[str, str] | None = None  # tensor -> file name, when an index says so
    notes: tuple[str, ...] = ()          # for the report: strays ignored, what stands in for what
    texts: dict[str, str] = field(default_factory=dict)
    embedded: bool = False
    gguf: str = ""                       # general.architecture, when the container is GGUF

    def spec(self) -> Model:
        """The model that these files describe, with the names that they use. Raises UnsupportedModel."""
        return arch_gguf.read(self.config, self.gguf) if self.gguf else families.read(self.config)

    def text(self, name: str) -> str | None:
        """A small file's text ("tokenizer.json", "chat_template.jinja"), None when the model has none."""
        if self.gguf:
            return self.texts.get(name)
        path = self.folder / name
        try:
            return path.read_text(encoding="utf-8") if path.is_file() else None
        except (OSError, UnicodeDecodeError) as e:
            raise BadCheckpoint(f"{path}: {e}", DAMAGED) from e

    def json(self, name: str) -> dict[str, Any] | None:
        """A small JSON file as a dict, None when the model has none."""
        text = self.text(name)
        return None if text is None else parse_json(self.folder / name, text)


def parse_json(path: Path, text: str) -> dict[str, Any]:
    """An object, or BadCheckpoint naming the file. `Infinity` and `NaN` pass: published configs hold them."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise BadCheckpoint(f"{path}: not JSON ({str(e)[:100]})", DAMAGED) from e
    if not isinstance(found, dict):
        raise BadCheckpoint(f"{path}: not a JSON object", DAMAGED)
    return found


def read_config(path: Path) -> dict[str, Any]:
    """A bare config.json, or the one in a folder (for --config-only)."""
    path = path / "config.json" if path.is_dir() else path
    if path.is_symlink() and not path.exists():
        raise BadCheckpoint(f"{path}: a link to {path.readlink()}, which is not there", "the hub cache lost a file: fetch the model again")
    try:
        return parse_json(path, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as e:
        raise BadCheckpoint(f"{path}: {e.strerror if isinstance(e, OSError) else e}", "a model's folder holds its config.json") from e


def open_folder(folder: Path, name: str | None = None, weights: bool = True) -> Source:
    """A folder of config.json and safetensors (single, or sharded by index), or of one GGUF model. Strays that no index names are ignored with a
    note. `weights` False: what there is of them is not looked at."""
    models = {str(gguf.parts_of(p)[0]) for p in folder.glob("*.gguf") if "mmproj" not in p.name}
    if len(models) == 1 and not any(folder.glob("*.safetensors")):
        return open_gguf(Path(models.pop()), name)
    if models and not (folder / "config.json").exists():
        raise BadCheckpoint(f"{folder}: {len(models)} GGUF models", "give the path of one file")
    config = read_config(folder)
    if not weights:
        return Source(name or str(folder), folder if folder.is_dir() else folder.parent, config, ())
    index_path = folder / "model.safetensors.index.json"
    present = sorted(p.name for p in folder.glob("*.safetensors"))
    notes: list[str] = []
    index: dict[str, str] | None = None
    if index_path.is_symlink() or index_path.exists():
        index = read_index(index_path)
        wanted = sorted(set(index.values()))
        check_present(folder, wanted, index)
    elif "model.safetensors" in present:
        wanted = ["model.safetensors"]
    else:
        wanted = without_index(folder, present)
    for path in (folder / n for n in wanted):
        if not path.exists():
            raise BadCheckpoint(f"{path}: a link to {path.readlink()}, which is not there", "the hub cache lost a file: fetch the model again")
    if strays := [n for n in present if n not in wanted]:
        notes.append(f"{folder}: ignored {', '.join(strays)} ({'not in the index' if index else 'beside model.safetensors'})")
    return Source(name or str(folder), folder, config, tuple(folder / n for n in wanted), index, tuple(notes))


def open_gguf(path: Path, name: str | None = None) -> Source:
    """A GGUF file, or all files of a split one from the name of any. Files beside it (config.json, tokenizer.json) are not looked at."""
    metadata, tensors, files = gguf.read(path)
    embed = tensors.get("token_embd.weight")
    if embed is None:
        raise BadCheckpoint(f"{path}: no tensor token_embd.weight", "not a language model, or a file of adapters or projectors only")
    try:
        config, texts = arch_gguf.config_of(metadata, tensors, embed.shape[0]), gguf_text.texts(metadata)
    except HeteroError as e:
        raise type(e)(f"{path}: {e.message}", e.hint) from e
    return Source(name or str(path), path.parent, config, tuple(files), None, (), texts, gguf=str(metadata["general.architecture"]))


def read_index(path: Path) -> dict[str, str]:
    try:
        found = parse_json(path, path.read_text(encoding="utf-8")).get("weight_map")
    except (OSError, UnicodeDecodeError) as e:
        raise BadCheckpoint(f"{path}: {e}", DAMAGED) from e
    if not isinstance(found, dict) or not found or not all(isinstance(v, str) for v in found.values()):
        raise BadCheckpoint(f"{path}: weight_map is not a table of tensor names and file names", DAMAGED)
    for tensor, file in found.items():
        if file != Path(file).name or file in ("", ".", ".."):
            raise BadCheckpoint(f"{path}: tensor {tensor[:200]!r} is said to lie in {file[:200]!r}, outside the folder",
                                "an index names files beside it")
    return found


def check_present(folder: Path, wanted: list[str], index: dict[str, str]) -> None:
    missing = [n for n in wanted if not (folder / n).is_file()]
    if not missing:
        return
    broken = [n for n in missing if (folder / n).is_symlink()]
    what = f"{folder / broken[0]} is a link to {(folder / broken[0]).readlink()}, which is not there" if broken else \
        f"{folder}: missing {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}"
    tensor = next(t for t, n in index.items() if n in missing)
    raise BadCheckpoint(f"{what} (the index puts {tensor} and {sum(n in missing for n in index.values()) - 1} more tensors there)",
                        "incomplete download? fetch the model again")


def without_index(folder: Path, present: list[str]) -> list[str]:
    """Shards named -0000i-of-0000n without an index, or one single file of another name."""
    shards = {int(m[1]): (n, int(m[2])) for n in present if (m := re.search(r"-(\d{5})-of-(\d{5})\.safetensors$", n))}
    if shards:
        count = next(iter(shards.values()))[1]
        if gone := [i for i in range(1, count + 1) if i not in shards]:
            raise BadCheckpoint(f"{folder}: shard {gone[0]} of {count} is missing", "incomplete download? fetch the model again")
        return [shards[i][0] for i in sorted(shards)]
    if len(present) == 1:
        return present
    if present:
        raise BadCheckpoint(f"{folder}: {len(present)} safetensors files and no model.safetensors.index.json",
                            "incomplete download? fetch the index too")
    if other := sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth")):
        raise UnsupportedModel(f"{folder}: weights only as {other[0]} (pickle, which can run code)", "convert the model to safetensors")
    raise BadCheckpoint(f"{folder}: no safetensors file", "incomplete download? a model's folder holds model.safetensors or shards and an index")


def read_tensors(source: Source) -> dict[str, Stored]:
    """Every tensor of every file, by name. Index, files and tensors must agree."""
    if source.gguf:
        return gguf.read(source.weights[0])[1]
    tensors: dict[str, Stored] = {}
    for path in source.weights:
        found, _ = safetensors.read_header(path)
        for name, stored in found.items():
            if source.index is not None and source.index.get(name) not in (None, path.name):
                continue                 # the index decides which of two copies counts
            if name in tensors:
                raise BadCheckpoint(f"{path}: tensor {name!r} lies in {tensors[name].file.name} too",
                                    "mixed downloads? fetch the model into an empty folder")
            tensors[name] = stored
    for name, file in (source.index or {}).items():
        if name not in tensors:
            raise BadCheckpoint(f"{source.folder / file}: lacks tensor {name!r}, which the index puts there", DAMAGED)
    return tensors




def open_source(name: str | Path | None, fetch: Callable[[str], Path] | None = None, weights: bool = True) -> Source:
    """The model behind a path, a hub name, or None for the embedded model. `fetch` brings the folder of a hub name (see hub.fetch); without it
    only local paths are understood. `weights` False: a bare config.json, or a folder with one, is enough. Raises BadCheckpoint,
    DownloadFailed or UnsupportedModel."""
    if name is None:
        return replace(open_folder(EMBEDDED, "the embedded model"), embedded=True)
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and not weights and path.suffix == ".json"):
        return open_folder(path, str(name), weights)
    if path.is_file():
        if path.suffix == ".gguf":
            return open_gguf(path, str(name))
        raise BadCheckpoint(f"{name}: not a folder and not a .gguf file", "give the folder that holds config.json and the safetensors files")
    if path.is_symlink():
        raise BadCheckpoint(f"{name}: a link to {path.readlink()}, which is not there", "the hub cache lost a file: fetch the model again")
    if fetch is None or not HUB_NAME.match(str(name)):
        raise BadCheckpoint(f"{name}: no such {'file' if path.suffix == '.gguf' else 'folder'}",
                            "a path to a folder or a GGUF file, or a hub name like Qwen/Qwen3-30B-A3B")
    found = fetch(str(name))
    return open_gguf(found, str(name)) if found.is_file() else open_folder(found, str(name), weights)
