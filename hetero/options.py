"""Everything a user may set, as one frozen record with the source of each value; knows no model and no machine.

One table (the fields of `Options`) makes the command line's flags, the HETERO_… variables and the keys of a TOML file.
Flag > environment > --config file > remembered measurement > default.
"""

import argparse
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hetero.errors import BadOption

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
ON, OFF = {"on", "true", "yes", "1"}, {"off", "false", "no", "0"}
KERNEL_VARIABLES = {"HETERO_ISA"}            # read by cpu_kernels itself


def size(text: str) -> int | None:
    """"8G", "7.5GiB", "512M" (powers of 1024) or plain bytes; "auto" is None."""
    if text.lower() == "auto":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", text.strip().upper())
    if not found:
        raise ValueError('a size like 8G, 7.5G or 512M, or "auto"')
    return int(float(found[1]) * UNITS[found[2]])


def cache_size(text: str) -> int | None:
    """A size, "auto" (None) or "off" (0)."""
    if text.lower() in OFF:
        return 0
    try:
        return size(text)
    except ValueError:
        raise ValueError('a size like 4G, "auto" or "off"') from None


def count(text: str) -> int | None:
    """A whole number above 0, "32k" for 32,768; "auto" is None."""
    if text.lower() == "auto":
        return None
    found = re.fullmatch(r"(\d+)(k?)", text.strip().lower())
    if not found or int(found[1]) == 0:
        raise ValueError('a whole number above 0 (32k is 32,768), or "auto"')
    return int(found[1]) << (10 if found[2] else 0)


def switch(text: str) -> bool:
    if text.lower() not in ON | OFF:
        raise ValueError("on or off")
    return text.lower() in ON


def milliseconds(text: str) -> float:
    value = float(text) if re.fullmatch(r"\d+(\.\d*)?", text.strip()) else 0.0
    if not 1 <= value <= 1e7:
        raise ValueError("milliseconds, at least 1")
    return value


def core_list(text: str) -> tuple[int, ...] | None:
    """"0-7,16" as core numbers; "auto" is None."""
    if text.lower() == "auto":
        return None
    cores: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not found or int(found[2] or found[1]) < int(found[1]) or int(found[2] or found[1]) > 1 << 16:
            raise ValueError('core numbers like 0-7,16, or "auto"')
        cores += range(int(found[1]), int(found[2] or found[1]) + 1)
    return tuple(dict.fromkeys(cores))


def integer(text: str) -> int | None:
    if text.lower() == "auto":
        return None
    if not re.fullmatch(r"-?\d{1,19}", text.strip()):
        raise ValueError("a whole number")
    return int(text)


def routing(text: str) -> str:
    """Who picks experts: the model, or for runs with dummy weights uniform or zipf:S."""
    if not re.fullmatch(r"model|uniform|zipf:\d+(\.\d+)?", text):
        raise ValueError("model, uniform or zipf:S (S is a number, such as zipf:1.1)")
    return text


def device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise ValueError("auto, cpu, cuda or cuda:N")
    return text


def path(text: str) -> Path:
    return Path(text).expanduser()


def word(*known: str) -> Callable[[str], str]:
    """One of these words."""
    def parse(text: str) -> str:
        if text not in known:
            near = get_close_matches(text, known, 1)
            raise ValueError(", ".join(known) + (f" (misspelt {near[0]}?)" if near else ""))
        return text
    return parse


def format_name(text: str) -> str:
    """A weight format by name, or two: of gate and up, and of down. Which there are is the kernels' table, checked where it is used."""
    if not re.fullmatch(r"[a-z0-9_]{2,24}(\+[a-z0-9_]{2,24})?", text):
        raise ValueError("a weight format such as auto, bf16, int8_g32 or int4_g32")
    return text


NOWHERE = Path()                             # `resolve` puts the user's cache folder here


def _option(default: Any, parse: Callable[[str], Any], text: str) -> Any:
    return field(default=default, metadata={"parse": parse, "help": text})


