"""A batch over a Ray cluster: Ray Data moves rows and runs them again where a machine was lost, one engine lives on each machine; schedules nothing.

Blocks of rows are read on the machine that has the input, when there is room for them. Each machine has a `Station` (an actor with the model) and
hands (Ray Data's actors, which only pass blocks on): when a machine is lost, Ray starts its hands elsewhere, and they take that place's station.
"""

import gzip
import logging
import queue
import re
import secrets
import shutil
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, DataContext
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

import hetero
from hetero import __version__
from hetero.batch.hands import IN, NAMESPACE, OUT, Hand, Order, Reading
from hetero.batch.mill import Done
from hetero.batch.rows import open_input, read_lines
from hetero.batch.run import Batch, Opening
from hetero.engine.scheduler import LOOK
from hetero.errors import BadOption, EngineFailed, HeteroError, NotWritable

UNIT_ROWS, AHEAD, HANDS = 64, 32, 2      # rows of a block; blocks that one hand may hold; hands for each machine, as Ray may put two together


class Rows(Datasource):
    """The rows that are to do, a block at a time."""

    def __init__(self, blocks: list[Reading]) -> None:
        super().__init__()
        self.blocks = blocks

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None) -> list[ReadTask]:
        return [ReadTask(block, BlockMetadata(len(block.rows), None, None, None), IN) for block in self.blocks]


def blocks_of(batch: Batch, path: Path, rows: int) -> list[Reading]:
    """Every block of `rows` rows that are to do."""
    found: list[Reading] = []
    part: list[tuple[int, int, int]] = []
    at = 0
    for line in read_lines(path):
        if not batch.done[line.turn]:
            at = at if part else line.at
            part.append((line.turn, line.number, int(batch.survey.first[line.turn])))
        if len(part) == rows:
            found.append(Reading(path, at, np.array(part)))
            part = []
    return [*found, Reading(path, at, np.array(part))] if part else found


@contextmanager
def plain(path: Path, beside: Path) -> Iterator[Path]:
    """The input as a file in which one can seek: gzip is unpacked beside the output for the time of the run."""
    with open_input(path) as file:
        if not isinstance(file, gzip.GzipFile):
            yield path
            return
        unpacked = beside.with_name(beside.name + ".unpacked")
        try:
            try:
                with unpacked.open("wb") as to:
                    shutil.copyfileobj(file, to, 1 << 20)
            except OSError as e:
                raise NotWritable(f"{unpacked}: {e.strerror}", "a cluster reads the input unpacked: make room, or unpack it yourself") from e
            yield unpacked
        finally:
            unpacked.unlink(missing_ok=True)


@dataclass
class Sum:
    """What one machine did."""

    rows: int = 0
    prompt_tokens: int = 0
    tokens: int = 0


