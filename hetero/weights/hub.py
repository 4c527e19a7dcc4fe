"""A hub name to a local folder: only the files a model needs, resumed, counted in bytes, and every refusal named with its remedy; knows no tensor.

Tokens (HF_TOKEN), mirrors (HF_ENDPOINT) and the cache's place (HF_HOME) are huggingface_hub's own settings and mean what they mean there.
"""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import disable_progress_bars

from hetero.errors import DownloadFailed, UnsupportedModel
from hetero.weights.source import SIDE_FILES

Progress = Callable[[str, int, int], None]
# The client's HTTP library has had more than one name; its base of connection errors is the same class that the hub's own error derives from.
Unreachable = next(c for c in HfHubHTTPError.__mro__ if c.__name__ == "HTTPError")
MARGIN_BYTES = 256 << 20


def split_name(name: str) -> tuple[str, str | None, str | None]:
    """"org/model@revision:quant" to its parts; quant picks among a repository's GGUF files."""
    name, _, quant = name.partition(":")
    name, _, revision = name.partition("@")
    return name, revision or None, quant or None


def fetch(name: str, offline: bool = False, cache_dir: Path | None = None, endpoint: str | None = None, progress: Progress = lambda *_: None,
          weights: bool = True) -> Path:
    """The folder (or the GGUF file) of a hub model, downloaded if need be. Without a network a whole cached copy serves. `weights` False: only
    config and tokenizer. Raises DownloadFailed or UnsupportedModel."""
    repo, revision, quant = split_name(name)
    cache = Path(cache_dir or constants.HF_HUB_CACHE)
    try:
        if offline or constants.HF_HUB_OFFLINE:
            return cached(repo, revision, quant, cache, "offline")
        try:
            info = HfApi(endpoint=endpoint).model_info(repo, revision=revision, files_metadata=True)
        except HfHubHTTPError:
            raise
        except Unreachable as e:
            return cached(repo, revision, quant, cache, f"{endpoint or constants.ENDPOINT} cannot be reached ({e})")
        sizes = {s.rfilename: s.size or 0 for s in info.siblings or []}
        wanted = choose(name, list(sizes), quant) if weights else [n for n in sizes if n in SIDE_FILES]
        blobs = cache / repo_folder_name(repo_id=repo, repo_type="model") / "blobs"
        total = sum(sizes[n] for n in wanted)
        check_room(name, cache, total - bytes_in(blobs))
        disable_progress_bars()
        with Watch(blobs, total, progress):
            folder = Path(snapshot_download(repo, revision=revision, cache_dir=cache, endpoint=endpoint, allow_patterns=wanted))
    except (HfHubHTTPError, Unreachable, LocalEntryNotFoundError, OfflineModeIsEnabled, HFValidationError, OSError) as e:
        raise explain(name, repo, endpoint or constants.ENDPOINT, e) from e
    return found(folder, quant)


def cached(repo: str, revision: str | None, quant: str | None, cache: Path, why: str) -> Path:
    """The snapshot that the cache holds; whether it is whole is for the completeness checks to say."""
    store = cache / repo_folder_name(repo_id=repo, repo_type="model")
    ref = store / "refs" / (revision or constants.DEFAULT_REVISION)
    folder = store / "snapshots" / (ref.read_text().strip() if ref.is_file() else revision or "?")
    if not folder.is_dir():
        raise DownloadFailed(f"{repo}: not in {cache}, and {why}",
                             "go online once to fetch it (without --offline and HF_HUB_OFFLINE), or give a local folder")
    return found(folder, quant)


def found(folder: Path, quant: str | None) -> Path:
    """The folder, or the GGUF file in it when that is all it holds."""
    if any(folder.glob("*.safetensors")):
        return folder
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.gguf"))
    return folder / choose_gguf(str(folder), files, quant)[0] if files else folder


