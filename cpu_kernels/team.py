"""A team of pinned persistent threads, and the mailbox through which a GPU asks it for layers; knows no format and no model.

How a job is written stands in `jobs`. `prepare(job, arguments, keep)` makes what `Team.run` and a `Program` take.
"""

import ctypes
import functools
import os
import pickle
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cfunc, types

from . import atoms, cpu, jobs
from .jit import address as machine_code
from .jobs import FAILED, LINE, LOST, MOST, STOPPED


class JobFailed(RuntimeError):
    """A job ended with a code of its own, or at its deadline; the team can be used again. `code`: the job's; `thread`: whose."""

    def __init__(self, message: str, code: int = 0, thread: int = 0) -> None:
        super().__init__(message)
        self.code, self.thread = code, thread


class TeamLost(JobFailed):
    """A thread did not come back; the team has replaced all its threads."""


@dataclass(frozen=True)
class Prepared:
    """A job with its arguments: addresses, and what must stay alive for them (`keep`). `name`: file and function of the job."""

    job: int
    arguments: int
    keep: Any = None
    name: str = ""


_SHAPE = (types.int64,) * 4


@functools.cache
def address(job: Any) -> int:
    """The machine code of a job (a @kernel of four ints), compiled or loaded now."""
    return machine_code(job, 4)


def prepare(job: Any, arguments: np.ndarray, keep: Any = None) -> Prepared:
    """The job and an int64 array of arguments it reads; `keep` is anything else its addresses point into."""
    return Prepared(address(job), arguments.ctypes.data, (arguments, keep), name_of(job))


@functools.cache
def name_of(job: Any) -> str:
    """"routed.job": where time goes is told by these names."""
    return f"{job.__module__.rpartition('.')[2]}.{job.__name__}"


class Program:
    """The routed layers of one decode step in order, each a prepared job. `times`: [layers, 2] ns, flag seen and answer given, of the last play."""

    def __init__(self, layers: Sequence[Prepared]) -> None:
        self.layers = tuple(layers)
        address(jobs.play)                               # compiled before a step waits for it
        self.table = np.array([(layer.job, layer.arguments) for layer in layers], np.int64).reshape(-1, 2)
        self.times = np.zeros((len(layers), 2), np.int64)


