"""A million short rows through check, journals and a scripted engine, in a process of its own that prints how its memory grew. Usage: million.py FOLDER ROWS"""
import json
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from hetero import options as settings
from hetero.batch.run import Alone, Task, run
from hetero.engine.scheduler import Limits
from hetero.engine.scripted import Script, ScriptedEngine
from hetero.weights.source import EMBEDDED


def memory(name: str) -> int:
    """VmRSS, or VmHWM: the most since it was reset."""
    return int(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))) << 10


def main(folder: Path, rows: int) -> None:
    options = settings.resolve({"cache_dir": str(folder / "cache"), "device": "cpu", "ctx": 64, "max_batch": 32}, {}, given_as="argument")

    @contextmanager
    def crew(opening):
        info = opening.desk.texts.info
        engine = ScriptedEngine(lambda request: Script((2,)), info.vocab, info.context, opening.desk.texts.tokenizer.ends(), Limits(max_batch=32))
        yield Alone(engine, info)

    def job(count: int, name: str) -> None:
        with (folder / f"{name}.in").open("w") as file:
            for i in range(count):
                file.write(f'{{"prompt":"cat {i}","max_tokens":1,"temperature":0}}\n')
        assert run(Task(str(folder / f"{name}.in"), folder / name, progress="lines"), str(EMBEDDED.parent / "tiny"), options, crew) == 0
    job(2000, "warm")
    Path("/proc/self/clear_refs").write_text("5")          # the peak counts from here
    before = memory("VmRSS")
    began = time.monotonic()
    job(rows, "out")
    with (folder / "out").open("rb") as file:
        lines = sum(1 for _ in file)
    print(json.dumps({"lines": lines, "before_bytes": before, "growth_bytes": memory("VmHWM") - before, "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
