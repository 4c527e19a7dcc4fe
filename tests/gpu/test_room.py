"""Memory of a recorded step: live tensors never share bytes, dead ones give theirs on."""
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero.gpu.room import Room


def test_what_nothing_holds_is_given_to_the_next_and_a_view_holds_it() -> None:
    room = Room()
    first = room.empty((4, 16))
    at = first.data_ptr()
    view = first[1:3]
    del first
    second = room.empty((4, 16))
    assert second.data_ptr() != at
    del view
    assert room.empty((2, 8), torch.int32).data_ptr() == at
    assert room.held == 2 * 256


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=60))
def test_tensors_that_are_alive_keep_what_was_written(steps: list[tuple[int, int]]) -> None:
    room, live = Room(), dict[int, torch.Tensor]()
    for number, (place, n) in enumerate(steps):
        live.pop(place, None)
        live[place] = room.empty((n, 3)).fill_(number)
        assert live[place].data_ptr() % 64 == 0
        for t in live.values():
            assert bool((t == t[0, 0]).all())
    assert len({t.data_ptr() for t in live.values()}) == len(live)