class Mailbox:
    """Flags between a step's GPU side and the team: 32-bit words, one per 128 B line, request[0..L], done[0..L-1], error.

    The GPU stores 1 into request[l] when layer l's inputs are in place, and into request[L] at the end of the step; it waits for done[l]
    to become 1. The CPU alone resets. `memory`: uint8, at least nbytes(layers), 128 B aligned, zero: pinned when a GPU writes it."""

    def __init__(self, memory: np.ndarray, layers: int) -> None:
        if memory.dtype != np.uint8 or memory.nbytes < self.nbytes(layers) or memory.ctypes.data % LINE:
            raise ValueError(f"memory: wants {self.nbytes(layers)} B of uint8 at a multiple of {LINE}, got {memory.nbytes} B of {memory.dtype}")
        self.memory, self.layers = memory, layers
        self._words = memory[:self.nbytes(layers)].view(np.uint32)[::LINE // 4]

    @staticmethod
    def nbytes(layers: int) -> int:
        return (2 * layers + 2) * LINE

    def request(self, layer: int) -> int:
        """Address of a layer's request flag; request(layers) is the end of the step."""
        return int(self.memory.ctypes.data) + layer * LINE

    def done(self, layer: int) -> int:
        return int(self.memory.ctypes.data) + (self.layers + 1 + layer) * LINE

    def error(self) -> int:
        """Address of a word that the GPU sets when it gave up waiting."""
        return int(self.memory.ctypes.data) + (2 * self.layers + 1) * LINE

    def flags(self) -> tuple[list[int], list[int], int]:
        """(requests, dones, error) as they stand."""
        words = [int(word) for word in self._words]
        return words[:self.layers + 1], words[self.layers + 1:-1], words[-1]

    @property
    def erred(self) -> bool:
        """Whether a kernel of the GPU gave up waiting."""
        return bool(self._words[-1])

    def release(self) -> None:
        """Every wait of the step comes true, so that a GPU without a CPU side runs to its end."""
        self._words[self.layers + 1:-1] = 1

    def clear(self) -> None:
        """Only when neither side is running a step."""
        self._words[:] = 0


class Team:
    """`threads` threads on `cores`, the calling one included: it is thread 0, and `seat()` pins it.

    cores None: chosen by `cpu.read()` and locked against other processes' teams; `shared` says that some core is used by another team.
    threads: defaults to one per core; more than that share cores (tests). One job at a time: concurrent callers wait for each other."""

    def __init__(self, cores: Sequence[int] | None = None, threads: int | None = None, spin_s: float = 0.0005) -> None:
        machine = cpu.read()
        if threads is not None and not 1 <= threads <= MOST:
            raise ValueError(f"threads: {threads} is not in 1..{MOST}")
        if cores is not None and (not cores or set(cores) - set(machine.allowed)):
            raise ValueError(f"cores: {list(cores)} are not CPUs this process may use: {list(machine.allowed)}")
        count = threads or (len(cores) if cores is not None else machine.threads)
        wanted = list(cores) if cores is not None else machine.pick(max(count, len(machine.fast)))
        explicit = cores is not None or threads is not None
        self._hold = cpu.hold(wanted, min(count, len(set(wanted))))
        if explicit and len(self._hold.cores) < min(count, len(set(wanted))):
            taken = list(dict.fromkeys([*self._hold.cores, *wanted]))[:count]
            self._hold.shared = True
        else:
            taken = list(self._hold.cores)
            count = count if explicit else len(taken)
        self.cores = tuple(taken[i % len(taken)] for i in range(count))
        self.threads = count
        self.shared = self._hold.shared or len(set(self.cores)) < count
        fewer = machine.threads - count
        self.reason = "as told" if explicit else machine.reason + (f", less {fewer} held by another process's team" if fewer > 0 else "")
        self._spin_s = spin_s
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._start()

    def _start(self) -> None:
        raw = np.zeros(jobs.CONTROL_BYTES + LINE, np.uint8)
        start = -raw.ctypes.data % LINE
        self._memory = raw[start:start + jobs.CONTROL_BYTES]
        self._control = int(self._memory.ctypes.data)
        pause_ns = max(jobs.pauses_ns(1000, self._control + jobs.OWN + jobs.SCRATCH) / 1000, 0.1)
        self._set(jobs.THREADS, self.threads)
        self._set(jobs.SPINS, int(self._spin_s * 1e9 / pause_ns))
        for word in (jobs.PATIENCE, jobs.MOST_PATIENCE):
            self._set(word, 64 if len(set(self.cores)) < self.threads else int(jobs.LONG_NS / pause_ns))
        jobs.work.compile((types.int64, types.int64))
        jobs.dispatch.compile(_SHAPE)
        self._workers = [threading.Thread(target=_life, args=(self._memory, self._control, tid, self.cores[tid]), daemon=True,
                                          name=f"team-{tid}") for tid in range(1, self.threads)]
        for worker in self._workers:
            worker.start()
        while self._get(jobs.READY) < self.threads - 1:
            time.sleep(0.0002)
        self._open = True
        self._ending = weakref.finalize(self, _end, self._memory, self._control)

    def _get(self, word: int) -> int:
        return int(self._memory[word:word + 8].view(np.int64)[0])

    def _set(self, word: int, value: int) -> None:
        self._memory[word:word + 8].view(np.int64)[0] = value

    @property
    def control(self) -> int:
        """Address of the control block, for `host_function`; another one after the team was lost and replaced."""
        return self._control

    def run(self, prepared: Prepared, deadline_s: float = 600.0) -> None:
        """Runs a job on all threads and returns when all are done. Raises what the job raised, JobFailed for its code or a missed deadline,
        TeamLost when a thread did not come back."""
        self.run_at(prepared.job, prepared.arguments, deadline_s)

    def run_at(self, job: int, arguments: int, deadline_s: float = 600.0) -> None:
        """The same by addresses."""
        why = self._dispatch(job, arguments, deadline_s)
        if why:
            self._fail(why, deadline_s)

    def _dispatch(self, job: int, arguments: int, deadline_s: float) -> int:
        if not self._open or os.getpid() != self._pid:
            raise JobFailed("this team is closed" if not self._open else "this team lives in another process (fork)")
        with self._lock:
            return int(jobs.dispatch(self._control, job, arguments, int(deadline_s * 1e9)))

    def play(self, program: Program, mailbox: Mailbox, deadline_s: float = 2.0) -> int:
        """The CPU's side of one decode step: each layer's job runs when the mailbox asks for it. Returns OK, LATE (a flag or a thread did not
        come within deadline_s), FAILED (a job failed: `failure()` says how), STOPPED (abort) or LOST. After anything but OK all done
        flags are 1 and stay so: drain the GPU, then `mailbox.clear()`."""
        if len(program.layers) != mailbox.layers:
            raise ValueError(f"mailbox: has {mailbox.layers} layers, the program {len(program.layers)}")
        arguments = np.array([mailbox.layers, program.table.ctypes.data, mailbox.request(0), mailbox.done(0), int(deadline_s * 1e9),
                              program.times.ctypes.data], np.int64)
        why = self._dispatch(address(jobs.play), arguments.ctypes.data, deadline_s)
        if why == LOST:
            mailbox.release()
            self._replace(keep=(arguments, program))
        return why

    def wait(self, mailbox: Mailbox, deadline_s: float = 2.0) -> int:
        """Waits, without the GIL, for the end of the step (request[L]); OK or LATE."""
        scratch = np.zeros(2, np.int64)
        return int(jobs.wait_flag(mailbox.request(mailbox.layers), int(deadline_s * 1e9), scratch.ctypes.data))

    def failure(self) -> JobFailed | Exception | None:
        """What the last failing job said: the exception it raised in some thread, or its code."""
        for tid in range(self.threads):
            own = jobs.OWN + tid * LINE
            for at in (jobs.STATUS, jobs.INNER):
                if self._get(own + at):
                    return _raised(self._get(own + at + 8), tid)
            if self._get(own + jobs.CODE):
                code = self._get(own + jobs.CODE)
                return JobFailed(f"thread {tid} of the team: code {code}", code, tid)
        return None

    def _fail(self, why: int, deadline_s: float) -> None:
        if why == LOST:
            self._replace(keep=None)
            raise TeamLost(f"a thread of the team did not come back within {deadline_s:g} s; all {self.threads} were replaced")
        if why == FAILED:
            raise self.failure() or JobFailed("a job failed")
        raise JobFailed("the job was aborted" if why == STOPPED else f"the job did not end within {deadline_s:g} s")

    def _replace(self, keep: Any) -> None:
        _lost.append((self._memory, keep))           # a thread that comes back late still writes there
        self._ending()
        self._start()

    def abort(self) -> None:
        """From another thread: the running job, if any, is given up at its next barrier, and `run` raises."""
        self._set(jobs.ABORT, STOPPED)

    def park(self) -> None:
        """Workers sleep at once rather than after their spin: before somebody else wants the cores. The next job wakes them."""
        with self._lock:
            if self._open:
                self._set(jobs.PARK, 1)

    @property
    def parked(self) -> bool:
        return self._get(jobs.SLEEPERS) == self.threads - 1

    @contextmanager
    def seat(self) -> Iterator[None]:
        """Pins the calling thread to the team's first core while inside. Threads it starts there inherit that: start none."""
        thread = threading.get_native_id()
        before = os.sched_getaffinity(thread)
        os.sched_setaffinity(thread, {self.cores[0]})
        try:
            yield
        finally:
            os.sched_setaffinity(thread, before)

    def close(self) -> None:
        """Ends the threads; always returns, may be called again. A thread that hangs in a job is left to end with it."""
        if not self._open or os.getpid() != self._pid:
            return
        self._open = False
        self._ending()
        end = time.monotonic() + 1.0
        for worker in self._workers:
            worker.join(max(0.0, end - time.monotonic()))
        if any(worker.is_alive() for worker in self._workers):
            _lost.append((self._memory, None))
        self._hold.release()

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@functools.cache
def host_function() -> int:
    """Address of a C function void(int64 *record) that runs a job from any thread and waits for it: record = control, job, arguments, deadline in ns,
    and the place where the code (OK, LATE, ...) goes. Nobody else may use the team meanwhile."""
    def hosted(record: int) -> None:
        atoms.poke(record + 32, jobs.dispatch(atoms.peek(record), atoms.peek(record + 8), atoms.peek(record + 16), atoms.peek(record + 24)))
    made = cfunc(types.void(types.int64), nopython=True)(hosted)
    _kept.append(made)
    return int(made.address)


_kept: list[Any] = []                                # C functions whose addresses were given away
_lost: list[Any] = []                                # memory that a hanging thread may still write


def _life(memory: np.ndarray, control: int, tid: int, core: int) -> None:
    os.sched_setaffinity(threading.get_native_id(), {core})
    jobs.work(control, tid)
    del memory


def _end(memory: np.ndarray, control: int) -> None:
    """Sends the threads of a control block home, also when its team is simply dropped or the process ends."""
    memory[jobs.STOP:jobs.ABORT + 8].view(np.int64)[:] = (1, STOPPED)
    jobs.publish(control)


def _raised(info: int, tid: int) -> Exception:
    """The exception behind Numba's record: address and length of a pickle of (type, arguments, place); flagged when built at run time."""
    data, length = ctypes.c_void_p.from_address(info).value, ctypes.c_int32.from_address(info + 8).value
    dynamic = ctypes.c_int32.from_address(info + 32).value
    if not data or dynamic > 0:
        return JobFailed(f"thread {tid} of the team raised an exception", thread=tid)
    kind, arguments, _ = pickle.loads(ctypes.string_at(data, length))
    made: Exception = kind(*(arguments or ()))
    made.add_note(f"raised in thread {tid} of the team")
    return made