@dataclass(frozen=True)
class Options:
    """Values a user may set. None is "auto": measured or planned. Sizes in bytes. `sources` says where each value is from."""

    expert_format: str = _option("auto", format_name, "format of routed experts: auto keeps 8 and 4 bits, makes 16 bits int4_g32")
    dense_format: str = _option("auto", format_name, "format of attention, shared experts and head")
    dtype: str = _option("auto", word("auto", "float32", "bfloat16", "float16"), "what activations are kept in")
    device: str = _option("auto", device, "auto, cpu, cuda or cuda:N")
    threads: int | None = _option(None, count, "threads of the expert team: auto is one per physical core, minus one when there are more than four")
    cores: tuple[int, ...] | None = _option(None, core_list, "cores the team is pinned to, such as 0-7,16")
    vram: int | None = _option(None, size, "most GPU memory to use, such as 8G")
    ram: int | None = _option(None, size, "most system memory to use, such as 48G")
    ctx: int | None = _option(None, count, "longest sequence in tokens (32k is 32,768): auto is what the model has, as far as memory goes")
    max_batch: int = _option(8, count, "sequences that decode at once")
    chunk: int | None = _option(None, count, "tokens of one prefill step: auto is the largest that fits")
    kv_dtype: str = _option("auto", word("auto", "float32", "bfloat16", "float16", "fp8"), "what the KV cache is kept in")
    kv_ram: int | None = _option(0, cache_size, "system memory for KV pages that left the GPU: a size or off")
    expert_cache: int | None = _option(None, cache_size, "GPU memory for hot experts: auto, a size or off")
    load_format: str = _option("auto", word("auto", "safetensors", "gguf", "dummy"), "dummy makes random weights in place, for measuring")
    layers: int | None = _option(None, count, "only the first N layers, for measuring")
    routing: str = _option("model", routing, "who picks experts in runs with dummy weights: model, uniform or zipf:S")
    deterministic: bool = _option(False, switch, "one arithmetic for every token count: bit-equal logits whatever the neighbours; slower, CPU only")
    precision: str = _option("accurate", word("accurate", "fast"), "arithmetic of prefill on the CPU: fast multiplies int8")
    overlap: bool = _option(True, switch, "routed experts on the CPU while the GPU computes the shared one")
    allow_fallback: bool = _option(False, switch, "serve although a kernel's self-test failed, by its plain twin; the report says so")
    max_stall_ms: float = _option(200.0, milliseconds, "longest time that a prompt may delay another request's next token")
    cache_dir: Path = _option(NOWHERE, path, "where packed experts, kernels and measurements are kept")  # noqa: RUF009
    packed_cache: bool = _option(True, switch, "keep packed experts on disk, so that the next start only reads")
    offline: bool = _option(False, switch, "never use the network")
    seed: int | None = _option(None, integer, "seed of requests that bring none")
    config: Path | None = _option(None, path, "TOML file of these options: a path, or one of the installed names")  # noqa: RUF009
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def source(self, name: str) -> str:
        """Where the value is from: flag | environment HETERO_X | the file's path | remembered | default."""
        return self.sources.get(name, "default")

    def with_values(self, source: str, **values: Any) -> "Options":
        """The same with these values, from this source."""
        return replace(self, **values, sources={**self.sources, **dict.fromkeys(values, source)})

    def rows(self) -> list[tuple[str, str, str]]:
        """(name, value as it would be written, source) of each option, for the report."""
        return [(name, written(getattr(self, name)), self.source(name)) for name in TABLE]


TABLE: dict[str, tuple[Callable[[str], Any], Any, str]] = {
    f.name: (f.metadata["parse"], f.default, f.metadata["help"]) for f in fields(Options) if f.metadata}


def written(value: Any) -> str:
    """A value as a user would write it."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"{value >> 30}G" if value % (1 << 30) == 0 else f"{value >> 20}M"
    return str(value)


def read(name: str, value: Any, where: str) -> Any:
    """One option's value from a flag, a variable, a TOML key or a Python argument. Raises BadOption naming it, its place and what is meant."""
    if name not in TABLE:
        near = get_close_matches(name, TABLE, 1, 0.5)
        raise BadOption(f"{where}: unknown option {name!r}", f"nearest: {near[0]}" if near else f"known: {', '.join(TABLE)}")
    parse, default, _ = TABLE[name]
    if value is None and default is None:
        return None
    if isinstance(value, bool) and parse is not switch and parse is not cache_size:
        raise BadOption(f"{where}: {name} = {value!r} cannot be meant", f"{TABLE[name][2]}")
    text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else ("on" if value else "off") if isinstance(value, bool) else str(value)
    try:
        result = parse(text)
    except ValueError as why:
        raise BadOption(f"{where}: {name} = {text!r} cannot be meant", f"expected {why}") from None
    if result is None and default is not None and parse is count:
        return default
    return result


