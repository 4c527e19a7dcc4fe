"""Reads the whole input before anything runs: which rows there are, which repeat an id, what is wrong with each bad line; in flat memory.

What it keeps of a row is 16 bytes of its id, 4 of its line number and a flag.
"""

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hetero.batch.desk import Desk
from hetero.batch.keys import Keys
from hetero.batch.rows import Misread, key_of, parse, read_lines
from hetero.errors import BadRequest
from hetero.request import Sampling

UNLIMITED = 256                          # tokens that an answer without a limit is thought to have, for choosing a batch


@dataclass
class Survey:
    """`keys[turn]` stands for a row: its id, or its line where it has none of its own. `first[turn]`: the line that had its id first, or 0."""

    sha256: str
    keys: Keys
    first: np.ndarray
    bad: int = 0                         # rows that will not run, repeats among them; -1: not looked at
    prompt_tokens: int = 0
    answer_tokens: int = 0               # at most, as far as limits are known

    @property
    def rows(self) -> int:
        return len(self.keys)

    @property
    def mean_tokens(self) -> float:
        """Of a row that runs: prompt and answer."""
        return (self.prompt_tokens + self.answer_tokens) / max(1, self.rows - max(0, self.bad))


@dataclass
class Fault:
    """One bad line."""

    number: int
    id: str | None
    error: BadRequest

    def text(self, name: str) -> str:
        param, message = self.error.param or "", self.error.message
        return f"{name}:{self.number}: " + (message if message.startswith(param) else f"{param}: {message}")

    def record(self) -> dict[str, object]:
        return {"line": self.number, "id": self.id, "field": self.error.param, "message": self.error.message, "hint": self.error.hint}


@dataclass
class Count:
    """What `look` tells on its way."""

    rows: int = 0
    bad: int = 0
    tell: Callable[["Count"], None] = field(default=lambda _: None)


def likely(s: Sampling, context: int) -> int:
    """Tokens that a row's answers are thought to have."""
    return s.n * (s.max_tokens if s.max_tokens is not None and s.max_tokens < context else min(UNLIMITED, context))


def look(path: Path, desk: Desk | None, on_fault: Callable[[Fault], None], count: Count | None = None) -> Survey:
    """All rows of a file, each prepared as it will be when it runs (desk None: ids alone). Bad lines are told as they are met, repeated ids at the
    end. Raises BadRequest when the file cannot be read."""
    digest, keys, numbers, wrong, count = hashlib.sha256(), Keys(), array("I"), bytearray(), count or Count()
    prompt = answer = 0
    for line in read_lines(path, digest):
        numbers.append(line.number)
        wrong.append(0)
        id = None
        try:
            row = parse(line)
            id = row.id
            if desk is not None:
                ready = desk.take(row)
                prompt += ready.prompt_tokens
                answer += sum(likely(j.job.sampling, desk.texts.info.context) for j in ready.jobs)
        except BadRequest as e:
            id = e.id if isinstance(e, Misread) else id
            count.bad, wrong[-1] = count.bad + 1, 1
            on_fault(Fault(line.number, id, e))
        keys.add(key_of(id, line.number))
        count.rows += 1
        if count.rows % 256 == 0:
            count.tell(count)
    found, places = keys.first(), np.frombuffer(numbers, np.uint32).astype(np.int64)
    repeats = np.flatnonzero(found != np.arange(len(keys)))
    first = np.zeros(len(keys), np.int64)
    first[repeats] = places[found[repeats]]
    for turn in repeats:
        keys.replace(int(turn), key_of(None, int(places[turn])))
        on_fault(Fault(int(places[turn]), None, BadRequest(f"its id is that of line {first[turn]} too", "give each row its own", "custom_id")))
    count.bad += sum(not wrong[turn] for turn in repeats)
    return Survey(digest.hexdigest(), keys, first, count.bad if desk is not None else -1, prompt, answer)
