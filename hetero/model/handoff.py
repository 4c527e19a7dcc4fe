"""Routed layers computed by the CPU's team in the middle of a GPU's step: memory that both sides see, flags, and what happens when one side fails.

Inside a captured graph nothing of Python runs between layers. Kinds, best first:
"flags"     the posting kernel raises a flag, the taking kernel spins on the answer's
"memops"    the posting kernel raises a flag, a stream memory operation waits for the answer's
"callback"  a host function in the graph runs the layer
Outside of a graph a layer is computed eagerly, through staging memory. The protocol: the GPU alone raises requests, the CPU alone resets
(`cpu_kernels.team.Mailbox`), so a graph launched ahead cannot be mistaken for the running one. After a failure the CPU has made every wait true:
the GPU runs to its end with garbage, is drained, and the flags are cleared before anything else is launched.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from cpu_kernels import ExpertLayer
from cpu_kernels.jobs import LATE, LOST, OK
from cpu_kernels.team import Mailbox, Prepared, Program, Team, host_function
from hetero.errors import EngineFailed
from hetero.gpu import driver, mailbox
from hetero.gpu.cuda import CudaRoute
from hetero.gpu.ops import Addend, Route, Row
from hetero.model.cached import Cached

KINDS = ("flags", "memops", "callback")
Jobs = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], list[Prepared]]     # x, ids, weights, out of some tokens -> a job per layer
POLL_S = 1.2e-6                          # one look at host memory over PCIe
LINE = 128


class Handoff:
    """The mailbox of a model's routed layers on one device, for steps of up to `tokens` tokens. Not thread-safe: one thread runs the steps."""

    def __init__(self, jobs: Jobs, layers: int, team: Team, hidden: int, top_k: int, tokens: int, device: torch.device, dtype: torch.dtype,
                 kind: str = "flags", deadline_s: float = 2.0) -> None:
        self.jobs, self.layers, self.team, self.device, self.dtype, self.kind, self.deadline_s = jobs, layers, team, device, dtype, kind, deadline_s
        self.hidden, self.top_k, self.tokens = hidden, top_k, tokens
        self.recording = False
        self.seconds_per_layer = 0.0     # measured by the probe: what the handoff adds to a layer
        self.spent_s = 0.0               # of the CPU, flag seen to answer given, over all steps
        self.wire = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        pinned = device.type == "cuda"
        flags = torch.zeros(Mailbox.nbytes(layers) + LINE, dtype=torch.uint8, pin_memory=pinned)
        start = -flags.data_ptr() % LINE
        self.flags = Mailbox(flags[start:start + Mailbox.nbytes(layers)].numpy(), layers)
        self.x = torch.zeros(tokens, hidden, dtype=self.wire, pin_memory=pinned)
        self.ids = torch.full((tokens, top_k), -1, dtype=torch.int32, pin_memory=pinned)
        self.weights = torch.zeros(tokens, top_k, pin_memory=pinned)
        self.out = torch.zeros(tokens, hidden, pin_memory=pinned)
        self.live = torch.zeros(1, dtype=torch.int32, device=device)
        self.arrived = torch.zeros(1, dtype=torch.int32, device=device)
        self.stage = Stage(self, 0)
        self._programs: dict[int, Program] = {}
        self._calls: dict[int, Calls] = {}

    # -- the GPU's side, enqueued --------------------------------------------------------------------------------------------------------------

    def post(self, layer: int, x: Tensor, chosen: tuple[Tensor, Tensor] | mailbox.Choice, slots: mailbox.Slots | None = None) -> None:
        """x [T, H] and what was chosen ([T, k]) of the layer-th routed layer, into the mailbox; experts with a slot are not asked of the CPU."""
        T = x.shape[0]
        flag = 0 if self.kind == "callback" else self.flags.request(layer)
        mailbox.post(x, chosen, self.live, (self.x[:T], self.ids[:T], self.weights[:T]), self.arrived, flag, slots)
        if self.kind == "callback":
            self.calls(T).enqueue(layer, torch.cuda.current_stream().cuda_stream)

    def take(self, layer: int, T: int, hits: Tensor | None = None) -> mailbox.Awaited:
        """The layer's answer [T, H], to be waited for by the kernel that needs it; `hits` [T, H] f32 are added."""
        flag = self.flags.done(layer)
        if self.kind == "memops":
            driver.wait_flag(torch.cuda.current_stream().cuda_stream, flag)
        return mailbox.Awaited(self.out[:T], flag if self.kind == "flags" else 0, self.flags.error(), int(2 * self.deadline_s / POLL_S), self.device,
                               self.dtype, hits)

    def close_step(self) -> None:
        """After the last layer and all that follows it."""
        if self.kind != "callback":
            mailbox.end(self.flags.request(self.layers), self.live)

    # -- the CPU's side ------------------------------------------------------------------------------------------------------------------------

    def program(self, T: int) -> Program:
        """Every layer's job on the first T rows of the mailbox, made once."""
        if T not in self._programs:
            self._programs[T] = Program(self.prepared(T))
        return self._programs[T]

    def prepared(self, T: int) -> list[Prepared]:
        return self.jobs(numpy_of(self.x[:T]), self.ids[:T].numpy(), self.weights[:T].numpy(), self.out[:T].numpy())

    def calls(self, T: int) -> "Calls":
        if T not in self._calls:
            self._calls[T] = Calls(self, self.prepared(T))
        return self._calls[T]

    def ready(self, T: int) -> None:
        """Makes and compiles the CPU's side of steps of T tokens: to be done before such a step is launched, as the GPU does not wait for ever."""
        if self.kind == "callback":
            self.calls(T)
        else:
            self.program(T)

    def play(self, T: int) -> None:
        """The CPU's side of a launched step of T tokens; returns when the last layer is answered. Raises EngineFailed, the GPU drained."""
        if self.kind == "callback":
            torch.cuda.current_stream(self.device).synchronize()
            self.calls(T).check()
            return
        program = self.program(T)
        try:
            why = self.team.play(program, self.flags, self.deadline_s)
        except BaseException:
            self.recover()
            raise
        if why != OK:
            failed = self.failed(why, program)
            self.recover()
            raise failed
        self.spent_s += float((program.times[:, 1] - program.times[:, 0]).sum()) * 1e-9
        if self.gave_up():
            raise EngineFailed(f"the GPU gave up waiting for the CPU experts after {2 * self.deadline_s:g} s", "the step's requests are lost")

    def failed(self, why: int, program: Program) -> EngineFailed:
        """What to say about a step that ended early: which layer, and whose fault."""
        times = program.times
        last = int(np.argmax(times[:, 0])) if times.any() else -1
        answered = last < 0 or times[last, 1] >= times[last, 0]
        layer = (last + 1) % self.layers if answered else last
        if why == LATE and answered:
            return EngineFailed(f"the GPU did not ask for routed layer {layer} within {self.deadline_s:g} s", "look for a GPU error above", layer)
        cause = {LATE: f"no answer within {self.deadline_s:g} s", LOST: "a thread of the team did not come back; the team was replaced"}.get(why)
        return EngineFailed(f"the CPU experts of routed layer {layer} failed: {cause or self.team.failure() or 'the job was given up'}",
                            "the step's requests are lost, the next ones can go on", layer)

    def recover(self) -> None:
        """Every wait comes true, the GPU is drained, all flags are cleared; programs are made anew, as the team may be a new one."""
        self.flags.release()
        self.drain()
        self.flags.clear()
        self.arrived.zero_()
        self._programs.clear()

    def drain(self) -> None:
        """Waits for all that the device was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gave_up(self) -> bool:
        """True once when a spinning kernel reached its limit: that step's output is garbage."""
        if not self.flags.erred:
            return False
        self.recover()
        return True


