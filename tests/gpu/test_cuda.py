"""What only a real GPU can show: the handoff and its faults in captured graphs, and a whole model beside the CPU's own answers."""

import threading
import time

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"), pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def team():
    from cpu_kernels.team import Team

    with Team(threads=2) as t:
        yield t


def echo(team, kind="flags", deadline_s=2.0):
    from hetero.model.probe import Echo

    return Echo(kind, team, torch.device("cuda"), torch.bfloat16, 2048, 8, deadline_s)


def a_round_is_right(e, graph, at):
    e.round.fill_(at)
    graph.replay()
    e.h.play(1)
    torch.cuda.synchronize()
    e.compare(at)


@pytest.mark.parametrize("kind", ["flags", "memops", "callback"])
def test_each_kind_of_handoff_echoes_every_round(team, kind):
    assert 0 < echo(team, kind).run() < 5e-3


def test_a_cpu_that_never_comes_is_noticed_and_the_next_step_is_right(team):
    e = echo(team, deadline_s=0.05)
    graph = e.capture()
    e.h.recover()
    began = time.monotonic()
    graph.replay()                                            # and nobody plays
    torch.cuda.synchronize()
    assert time.monotonic() - began < 20
    assert e.h.gave_up() and not e.h.gave_up()
    a_round_is_right(e, graph, 5)


def test_a_gpu_that_never_comes_is_an_error_at_the_deadline_and_the_next_step_is_right(team):
    from hetero.errors import EngineFailed

    e = echo(team, deadline_s=0.1)
    graph = e.capture()
    e.h.recover()
    with pytest.raises(EngineFailed, match="GPU did not ask"):
        e.h.play(1)                                           # and nothing was launched
    a_round_is_right(e, graph, 7)


def test_a_failing_layer_frees_the_gpu_and_the_next_step_is_right(team):
    from hetero.errors import EngineFailed

    e = echo(team)
    graph = e.capture()
    e.h.recover()
    good = e.jobs
    broken = {"now": True}

    def jobs(*arrays):
        from cpu_kernels.team import Prepared

        made = good(*arrays)
        if broken["now"]:
            made[3] = Prepared(fail_address(), made[3].arguments, made[3].keep)
        return made
    e.h.jobs = jobs
    e.h._programs.clear()
    graph.replay()
    with pytest.raises(EngineFailed, match="layer 3"):
        e.h.play(1)
    broken["now"] = False
    a_round_is_right(e, graph, 9)


def fail_address():
    from cpu_kernels.jit import kernel
    from cpu_kernels.team import address

    @kernel
    def fail(control: int, tid: int, threads: int, arguments: int) -> int:
        return 42
    return address(fail)


def test_aborting_from_another_thread_ends_the_step_with_an_error(team):
    from hetero.errors import EngineFailed

    e = echo(team, deadline_s=5.0)
    e.capture()
    e.h.recover()
    threading.Timer(0.2, team.abort).start()
    with pytest.raises(EngineFailed):
        e.h.play(1)                                           # waits for a GPU that was given nothing


def test_a_model_on_the_gpu_says_what_it_says_on_the_cpu():
    from hetero.llm import LLM

    text = "Once upon a time there was a little rabbit who wanted to see the sea. One day he asked his mother if they could go."
    with LLM(device="cpu", packed_cache=False) as cpu:
        ids = list(cpu.encode(text))
        want = cpu.logits(ids).log_softmax(-1)
    with LLM(device="cuda", packed_cache=False) as gpu:
        for path in ("prefill", "decode"):
            got = gpu.logits(ids, path).float().log_softmax(-1)
            assert (want.exp() * (want - got)).sum(-1).mean() < 5e-3, path
        for block in gpu.placed.decoder.blocks:
            block.ffn.experts.least = 1
        got = gpu.logits(ids).float().log_softmax(-1)
        assert (want.exp() * (want - got)).sum(-1).mean() < 5e-3, "streamed"
        assert gpu.generate("Once upon a time")[0].text
        assert gpu.placed.run.replayed > 20