def resolve(given: Mapping[str, Any], environ: Mapping[str, str] | None = None, remembered: Mapping[str, Any] | None = None,
            given_as: str = "flag") -> Options:
    """Options from what was given (flags or Python arguments; absent keys are not set), the environment, --config and what was measured before.

    Raises BadOption for unknown names and for values that cannot be meant.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {"cache_dir": Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetero"}
    sources: dict[str, str] = {}

    def take(name: str, value: Any, source: str, where: str) -> None:
        values[name], sources[name] = read(name, value, where), source

    for name, value in (remembered or {}).items():
        take(name, value, "remembered", "remembered measurement")
    variables = _variables(environ)
    file = given.get("config") or variables.get("config")
    if file:
        found = find_config(str(file))
        for name, value in read_config(found).items():
            take(name, value, str(found), str(found))
    if environ.get("HF_HUB_OFFLINE", "").lower() in ON:
        take("offline", True, "environment HF_HUB_OFFLINE", "environment")
    for name, value in variables.items():
        take(name, value, f"environment HETERO_{name.upper()}", f"environment HETERO_{name.upper()}")
    for name, value in given.items():
        take(name, value, given_as, f"--{name.replace('_', '-')}" if given_as == "flag" else given_as)
    return Options(**values, sources=sources)


def state_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where what a user typed is kept between runs (chat's history)."""
    environ = os.environ if environ is None else environ
    return Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "hetero"


def notify_address(environ: Mapping[str, str] | None = None) -> str:
    """Where systemd wants to hear that a service is ready; "" when it does not."""
    environ = os.environ if environ is None else environ
    return environ.get("NOTIFY_SOCKET", "")


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for key, value in environ.items():
        if not key.startswith("HETERO_") or key in KERNEL_VARIABLES or not value:
            continue
        name = key.removeprefix("HETERO_").lower()
        if name not in TABLE:
            near = get_close_matches(name, [*TABLE, "isa"], 1, 0.5)
            raise BadOption(f"environment {key}: unknown option {name!r}",
                            f"nearest: HETERO_{near[0].upper()}" if near else f"known: {', '.join(TABLE)}")
        found[name] = value
    return found


def config_folders() -> list[Path]:
    """Where named configs lie: inside the installed package, or beside it in a checkout."""
    here = Path(__file__).resolve().parent
    return [here / "configs", here.parent / "configs"]


def config_names() -> list[str]:
    return sorted({p.stem for folder in config_folders() for p in folder.glob("*.toml")})


def find_config(name: str) -> Path:
    """The TOML file of this path, or of this installed name."""
    direct = Path(name).expanduser()
    if direct.suffix == ".toml" or direct.parent != Path():
        if not direct.is_file():
            raise BadOption(f"--config: no file {name}", f"installed names: {', '.join(config_names())}")
        return direct
    for folder in config_folders():
        if (folder / f"{name}.toml").is_file():
            return folder / f"{name}.toml"
    near = get_close_matches(name, config_names(), 1)
    raise BadOption(f"--config: no installed config {name!r}", (f"nearest: {near[0]}; " if near else "") + f"installed: {', '.join(config_names())}")


def read_config(file: Path) -> dict[str, Any]:
    """The options in a TOML file, keys with - or _."""
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as why:
        raise BadOption(f"{file}: not TOML: {why}", "one option per line, such as ctx = 8192") from None
    except (OSError, UnicodeDecodeError) as why:
        raise BadOption(f"--config: cannot read {file}: {why}", f"installed names: {', '.join(config_names())}") from None
    found = {key.replace("-", "_"): value for key, value in raw.items()}
    if "config" in found:
        raise BadOption(f"{file}: a config cannot name another config", "remove the key config")
    return found


def add_flags(parser: argparse._ActionsContainer, only: Iterable[str] | None = None) -> None:
    """A flag for each option (or for `only` these). Unset flags leave no attribute; values stay text until `resolve` reads them."""
    for name in TABLE if only is None else only:
        parse, default, text = TABLE[name]
        flag = "--" + name.replace("_", "-")
        if parse is switch and not default:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            shown = written(default) if name != "cache_dir" else "~/.cache/hetero"
            parser.add_argument(flag, default=argparse.SUPPRESS, metavar="on|off" if parse is switch else name.upper(),
                                help=f"{text} [{shown if default is not None or name != 'config' else 'none'}]".replace("%", "%%"))
        if parse is switch and default:
            parser.add_argument("--no-" + name.replace("_", "-"), dest=name, action="store_const", const="off", default=argparse.SUPPRESS,
                                help=argparse.SUPPRESS)


def from_flags(parsed: argparse.Namespace, environ: Mapping[str, str] | None = None, remembered: Mapping[str, Any] | None = None) -> Options:
    """Options from a namespace that `add_flags` filled; its other attributes are left alone."""
    return resolve({name: value for name, value in vars(parsed).items() if name in TABLE}, environ, remembered)
