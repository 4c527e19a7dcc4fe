"""For scripts that measure a server from outside: a server of their own, and an environment over this one for packages that nothing else needs."""

import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment(name: str, *packages: str) -> Path:
    """The Python of .venv-NAME: what is installed here and, installed at the first use, `packages`; nothing here is changed."""
    folder = ROOT / f".venv-{name}"
    python, done = folder / "bin" / "python", folder / "packages"
    if not done.is_file() or done.read_text() != " ".join(packages):
        print(f"making {folder} with {', '.join(packages)}", file=sys.stderr)
        venv.create(folder, with_pip=True)
        inside = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True, capture_output=True, text=True)
        (Path(inside.stdout.strip()) / "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True, stdout=sys.stderr)
        done.write_text(" ".join(packages))
    return python


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@contextmanager
def server(model: str | None, *flags: str, log: Path | None = None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """(its address, its process) of a server that is ready; asked to end at the end. Raises SystemExit when it does not start."""
    port = free_port()
    command = [sys.executable, "-m", "hetero", "serve", *([model] if model else []), "--port", str(port), *flags]
    with (log or Path("/dev/null")).open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stderr=out, text=True)
        try:
            url = f"http://127.0.0.1:{port}"
            while not ready(url):
                if process.poll() is not None:
                    raise SystemExit(f"the server ended with {process.returncode}: {' '.join(map(str, command))}")
                time.sleep(0.3)
            yield url, process
        finally:
            process.terminate()
            process.wait(120)


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as r:
            return bool(r.status == 200)
    except (urllib.error.URLError, OSError):
        return False
