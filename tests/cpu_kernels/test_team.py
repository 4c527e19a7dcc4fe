"""Teams of threads: jobs, barriers, claims, failures, deadlines, and play against a pretended GPU."""
import gc
import os
import threading
import time

import numpy as np
import pytest
from numba import types

from cpu_kernels import jobs, team
from cpu_kernels.atoms import add, clock, load, load32, pause, peek, poke, store32
from cpu_kernels.jit import kernel
from cpu_kernels.jobs import aborted, arrive, arrived, barrier, claims, share


@kernel
def count_up(control, tid, threads, arguments):
    """[cell, tasks, hits..]: every task is taken once, own range first, then the others'; in STAGES stages."""
    tasks, hits = peek(arguments), peek(arguments + 8)
    for stage in range(4):
        for k in range(threads):
            owner = (tid + k) % threads
            lo, hi = share(tasks, owner, threads)
            counter = claims(control, tid, owner, stage)
            t = add(counter, 1)
            while lo + t < hi:
                add(hits + 8 * (lo + t), 1 << (8 * stage))
                t = add(counter, 1)
        if stage & 1:
            if not barrier(control, tid, threads):
                return 0
        else:
            arrive(control, tid)
            state = 0
            while state == 0:
                state = arrived(control, tid, threads)
            if state < 0:
                return 0
    return 0


@kernel
def say(control, tid, threads, arguments):
    if tid == peek(arguments) % threads:
        return peek(arguments + 8)
    barrier(control, tid, threads)
    return 0


@kernel
def throw(control, tid, threads, arguments):
    if tid == threads - 1:
        raise OverflowError("too much")
    barrier(control, tid, threads)
    return 0


@kernel
def linger(control, tid, threads, arguments):
    """The last thread stays until told (arguments[0] != 0), deaf to aborts when arguments[1]."""
    if tid == threads - 1:
        while load(arguments) == 0:
            pause()
            if peek(arguments + 8) == 0 and aborted(control):
                return 0
    barrier(control, tid, threads)
    return 0


def counting(crew, tasks):
    hits = np.zeros(tasks, np.int64)
    return hits, team.prepare(count_up, np.array([tasks, hits.ctypes.data], np.int64), hits)


@pytest.fixture(params=[1, 2, 3])
def crew(request):
    with team.Team(threads=request.param) as made:
        yield made


def test_every_task_is_done_once_per_stage_in_many_runs(crew):
    hits, job = counting(crew, 37)
    for n in range(1, 101):
        crew.run(job)
        assert (hits == n * 0x01010101).all()


def test_a_code_of_a_job_is_raised_and_the_team_goes_on(crew):
    hits, job = counting(crew, 5)
    for who in range(3):
        with pytest.raises(team.JobFailed, match="code 42") as caught:
            crew.run(team.prepare(say, np.array([who, 42], np.int64)))
        assert (caught.value.code, caught.value.thread) == (42, who % crew.threads)
        crew.run(job)
    assert (hits == 3 * 0x01010101).all()


def test_an_exception_in_a_thread_surfaces_in_the_caller(crew):
    with pytest.raises(OverflowError, match="too much") as caught:
        crew.run(team.prepare(throw, np.zeros(1, np.int64)))
    assert caught.value.__notes__ == [f"raised in thread {crew.threads - 1} of the team"]
    hits, job = counting(crew, 5)
    crew.run(job)
    assert (hits == 0x01010101).all()


def test_a_deadline_ends_the_job_and_leaves_the_team_usable():
    with team.Team(threads=2) as crew:
        start = time.monotonic()
        with pytest.raises(team.JobFailed, match=r"did not end within 0\.05 s"):
            crew.run(team.prepare(linger, np.zeros(2, np.int64)), deadline_s=0.05)
        assert time.monotonic() - start >= 0.05
        hits, job = counting(crew, 9)
        crew.run(job)
        assert (hits == 0x01010101).all()


def test_abort_from_another_thread_ends_the_job():
    with team.Team(threads=2) as crew:
        timer = threading.Timer(0.05, crew.abort)
        timer.start()
        with pytest.raises(team.JobFailed, match="aborted"):
            crew.run(team.prepare(linger, np.zeros(2, np.int64)))
        timer.join()


