"""Batches over a scripted engine or the tiny model, in this process."""
import gzip
import hashlib
import json
from contextlib import contextmanager
from pathlib import Path

import pytest

from hetero import options as settings
from hetero.batch.run import Alone, Task, run
from hetero.engine.scheduler import Limits
from hetero.engine.scripted import Script, ScriptedEngine
from hetero.weights.source import EMBEDDED

TINY = EMBEDDED.parent / "tiny"


class Place:
    """A folder with an input, and what a batch makes of it."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.input, self.out, self.bad = folder, folder / "in.jsonl", folder / "out.jsonl", folder / "out.errors.jsonl"
        self.options = settings.resolve({"cache_dir": str(cache), "device": "cpu", "ctx": 512, "max_batch": 8}, {}, given_as="argument")
        self.asked, self.runs, self.after = [], 0, lambda request: None

    def write(self, rows, form="plain") -> None:
        text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows).encode()
        self.input.write_bytes(gzip.compress(text) if form == "gzip" else text)

    def script(self, request):
        """Ten tokens that follow from the request's seed, then the end."""
        self.asked.append(request)
        words = hashlib.sha256(str((request.sampling.seed, request.prompt)).encode()).digest()[:10]
        return Script((*(300 + w for w in words), 2))

    @contextmanager
    def crew(self, opening):
        self.runs += 1
        info = opening.desk.texts.info
        engine = ScriptedEngine(self.script, info.vocab, info.context, opening.desk.texts.tokenizer.ends(), Limits(max_batch=8))
        yield Alone(engine, info)

    def task(self, **more) -> Task:
        return Task(str(self.input), self.out, progress="off", **more)

    def run(self, crew=None, options=None, **more) -> int:
        return run(self.task(**more), str(TINY), options or self.options, crew or self.crew)

    def lines(self, path=None):
        return [json.loads(line) for line in (path or self.out).read_text().splitlines()]

    def texts(self):
        """custom_id -> the answer's text."""
        return {line["custom_id"]: line["response"]["body"]["choices"][0] for line in self.lines()}


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def place(tmp_path, cache):
    return Place(tmp_path, cache)