def choose(name: str, files: list[str], quant: str | None) -> list[str]:
    """The files a model needs: safetensors in the root with what belongs to them, else the GGUF files of one quantization."""
    tensors = [n for n in files if n.endswith(".safetensors") and "/" not in n]
    if tensors and quant is None:
        if "model.safetensors.index.json" not in files and "model.safetensors" in tensors:
            tensors = ["model.safetensors"]
        return [*tensors, *(n for n in files if n in SIDE_FILES or n == "model.safetensors.index.json")]
    if any(n.endswith(".gguf") for n in files):
        return choose_gguf(name, [n for n in files if n.endswith(".gguf")], quant)
    pickles = [n for n in files if n.endswith((".bin", ".pt", ".pth"))]
    if pickles:
        raise UnsupportedModel(f"{name}: weights only as {pickles[0]} (pickle, which can run code)",
                               "choose a repository with safetensors or GGUF files")
    raise UnsupportedModel(f"{name}: no weights among its {len(files)} files", "choose a repository with safetensors or GGUF files")


def choose_gguf(name: str, files: list[str], quant: str | None) -> list[str]:
    files = sorted(n for n in files if "mmproj" not in n)
    kinds = sorted({n.rsplit("-of-", 1)[0].rsplit("-", 1)[0] if "-of-" in n else n.removesuffix(".gguf") for n in files})
    fitting = [k for k in kinds if quant is None or quant.lower() in k.lower()]
    if len(fitting) != 1:
        what = f"no GGUF file called {quant}" if quant else f"{len(kinds)} GGUF models"
        raise UnsupportedModel(f"{name}: {what}", f"say which, as NAME:QUANT, of: {', '.join(k.rsplit('/', 1)[-1] for k in kinds)}")
    return [n for n in files if n.startswith(fitting[0])]


def check_room(name: str, cache: Path, need: int) -> None:
    there = next(p for p in (cache, *cache.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if need > 0 and need + MARGIN_BYTES > free:
        raise DownloadFailed(f"{name}: {need / 1e9:.1f} GB to download into {cache}, {free / 1e9:.1f} GB free",
                             "free some disk, or put the cache elsewhere with HF_HOME")


def bytes_in(blobs: Path) -> int:
    return sum(p.stat().st_size for p in blobs.glob("*") if p.is_file()) if blobs.is_dir() else 0


class Watch:
    """Tells `progress` how many bytes have arrived, twice a second, while the client downloads."""

    def __init__(self, blobs: Path, total: int, progress: Progress) -> None:
        self.blobs, self.total, self.progress, self.over = blobs, total, progress, threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)

    def look(self) -> None:
        while not self.over.wait(0.5):
            self.progress("downloading", min(bytes_in(self.blobs), self.total), self.total)

    def __enter__(self) -> "Watch":
        self.progress("downloading", min(bytes_in(self.blobs), self.total), self.total)
        self.thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.over.set()
        self.thread.join()
        if kind is None:
            self.progress("downloading", self.total, self.total)


def explain(name: str, repo: str, endpoint: str, e: Exception) -> DownloadFailed:
    """One line and the remedy for what the hub or the disk answered."""
    status = e.response.status_code if isinstance(e, HfHubHTTPError) and e.response is not None else 0
    if isinstance(e, GatedRepoError):
        return DownloadFailed(f"{name}: gated: {endpoint} wants its licence accepted first (HTTP {status})",
                              f"accept it at {endpoint}/{repo} in a browser, then set HF_TOKEN to a token of that account")
    if isinstance(e, RevisionNotFoundError):
        return DownloadFailed(f"{name}: no such revision (HTTP {status})", f"see the branches and tags at {endpoint}/{repo}/tree/main")
    if isinstance(e, RepositoryNotFoundError) or status in (401, 403):
        return DownloadFailed(f"{name}: not there, or private (HTTP {status} from {endpoint})",
                              "check the spelling; for a private model set HF_TOKEN to a token that may read it, and see that it has not expired")
    if status:
        return DownloadFailed(f"{name}: HTTP {status} from {endpoint}",
                              "wait and try again (what has arrived is kept), or set HF_ENDPOINT to a mirror")
    if isinstance(e, HFValidationError):
        return DownloadFailed(f"{name}: not a hub name", "a hub name is ORGANISATION/MODEL, like Qwen/Qwen3-30B-A3B")
    if isinstance(e, OSError) and e.errno == 28:
        return DownloadFailed(f"{name}: the disk is full", "free some disk, or put the cache elsewhere with HF_HOME; what has arrived is kept")
    reason = str(e).strip().splitlines()[0][:200] if str(e).strip() else type(e).__name__
    return DownloadFailed(f"{name}: {endpoint} cannot be reached ({reason})",
                          "check the network, set HF_ENDPOINT to a mirror, or give a local folder; what has arrived is kept")