def test_a_thread_that_never_returns_is_replaced(monkeypatch):
    with team.Team(threads=2) as crew:
        stuck = np.array([0, 1], np.int64)
        with pytest.raises(team.TeamLost, match="did not come back"):
            crew.run(team.prepare(linger, stuck), deadline_s=0.02)
        hits, job = counting(crew, 9)
        crew.run(job)
        assert (hits == 0x01010101).all()
        stuck[0] = 1


def test_close_returns_while_a_thread_hangs_and_may_be_called_again():
    crew = team.Team(threads=2)
    stuck = np.array([0, 1], np.int64)
    job = team.prepare(linger, stuck)

    def call():
        with pytest.raises(team.JobFailed):
            crew.run(job, 0.05)
    caller = threading.Thread(target=call)
    caller.start()
    time.sleep(0.02)
    crew.close()
    crew.close()
    stuck[0] = 1
    caller.join()
    with pytest.raises(team.JobFailed, match="closed"):
        crew.run(counting(crew, 1)[1])


def test_workers_sleep_when_idle_or_parked_and_wake_for_a_job():
    with team.Team(threads=2, spin_s=100.0) as crew:
        hits, job = counting(crew, 3)
        crew.run(job)
        assert not crew.parked
        for _ in range(3):
            crew.park()
            end = time.monotonic() + 30
            while not crew.parked and time.monotonic() < end:
                time.sleep(0.001)
            assert crew.parked
            crew.run(job)
    assert (hits == 4 * 0x01010101).all()


