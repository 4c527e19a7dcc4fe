"""The CPU's side of the handoff against a pretend GPU: a thread that follows the protocol on the same memory. Needs no GPU."""

import threading
import time

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="there is no triton for this platform")

from cpu_kernels import ExpertLayer, ExpertStore
from cpu_kernels.team import Team
from hetero.errors import EngineFailed
from hetero.model.handoff import HandedOver, Handoff, jobs_of, numpy_of

E, H, I, K, L = 6, 64, 96, 2, 3


@pytest.fixture(scope="module")
def team():
    with Team(threads=2) as t:
        yield t


@pytest.fixture(scope="module")
def layers():
    rng = np.random.default_rng(0)
    made = []
    for _ in range(L):
        store = ExpertStore("int8_g32", E, H, I)
        for e in range(E):
            store.put(e, *(rng.standard_normal(s, np.float32) * 0.1 for s in ((I, H), (I, H), (H, I))))
        made.append(ExpertLayer(store))
    return made


@pytest.fixture
def handoff(team, layers):
    return Handoff(jobs_of(layers, team), L, team, H, K, 4, torch.device("cpu"), torch.bfloat16, deadline_s=0.5)


class PretendGpu(threading.Thread):
    """One step of T tokens: per layer stores x, ids, weights, raises the request, waits for the answer and keeps it; then the end of the step."""

    def __init__(self, handoff, T, ids, skip=None):
        super().__init__(daemon=True)
        self.h, self.T, self.ids, self.skip = handoff, T, ids, skip
        self.x = torch.randn(L, T, H).bfloat16()
        self.w = torch.rand(L, T, K)
        self.answers = []

    def run(self):
        request, words = self.h.flags, self.h.flags.memory.view(np.uint32)
        base = self.h.flags.memory.ctypes.data
        for l in range(L):
            self.h.x[:self.T], self.h.ids[:self.T], self.h.weights[:self.T] = self.x[l], self.ids, self.w[l]
            if l == self.skip:
                return
            words[(request.request(l) - base) // 4] = 1
            while words[(request.done(l) - base) // 4] != 1:
                time.sleep(0)
            self.answers.append(self.h.out[:self.T].clone())
        words[(request.request(L) - base) // 4] = 1


def some_ids(T):
    return torch.randint(0, E, (T, K), dtype=torch.int32)


def check(gpu, layers, team):
    for l, answer in enumerate(gpu.answers):
        want = np.zeros((gpu.T, H), np.float32)
        layers[l].run(numpy_of(gpu.x[l]), gpu.ids.numpy(), gpu.w[l].numpy(), want, team)
        assert np.array_equal(answer.numpy(), want)


@pytest.mark.parametrize("T", [1, 2, 4])
def test_steps_in_a_row_give_each_layer_its_own_answer(handoff, layers, team, T):
    for _ in range(20):
        gpu = PretendGpu(handoff, T, some_ids(T))
        gpu.start()
        handoff.play(T)
        gpu.join()
        assert len(gpu.answers) == L
        check(gpu, layers, team)


def test_a_failing_layer_is_named_the_gpu_freed_and_the_next_step_right(handoff, layers, team):
    gpu = PretendGpu(handoff, 1, torch.tensor([[0, E + 3]], dtype=torch.int32))
    handoff.drain = gpu.join
    gpu.start()
    with pytest.raises(EngineFailed, match="layer 0") as caught:
        handoff.play(1)
    assert caught.value.layer == 0 and not gpu.is_alive()
    assert handoff.flags.flags() == ([0] * (L + 1), [0] * L, 0)
    again = PretendGpu(handoff, 1, some_ids(1))
    again.start()
    handoff.play(1)
    again.join()
    check(again, layers, team)


def test_a_gpu_that_does_not_come_is_an_error_at_the_deadline(handoff, layers, team):
    gpu = PretendGpu(handoff, 1, some_ids(1), skip=1)
    gpu.start()
    began = time.monotonic()
    with pytest.raises(EngineFailed, match="GPU did not ask for routed layer 1"):
        handoff.play(1)
    assert time.monotonic() - began < 5
    again = PretendGpu(handoff, 1, some_ids(1))
    again.start()
    handoff.play(1)
    again.join()
    check(again, layers, team)


def test_a_kernel_that_gave_up_is_seen_once(handoff):
    words = handoff.flags.memory.view(np.uint32)
    words[(handoff.flags.error() - handoff.flags.memory.ctypes.data) // 4] = 1
    assert handoff.gave_up()
    assert not handoff.gave_up()


def test_outside_of_a_graph_a_layer_is_computed_through_staging_memory(handoff, layers, team):
    executor = HandedOver(handoff, 1, layers[1], "generic")
    for T in (3, 9):
        x, ids, weights = torch.randn(T, H).bfloat16(), some_ids(T), torch.rand(T, K)
        executor.start(x, ids, weights)
        got = executor.finish()
        want = np.zeros((T, H), np.float32)
        layers[1].run(numpy_of(x), ids.numpy(), weights.numpy(), want, team)
        assert torch.equal(got, torch.from_numpy(want).bfloat16())
    assert "handoff by flags" in executor.row().note