class Calls:
    """Layers as host functions of a graph (kind "callback"), each with a record that the function reads: what to run, and where to put the code."""

    def __init__(self, handoff: Handoff, jobs: list[Prepared]) -> None:
        self.handoff, self.jobs, self.function = handoff, jobs, host_function()
        self.records = np.zeros((len(jobs), 5), np.int64)
        self.aim()

    def aim(self) -> None:
        for i, job in enumerate(self.jobs):
            self.records[i] = (self.handoff.team.control, job.job, job.arguments, int(self.handoff.deadline_s * 1e9), 0)

    def enqueue(self, layer: int, stream: int) -> None:
        driver.host_function(stream, self.function, self.records[layer].ctypes.data)

    def check(self) -> None:
        """EngineFailed naming the first layer whose function ended badly."""
        bad = np.flatnonzero(self.records[:, 4])
        if bad.size:
            self.records[:, 4] = 0
            self.aim()
            cause = self.handoff.team.failure() or "no answer in time"
            raise EngineFailed(f"the CPU experts of routed layer {bad[0]} failed: {cause}", "", int(bad[0]))


class Stage:
    """Pinned memory through which a layer is computed outside of a graph, for up to `tokens` tokens."""

    def __init__(self, handoff: Handoff, tokens: int) -> None:
        pinned = handoff.device.type == "cuda"
        self.tokens = tokens
        self.x = torch.empty(tokens, handoff.hidden, dtype=handoff.wire, pin_memory=pinned)
        self.ids = torch.empty(tokens, handoff.top_k, dtype=torch.int32, pin_memory=pinned)
        self.weights = torch.empty(tokens, handoff.top_k, pin_memory=pinned)
        self.out = torch.empty(tokens, handoff.hidden, pin_memory=pinned)
        self.there = torch.cuda.Event() if pinned else None