class Cluster:
    """The machines of a Ray cluster as a crew."""

    def __init__(self, opening: Opening) -> None:
        self.opening, self.machines = opening, defaultdict[str, Sum](Sum)
        self.token = f"hetero-{secrets.token_hex(4)}"
        self.nodes = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) > 0]
        if not self.nodes:
            raise BadOption("the Ray cluster has no machine with CPUs", "ray status shows the machines")

    def run(self, batch: Batch) -> None:
        left, most = int((~batch.done).sum()), self.opening.options.max_batch + LOOK
        rows = max(1, min(UNIT_ROWS, left // (8 * len(self.nodes))))
        order = Order(self.opening.name, self.opening.options, batch.desk.wanted, self.opening.fingerprint, __version__, self.token,
                      min(AHEAD, -(-most // (HANDS * rows)) + 1))
        with plain(batch.input, batch.task.output) as path:
            data = self._dataset(order, blocks_of(batch, path.resolve(), rows), batch.sink.in_order)
            for turn in np.flatnonzero(batch.done):
                batch.sink.skip(int(turn))
            self._collect(batch, data)
        for machine, done in sorted(self.machines.items()):
            batch.progress.say(f"{machine}: {done.rows:,} rows, {done.prompt_tokens:,} prompt and {done.tokens:,} generated tokens, "
                               f"{done.tokens / batch.meter.took_s:,.0f} tok/s")

    def _dataset(self, order: Order, blocks: list[Reading], in_order: bool) -> Any:
        context, hands = DataContext.get_current(), HANDS * len(self.nodes)
        context.enable_progress_bars = False
        context.execution_options.preserve_order = in_order
        context.print_on_execution_start = False
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        rows = ray.data.read_datasource(Rows(blocks), num_cpus=0, concurrency=1, override_num_blocks=len(blocks), label_selector=here)
        pool = ActorPoolStrategy(size=hands, max_tasks_in_flight_per_actor=order.at_once, max_concurrent_calls_per_actor=order.at_once)
        return rows.map_batches(Hand, compute=pool, batch_size=None, batch_format="pyarrow", fn_constructor_args=(order,), num_cpus=0)

    def _collect(self, batch: Batch, data: Any) -> None:
        """Lines as they come, read in a thread so that signals are heard at once."""
        inbox: queue.Queue[pa.Table | BaseException | None] = queue.Queue(4)

        def read() -> None:
            try:
                for block in data.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                    inbox.put(block)
                inbox.put(None)
            except Exception as e:  # noqa: BLE001  told to the thread that waits
                inbox.put(e)
        threading.Thread(target=read, daemon=True).start()
        draining = False
        while batch.stop.asked < 2:
            if batch.stop.asked and not draining:
                draining = True
                self._drain()
            try:
                block = inbox.get(timeout=0.2)
            except queue.Empty:
                block = pa.Table.from_pylist([], OUT)
            if block is None:
                return
            if isinstance(block, BaseException):
                raise failure(block) from block
            self._put(batch, block)
            batch.sink.tick()
            batch.progress.tick()

    def _put(self, batch: Batch, block: pa.Table) -> None:
        for row in block.to_pylist():
            if batch.done[row["turn"]]:                    # computed twice: its machine was lost after it had answered
                continue
            batch.done[row["turn"]] = True
            batch.put(Done(row["turn"], row["data"], row["good"]))
            meter, machine = batch.meter, self.machines[row["machine"]]
            meter.prompt_tokens, meter.tokens = meter.prompt_tokens + row["prompt"], meter.tokens + row["tokens"]
            meter.cached_tokens += row["cached"]
            machine.rows, machine.tokens = machine.rows + 1, machine.tokens + row["tokens"]
            machine.prompt_tokens += row["prompt"]

    def _stations(self) -> Iterator[Any]:
        for node in self.nodes:
            with suppress(ValueError):                     # none there yet, or lost
                yield ray.get_actor(f"{self.token}-{node}", namespace=NAMESPACE)

    def _drain(self) -> None:
        for station in self._stations():
            station.drain.remote()

    def close(self) -> None:
        for station in self._stations():
            ray.kill(station)


def failure(e: BaseException) -> HeteroError:
    """What a machine failed of, in one line: Ray sends errors of actors as the text of their traces."""
    said = re.findall(r"^\W*(?:\w+\.)*(\w+): (.+)$", str(e), re.MULTILINE)
    ours = [(name, text) for name, text in said if name in hetero.__all__]
    name, text = (ours or [(n, t) for n, t in said if n.endswith("Error")] or [(type(e).__name__, str(e).splitlines()[0])])[-1]
    return EngineFailed(f"the cluster failed: {text[:300]}" if ours else f"the cluster failed: {name}: {text[:300]}", "--resume goes on")


@contextmanager
def cluster(opening: Opening, address: str) -> Iterator[Cluster]:
    """A cluster that is joined ("auto" or its address), or found, or else started on this machine alone (""). Raises BadOption."""
    try:
        ray.init(address=address or None, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError) as e:
        raise BadOption(f"--ray {address}: {str(e).splitlines()[0]}", "ray start --head on one machine, ray start --address=… on the others") from e
    try:
        crew = Cluster(opening)
        try:
            yield crew
        finally:
            crew.close()
    finally:
        ray.shutdown()
