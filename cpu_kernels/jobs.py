"""What runs inside a team's threads: sharing out tasks, barriers, the workers' loop, dispatch and play; knows memory words only, no Python thread.

**A job** is `@kernel def job(control, tid, threads, arguments) -> int` on four int64, called by every thread (tid 0 is the caller's own).
It returns 0, or a code of its own, or raises. `arguments` is an address of whatever the job's owner put there. Inside a job:

    lo, hi = share(n, tid, threads)                  # a contiguous range of n tasks
    counter = claims(control, tid, owner, stage)     # claim counter of thread `owner`, zero at the job's start, one per stage (STAGES of them)
    t = add(counter, 1)                              # take the next task of that owner's range: own range first, then the others' (stealing)
    if not barrier(control, tid, threads): return 0  # everybody's writes are visible behind it; False: the job was aborted, leave at once
    arrive(control, tid)                             # or the barrier in two halves, with something useful between them:
    arrived(control, tid, threads)                   # 1 go on, 0 not yet, -1 aborted; when out of useful things,
    if not await_all(control, tid, threads): return 0

`team.prepare` makes of it what `Team.run` and `Program` take. Nothing here depends on which thread computes what, so a job
whose tasks write disjoint places gives the same bits for any number of threads. Control words stand on 128 B lines, as the L2
prefetcher pulls pairs of lines; all of them but the claim counters only grow, so nothing is reset on the path.
"""

from .atoms import add, call, clock, fence, load, load32, nap_on, pause, peek, poke, sleep_on, store, store32, wake_all
from .jit import kernel

LINE = 128
MOST = 256                                           # threads
STAGES = 4                                           # claim counters per thread and job
OK, LATE, FAILED, STOPPED, LOST = range(5)           # why a job ended

# line 0, written by the dispatching thread only
SEQ, JOB, ARGUMENTS, THREADS, ROUND = 0, 8, 16, 24, 32
# line 1, rarely written
STOP, ABORT, SPINS, PATIENCE, PARK, DEADLINE, READY, MOST_PATIENCE = (LINE + 8 * i for i in range(8))
SLEEPERS, GO, LAYER, NAPPERS = 2 * LINE, 3 * LINE, 4 * LINE, 5 * LINE
# one line per thread: acknowledged seq, the job's code, status and exception of the job, of a job inside play, own round; clock scratch
OWN = 8 * LINE
CODE, STATUS, INNER, OWN_ROUND, SCRATCH, NAP = 8, 16, 32, 48, 64, 80
ARRIVED = OWN + MOST * LINE
CLAIMS = ARRIVED + MOST * LINE
CONTROL_BYTES = CLAIMS + 2 * STAGES * MOST * LINE
LONG_NS = 200_000                                    # a wait that no difference between threads explains, and how long they spin at most
GRACE_NS = 2_000_000_000                            # after a deadline: how long a worker may take to notice before it counts as lost


@kernel(inner=True)
def share(n: int, tid: int, threads: int) -> tuple[int, int]:
    """The range of n tasks that belongs to tid."""
    return n * tid // threads, n * (tid + 1) // threads


@kernel(inner=True)
def claims(control: int, tid: int, owner: int, stage: int) -> int:
    """Address of the counter from which tasks of `owner` are taken in this job's `stage`."""
    odd = peek(control + OWN + tid * LINE + OWN_ROUND) & 1
    return control + CLAIMS + ((odd * STAGES + stage) * MOST + owner) * LINE


@kernel(inner=True)
def aborted(control: int) -> bool:
    """True when this job is being given up: a long task may look now and then."""
    return load(control + ABORT) != 0


@kernel(inner=True)
def late(control: int, tid: int) -> bool:
    return tid == 0 and clock(control + OWN + SCRATCH) > load(control + DEADLINE)


@kernel(inner=True)
def announce(control: int, address: int, value: int) -> None:
    """Stores a word that others may be waiting for."""
    store(address, value)
    fence()
    if load(control + NAPPERS) > 0:
        wake_all(address)


@kernel(inner=True)
def nap(control: int, tid: int, address: int, value: int) -> None:
    """Sleeps until the word at address may be at least value, 2 ms at most. Whoever sleeps is run soon after it is woken, also among other
    programs; whoever spins or yields among them waits for whole time slices, each thread of the team in turn."""
    own = control + OWN + tid * LINE
    add(control + NAPPERS, 1)
    fence()
    seen = load(address)
    if seen < value:
        poke(own + NAP, 0)
        poke(own + NAP + 8, 2_000_000)
        nap_on(address, seen, own + NAP)
    add(control + NAPPERS, -1)


@kernel(inner=True)
def learn(control: int, slept_ns: int) -> None:
    """A long sleep says that others use these cores: spin less from now on. A short one says that spinning would have been better."""
    store(control + PATIENCE, 64 if slept_ns > LONG_NS else min(load(control + PATIENCE) + 64, load(control + MOST_PATIENCE)))


