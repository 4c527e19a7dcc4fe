"""The step that captured graphs read: one copy brings it, padded rows write nothing and see nothing."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="there is no triton for this platform")

from hetero.engine.graphs import Staged, sizes_to
from hetero.gpu.ops import Step


def step(n, width):
    t = torch.arange(n)
    return Step(t + 5, t.int() + 7, torch.arange(n + 1).int(), t.int() + 8, (torch.arange(n * width).int() + 1).view(n, width), t + 90, t.int() + 2, t, 1)


def test_a_step_is_staged_whole_and_its_padding_is_of_nobody():
    staged = Staged(8, 5, torch.device("cpu"))
    staged.load(step(8, 5), 8, 8, spare=40)
    staged.load(step(3, 2), 3, 4, spare=40)
    got, want = staged.part(4), step(3, 2)
    for name in ("tokens", "slots", "positions", "lengths", "states"):
        assert torch.equal(vars(got)[name][:3], vars(want)[name]), name
    assert torch.equal(got.pages[:3, :2], want.pages) and staged.live.tolist() == [3]
    assert (got.tokens[3], got.slots[3], got.positions[3], got.lengths[3], got.states[3], got.pages[3, 0]) == (0, -1, 0, 1, 40, -1)
    assert got.starts.tolist() == [0, 1, 2, 3, 4] and got.longest == 1 and got.wanted.tolist() == [0, 1, 2, 3]


def test_graphs_are_captured_for_small_batches_and_every_eighth():
    assert sizes_to(1) == (1,) and sizes_to(20) == (1, 2, 4, 8, 16, 20) and sizes_to(0) == ()


def test_each_group_of_layers_has_its_page_table_and_slots_staged():
    staged, given = Staged(8, 5, torch.device("cpu"), groups=2), step(3, 4)
    staged.load(step(8, 5), 8, 8, spare=40)
    staged.load(dataclasses.replace(given, others=((given.pages + 100, given.slots + 100),)), 3, 4, spare=40)
    for group, more in ((0, 0), (1, 100)):
        got = staged.part(4).of(group)
        assert torch.equal(got.pages[:3, :4], given.pages + more) and torch.equal(got.slots[:3], given.slots + more)
        assert (got.slots[3], got.pages[3, 0]) == (-1, -1) and torch.equal(got.tokens[:3], given.tokens)