def numpy_of(x: Tensor) -> np.ndarray:
    """bf16 as uint16 bits, others as they are."""
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def jobs_of(layers: Sequence[ExpertLayer], team: Team) -> Jobs:
    """What a Handoff runs for routed layers."""
    return lambda x, ids, weights, out: [layer.prepared(x, ids, weights, out, team) for layer in layers]


class HandedOver:
    """The executor of one routed layer: experts on the CPU, but for those that have a slot on the GPU, where everything around them is too.
    `index` counts routed layers."""

    def __init__(self, handoff: Handoff, index: int, layer: ExpertLayer, isa: str, cached: Cached | None = None) -> None:
        self.handoff, self.index, self.layer, self.isa, self.cached = handoff, index, layer, isa, cached
        self.T = 0
        self.hits: Tensor | None = None

    def begin(self, x: Tensor, logits: Tensor, route: Route) -> None:
        if self.handoff.recording and isinstance(route, CudaRoute) and route.fused:
            self.record(x, mailbox.Choice(route.part, logits, route.correction))
        else:
            self.start(x, *route(logits))

    def record(self, x: Tensor, chosen: tuple[Tensor, Tensor] | mailbox.Choice) -> None:
        self.T, c = x.shape[0], self.cached
        self.handoff.post(self.index, x, chosen, None if c is None else c.slots(self.T))
        self.hits = None if c is None else c.run(x)

    def start(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        h, self.T = self.handoff, x.shape[0]
        if h.recording:
            self.record(x, (ids, weights))
            return
        if h.stage.tokens < self.T:
            h.stage = Stage(h, self.T)
        for there, here in ((h.stage.x, x), (h.stage.ids, ids), (h.stage.weights, weights)):
            there[:self.T].copy_(here, non_blocking=True)
        if h.stage.there is not None:
            h.stage.there.record()

    def finish(self) -> Addend:
        h, T = self.handoff, self.T
        if h.recording:
            return h.take(self.index, T, self.hits)
        s = h.stage
        if s.there is not None:
            s.there.synchronize()
        self.layer.run(numpy_of(s.x[:T]), s.ids[:T].numpy(), s.weights[:T].numpy(), s.out[:T].numpy(), h.team)
        return s.out[:T].to(h.device, h.dtype, non_blocking=True)

    def row(self) -> Row:
        store, team = self.layer.store, self.handoff.team
        handed = f"handoff by {self.handoff.kind}, {self.handoff.seconds_per_layer * 1e6:.1f} us per layer"
        return Row("experts", "cpu", self.layer.kernel(), store.form, store.experts * store.record_nbytes, self.isa, team.threads,
                   team.cores, "; ".join(filter(None, (handed, self.layer.refused))))