@kernel(inner=True)
def reached(control: int, tid: int, address: int, value: int, patience: int) -> bool:
    """Waits until the word at address is at least value, spinning first; False when the job was aborted or (thread 0) its deadline passed."""
    spun, since = 0, 0
    while load(address) < value:
        pause()
        spun += 1
        if spun & 63 == 0:
            if load(control + ABORT) != 0:
                return False
            if (spun & 255 == 0 or since != 0) and late(control, tid):
                store(control + ABORT, LATE)
                return False
            if spun > patience:
                if since == 0:
                    since = clock(control + OWN + tid * LINE + SCRATCH)
                nap(control, tid, address, value)
    if since != 0:
        learn(control, clock(control + OWN + tid * LINE + SCRATCH) - since)
    return True


@kernel(inner=True)
def arrive(control: int, tid: int) -> None:
    """First half of a barrier: this thread's writes are done."""
    own = control + ARRIVED + tid * LINE
    announce(control, own, peek(own) + 1)


@kernel(inner=True)
def arrived(control: int, tid: int, threads: int) -> int:
    """Second half: 1 when all have arrived, 0 not yet, -1 when the job was aborted. Never waits."""
    epoch = peek(control + ARRIVED + tid * LINE)
    if tid == 0:
        for other in range(1, threads):
            if load(control + ARRIVED + other * LINE) < epoch:
                if load(control + ABORT) != 0:
                    return -1
                if late(control, tid):
                    store(control + ABORT, LATE)
                    return -1
                return 0
        announce(control, control + GO, epoch)
        return 1
    if load(control + GO) >= epoch:
        return 1
    return -1 if load(control + ABORT) != 0 else 0


@kernel(inner=True)
def await_all(control: int, tid: int, threads: int) -> bool:
    """Second half, waiting; False when the job was aborted."""
    epoch, patience = peek(control + ARRIVED + tid * LINE), load(control + PATIENCE)
    if tid != 0:
        return reached(control, tid, control + GO, epoch, patience)
    for other in range(1, threads):
        if not reached(control, tid, control + ARRIVED + other * LINE, epoch, patience):
            return False
    announce(control, control + GO, epoch)
    return True


@kernel(inner=True)
def barrier(control: int, tid: int, threads: int) -> bool:
    """Waits for all threads of the job; False when the job was aborted."""
    if threads == 1:
        return load(control + ABORT) == 0
    arrive(control, tid)
    return await_all(control, tid, threads)


@kernel(inner=True)
def begin(control: int, tid: int, turn: int) -> None:
    """A new round for this thread: its claim counters of the idle set become zero for the round after."""
    poke(control + OWN + tid * LINE + OWN_ROUND, turn)
    idle = (turn + 1) & 1
    for stage in range(STAGES):
        poke(control + CLAIMS + ((idle * STAGES + stage) * MOST + tid) * LINE, 0)


@kernel(inner=True)
def enter(control: int, tid: int, seq: int) -> None:
    own = control + OWN + tid * LINE
    begin(control, tid, peek(control + ROUND))
    poke(own + INNER, 0)
    store(control + ARRIVED + tid * LINE, seq << 20)
    code = call(peek(control + JOB), control, tid, peek(control + THREADS), peek(control + ARGUMENTS), own + STATUS)
    poke(own + CODE, code)
    if (code != 0 or peek(own + STATUS) != 0) and load(control + ABORT) == 0:
        store(control + ABORT, FAILED)


@kernel
def work(control: int, tid: int) -> int:
    """A worker's whole life."""
    own = control + OWN + tid * LINE
    seq = load(own)
    add(control + READY, 1)
    while True:
        spun = 0
        while load(control + SEQ) == seq:
            pause()
            spun += 1
            if spun & 63 == 0 and (spun > load(control + SPINS) or load(control + PARK) != 0):
                add(control + SLEEPERS, 1)
                fence()
                while load(control + SEQ) == seq:
                    sleep_on(control + SEQ, seq)
                add(control + SLEEPERS, -1)
                break
        seq += 1
        if load(control + STOP) != 0:
            store(own, seq)
            return 0
        enter(control, tid, seq)
        announce(control, own, seq)


@kernel
def publish(control: int) -> int:
    seq = load(control + SEQ) + 1
    store(control + SEQ, seq)
    fence()
    if load(control + SLEEPERS) > 0:
        wake_all(control + SEQ)
    return seq


