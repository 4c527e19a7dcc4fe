"""What Ray Data runs on a cluster: reading blocks of rows, and passing them on to the machine's engine; imports nothing heavy before it must."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

from hetero.batch.rows import Wanted, read_lines
from hetero.options import Options

NAMESPACE, PATIENCE_S = "hetero", 120.0
IN = pa.schema([("turn", pa.int64()), ("number", pa.int64()), ("first", pa.int64()), ("data", pa.binary())])
OUT = pa.schema([("turn", pa.int64()), ("good", pa.bool_()), ("data", pa.binary()), ("prompt", pa.int64()), ("cached", pa.int64()),
                 ("tokens", pa.int64()), ("machine", pa.string())])


@dataclass(frozen=True)
class Order:
    """What every machine must know. `token` names this run."""

    name: str | None
    options: Options
    wanted: Wanted
    fingerprint: str
    version: str
    token: str
    at_once: int                         # blocks that one hand may hold


class Post:
    """The actor around a `Station`: whoever only calls it does not import what the engine needs."""

    def __init__(self, order: Order) -> None:
        from hetero.batch.station import Station

        self.station = Station(order)

    def run(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.station.run(rows)

    def drain(self) -> None:
        self.station.draining = True


class Hand:
    """Passes blocks to the station of the machine it is on, and starts that when there is none."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self._post()

    def _post(self) -> Any:
        node = ray.get_runtime_context().get_node_id()
        card = next((n["Resources"].get("GPU", 0) for n in ray.nodes() if n["NodeID"] == node), 0) > 0
        made = ray.remote(Post).options(name=f"{self.order.token}-{node}", get_if_exists=True, scheduling_strategy=On(node, soft=False),
                                           num_cpus=0, num_gpus=int(card), max_concurrency=4 * self.order.at_once)
        return made.remote(self.order)

    def __call__(self, block: pa.Table) -> pa.Table:
        """A post that is lost is started again; with a whole machine this process ends too, within PATIENCE_S, and Ray begins again elsewhere."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                return pa.Table.from_pylist(ray.get(self._post().run.remote(block.to_pylist())), OUT)
            except RayError as e:
                lost = isinstance(e, RayActorError) and "creation task" not in str(e)        # a model that does not load here will not load again
                if not lost or time.monotonic() > end:
                    raise
                time.sleep(2.0)


class Reading:
    """Reads one block: rows of (turn, line number, line that had the id first), from a byte of a plain file on."""

    def __init__(self, path: Path, at: int, rows: np.ndarray) -> None:
        self.path, self.at, self.rows = path, at, rows      # rows [n, 3] int64

    def __call__(self) -> list[pa.Table]:
        wanted = {int(number): (int(turn), int(first)) for turn, number, first in self.rows}
        found = []
        for line in read_lines(self.path, None, self.at, int(self.rows[0, 1]) - 1):
            if line.number in wanted:
                turn, first = wanted[line.number]
                found.append({"turn": turn, "number": line.number, "first": first, "data": line.data})
                if len(found) == len(wanted):
                    break
        return [pa.Table.from_pylist(found, IN)]