def test_concurrent_callers_take_turns():
    with team.Team(threads=2) as crew:
        hits, job = counting(crew, 11)
        callers = [threading.Thread(target=lambda: [crew.run(job) for _ in range(50)]) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert (hits == (150 % 256) * 0x01010101).all()


def test_a_seat_pins_the_caller_and_gives_back():
    before = os.sched_getaffinity(0)
    with team.Team() as crew, crew.seat():
        assert os.sched_getaffinity(threading.get_native_id()) == {crew.cores[0]}
    assert os.sched_getaffinity(0) == before


def test_wrong_cores_threads_and_jobs_are_refused():
    with pytest.raises(ValueError, match=r"cores: \[9999\] are not CPUs"):
        team.Team(cores=[9999])
    with pytest.raises(ValueError, match="threads: 0"):
        team.Team(threads=0)

    @kernel
    def fraction(control, tid, threads, arguments):
        return 0.5
    with pytest.raises(TypeError, match="kernel fraction returns float64"):
        team.address(fraction)


# ---- play: a pretended GPU that writes the mailbox as a captured graph does


@kernel
def layer_job(control, tid, threads, arguments):
    """out[i] = x[i] * factor + 1, shared out, with a barrier and a check that all of x is seen alike; fails when x[0] == bad."""
    x, out, n, factor, bad, slow = peek(arguments), peek(arguments + 8), peek(arguments + 16), peek(arguments + 24), peek(arguments + 32), peek(arguments + 40)
    if peek(x) == bad and tid == threads - 1:
        return 7
    if slow and tid == threads - 1:
        while not aborted(control):
            pause()
        return 0
    if not barrier(control, tid, threads):
        return 0
    lo, hi = share(n, tid, threads)
    for i in range(lo, hi):
        poke(out + 8 * i, peek(x + 8 * i) * factor + 1)
    return 0


@kernel
def pretended_gpu(steps, layers, requests, dones, x, out, n, factors, log, scratch, limit_ns):
    """Per layer: x[i] = step * 1000 + layer + i, flag, wait, log sum of out. Returns the number of layers answered."""
    answered = 0
    start = clock(scratch)
    for step in range(steps):
        for l in range(layers):
            for i in range(n):
                poke(x + 8 * i, step * 1000 + l + i)
            store32(requests + 128 * l, 1)
            while load32(dones + 128 * l) != 1:
                pause()
                if clock(scratch) - start > limit_ns:
                    return answered
            total = 0
            for i in range(n):
                total += peek(out + 8 * i)
            poke(log + 8 * (step * layers + l), total)
            answered += 1
        store32(requests + 128 * layers, 1)
    return answered


class Bench:
    def __init__(self, layers=5, n=64, bad=-1, slow=0):
        raw = np.zeros(team.Mailbox.nbytes(layers) + 128, np.uint8)
        self.mailbox = team.Mailbox(raw[-raw.ctypes.data % 128:][:team.Mailbox.nbytes(layers)], layers)
        self.x, self.out, self.layers, self.n = np.zeros(n, np.int64), np.zeros(n, np.int64), layers, n
        self.program = team.Program([team.prepare(layer_job, np.array([self.x.ctypes.data, self.out.ctypes.data, n, l + 2, bad, slow], np.int64))
                                     for l in range(layers)])

    def gpu(self, steps, limit_s=20.0):
        log, scratch, answered = np.zeros(steps * self.layers, np.int64), np.zeros(2, np.int64), []
        pretended_gpu.compile((types.int64,) * 11)
        thread = threading.Thread(target=lambda: answered.append(pretended_gpu(
            steps, self.layers, self.mailbox.request(0), self.mailbox.done(0), self.x.ctypes.data, self.out.ctypes.data, self.n, 0, log.ctypes.data, scratch.ctypes.data, int(limit_s * 1e9))))
        thread.start()
        return thread, log, answered

    def expected(self, step, l):
        return sum((step * 1000 + l + i) * (l + 2) + 1 for i in range(self.n))


def test_a_played_step_answers_every_layer_with_its_own_data(crew):
    bench = Bench()
    steps = 40
    gpu, log, answered = bench.gpu(steps)                # launched ahead: never waits for Python between steps
    codes = [crew.play(bench.program, bench.mailbox, 20.0) for _ in range(steps)]
    assert crew.wait(bench.mailbox, 20.0) == jobs.OK
    gpu.join()
    assert codes == [jobs.OK] * steps and answered == [steps * bench.layers]
    assert log.tolist() == [bench.expected(s, l) for s in range(steps) for l in range(bench.layers)]
    requests, dones, error = bench.mailbox.flags()
    assert requests == [0] * bench.layers + [1] and dones == [0] * (bench.layers - 1) + [1] and error == 0
    assert (np.diff(bench.program.times.ravel()) >= 0).all()
    hits, job = counting(crew, 10)
    crew.run(job)
    assert (hits == 0x01010101).all()


def test_a_gpu_that_never_comes_is_late_and_released(crew):
    bench = Bench()
    assert crew.play(bench.program, bench.mailbox, 0.02) == jobs.LATE
    assert bench.mailbox.flags()[1] == [1] * bench.layers
    assert crew.wait(bench.mailbox, 0.001) == jobs.LATE
    bench.mailbox.clear()
    gpu, log, _ = bench.gpu(1)
    assert crew.play(bench.program, bench.mailbox, 20.0) == jobs.OK
    gpu.join()
    assert log.tolist() == [bench.expected(0, l) for l in range(bench.layers)]


def test_a_failing_layer_releases_the_gpu_and_is_named(crew):
    bench = Bench(bad=1002)                              # layer 2 of step 1
    gpu, _, answered = bench.gpu(2)
    assert crew.play(bench.program, bench.mailbox, 20.0) == jobs.OK
    assert crew.play(bench.program, bench.mailbox, 20.0) == jobs.FAILED
    assert "code 7" in str(crew.failure())
    gpu.join()
    assert answered == [2 * bench.layers]                # drained by the released flags


def test_a_slow_thread_in_a_layer_is_late_and_the_next_step_is_right():
    with team.Team(threads=2) as crew:
        bench = Bench(slow=1)
        gpu, _, _ = bench.gpu(1)
        assert crew.play(bench.program, bench.mailbox, 0.05) == jobs.LATE
        gpu.join()
        bench.mailbox.clear()
        good = Bench()
        gpu, log, _ = good.gpu(1)
        assert crew.play(good.program, good.mailbox, 20.0) == jobs.OK
        gpu.join()
        assert log.tolist() == [good.expected(0, l) for l in range(good.layers)]


def test_a_mailbox_wants_aligned_zeroed_bytes():
    with pytest.raises(ValueError, match="memory: wants 768 B"):
        team.Mailbox(np.zeros(100, np.uint8), 2)
    bench = Bench(layers=2)
    with team.Team(threads=1) as crew, pytest.raises(ValueError, match="has 2 layers, the program 3"):
        crew.play(Bench(layers=3).program, bench.mailbox)


def test_a_dropped_team_frees_its_threads():
    crew = team.Team(threads=2)
    worker = crew._workers[0]
    del crew
    gc.collect()
    worker.join(5.0)
    assert not worker.is_alive()