@kernel
def dispatch(control: int, job: int, arguments: int, deadline_ns: int) -> int:
    """Runs one job on all threads, the calling one included, and waits for them. OK, LATE, FAILED, STOPPED or LOST. Needs no GIL."""
    threads = peek(control + THREADS)
    store(control + ABORT, 0)
    store(control + PARK, 0)
    poke(control + JOB, job)
    poke(control + ARGUMENTS, arguments)
    poke(control + ROUND, peek(control + ROUND) + 1)
    store(control + DEADLINE, clock(control + OWN + SCRATCH) + deadline_ns)
    seq = publish(control)
    enter(control, 0, seq)
    for tid in range(1, threads):
        spun, since = 0, 0
        while load(control + OWN + tid * LINE) < seq:
            pause()
            spun += 1
            if spun & 63 == 0:
                if (spun & 255 == 0 or since != 0) and late(control, 0):
                    if load(control + ABORT) == 0:
                        store(control + ABORT, LATE)
                    if clock(control + OWN + SCRATCH) > load(control + DEADLINE) + GRACE_NS:
                        return LOST
                if spun > load(control + PATIENCE):
                    if since == 0:
                        since = clock(control + OWN + SCRATCH)
                    nap(control, 0, control + OWN + tid * LINE, seq)
        if since != 0:
            learn(control, clock(control + OWN + SCRATCH) - since)
    why = load(control + ABORT)
    if why != 0:                                     # everybody is back: forget what the job left half done
        for line in range(2 * STAGES * MOST):
            poke(control + CLAIMS + line * LINE, 0)
    return why


@kernel(inner=True)
def answered(control: int, flag: int) -> bool:
    """Thread 0 waits for somebody else's flag to be 1."""
    spun = 0
    while load32(flag) != 1:
        pause()
        spun += 1
        if spun & 255 == 0:
            if load(control + ABORT) != 0:
                return False
            if late(control, 0):
                store(control + ABORT, LATE)
                return False
    return True


@kernel(inner=True)
def play(control: int, tid: int, threads: int, arguments: int) -> int:
    """arguments: layers, table of (job, arguments), request flags, done flags, deadline in ns, times of (seen, done) per layer.

    Reset rules: request[l] becomes 0 when it was seen, done[l - 1] too, as request[l] proves that the GPU is past waiting for it. So the
    CPU alone resets, and a step launched ahead cannot be mistaken for this one."""
    layers, table, requests, dones = peek(arguments), peek(arguments + 8), peek(arguments + 16), peek(arguments + 24)
    deadline_ns, times = peek(arguments + 32), peek(arguments + 40)
    own = control + OWN + tid * LINE
    turn = peek(own + OWN_ROUND)
    base = peek(control + ARRIVED + tid * LINE)
    code = 0
    for layer in range(layers):
        if tid == 0:
            store(control + DEADLINE, clock(own + SCRATCH) + deadline_ns)
            if not answered(control, requests + layer * LINE):
                break
            now = clock(own + SCRATCH)
            poke(times + 16 * layer, now)
            store(control + DEADLINE, now + deadline_ns)
            store32(requests + layer * LINE, 0)
            if layer == 0:
                store32(requests + layers * LINE, 0)
                store32(dones + (layers - 1) * LINE, 0)
            else:
                store32(dones + (layer - 1) * LINE, 0)
            announce(control, control + LAYER, base + layer + 1)
        elif not reached(control, tid, control + LAYER, base + layer + 1, load(control + PATIENCE) << 6):
            break
        begin(control, tid, turn + layer + 1)
        code = call(peek(table + 16 * layer), control, tid, threads, peek(table + 16 * layer + 8), own + INNER)
        if code != 0 or peek(own + INNER) != 0:
            if load(control + ABORT) == 0:
                store(control + ABORT, FAILED)
            break
        arrive(control, tid)
        if tid == 0:
            if not await_all(control, tid, threads):
                break
            poke(times + 16 * layer + 8, clock(own + SCRATCH))
            store32(dones + layer * LINE, 1)
    if tid == 0:
        poke(control + ROUND, turn + layers)
        if load(control + ABORT) != 0:              # every wait of the step becomes true: the GPU runs to its end with garbage
            for layer in range(layers):
                store32(dones + layer * LINE, 1)
    return code


@kernel
def wait_flag(flag: int, deadline_ns: int, scratch: int) -> int:
    end = clock(scratch) + deadline_ns
    spun = 0
    while load32(flag) != 1:
        pause()
        spun += 1
        if spun & 255 == 0 and clock(scratch) > end:
            return LATE
    return OK


@kernel
def pauses_ns(count: int, scratch: int) -> int:
    start = clock(scratch)
    for _ in range(count):
        pause()
    return clock(scratch) - start


@kernel
def echo(control: int, tid: int, threads: int, arguments: int) -> int:
    """A job that proves a mailbox. arguments: x, its 8-byte words, 1 when it is bf16, out (x as float32), a second source, its words, a place for
    its copy."""
    if tid == 0:
        x, words, half, out = peek(arguments), peek(arguments + 8), peek(arguments + 16), peek(arguments + 24)
        for i in range(words):
            w = peek(x + 8 * i)
            if half:
                poke(out + 16 * i, ((w & 0xFFFF) << 16) | ((w >> 16) << 48))
                poke(out + 16 * i + 8, (((w >> 32) & 0xFFFF) << 16) | ((w >> 48) << 48))
            else:
                poke(out + 8 * i, w)
        for i in range(peek(arguments + 40)):
            poke(peek(arguments + 48) + 8 * i, peek(peek(arguments + 32) + 8 * i))
    return 0
