"""The expert cache's policy: what is where stays consistent whatever comes, hot experts come in, even routing moves nothing."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_kernels import ExpertStore
from hetero.memory.residents import Residents
from hetero.memory.slots import SlotMemory
from hetero.model.drawn import drawn


def consistent(r: Residents, flying: list) -> None:
    layers = len(r.where)
    for l in range(layers):
        taken = [int(s) for s in r.where[l] if s >= 0] + [s.slot for s in flying if s.layer == l]
        assert len(set(taken)) == len(taken) == r.slots and set(taken) == set(range(r.slots))
        assert set(np.flatnonzero(r.coming[l])) == {s.into for s in flying if s.layer == l}
        assert not (r.coming[l] & (r.where[l] >= 0)).any()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(2, 9), st.data())
def test_every_slot_has_one_expert_or_one_on_its_way(layers, experts, data):
    slots = data.draw(st.integers(1, experts))
    r, flying, hits, asked = Residents(layers, experts, slots, half_life=4, chance=0.0), [], 0, 0
    for _ in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["step", "step", "swap", "land", "prompt"]))
        if what == "step":
            ids = np.array(data.draw(st.lists(st.integers(-1, experts - 1), min_size=2 * layers, max_size=2 * layers)), np.int32).reshape(layers, 2)
            asked += int((ids >= 0).sum())
            hits += sum(int(r.where[l, e] >= 0) for l in range(layers) for e in ids[l] if e >= 0)
            r.saw(ids)
        elif what == "swap":
            made = r.swaps(data.draw(st.integers(0, 3)))
            assert all(r.where[s.layer, s.out] == -1 and r.where[s.layer, s.into] == -1 for s in made)
            flying += made
        elif what == "land" and flying:
            r.landed([flying.pop(data.draw(st.integers(0, len(flying) - 1)))])
        elif what == "prompt":
            r.prompted(np.ones((layers, experts)), 7)
        consistent(r, flying)
    assert (r.hits, r.asked) == (hits, asked)


def play(law: str, slots: int, steps: int, per_step: int = 2) -> Residents:
    layers, experts, k = 4, 64, 4
    r = Residents(layers, experts, slots)
    draws = np.stack([drawn(law, experts, k, max(steps, 3400), l) for l in range(layers)])
    for i in range(steps):
        r.saw(draws[:, i])
        r.landed(r.swaps(per_step))
    return r


def test_hot_experts_come_in_until_nearly_all_that_can_be_found_is_found():
    r = play("zipf:1.2", 16, 3000)
    r.hits = r.asked = 0
    for i in range(400):
        r.saw(TAIL[:, i])
    best = np.mean([np.sort(np.bincount(row.ravel(), minlength=64))[-16:].sum() / row.size for row in TAIL])
    assert r.hit_rate > best - 0.05 > 0.5


TAIL = np.stack([drawn("zipf:1.2", 64, 4, 3400, l)[3000:] for l in range(4)])


def test_even_routing_moves_next_to_nothing():
    r = play("uniform", 16, 2000)
    assert r.swapped < 2000 * 2 * 0.02
    assert abs(r.hit_rate - 0.25) < 0.02


def test_with_a_slot_for_everybody_nothing_moves_and_everything_is_found():
    r = Residents(3, 8, 8)
    for _ in range(5):
        r.saw(np.array([[1, 2], [3, -1], [7, 0]]))
        assert r.swaps(10) == []
    assert r.hit_rate == 1.0


def test_counts_survive_a_very_long_run():
    r = Residents(1, 4, 1, half_life=1)
    for _ in range(2000):
        r.saw(np.array([[2]]))
    assert r.unit < 1e101 and np.isfinite(r.counts).all()
    assert 1.9 < r.counts[0, 2] / r.unit < 2.1                 # 1 + 1/2 + 1/4 + ...


def test_a_prompt_brings_in_what_it_asked_for():
    r = Residents(2, 8, 2)
    counts = np.zeros((2, 8))
    counts[0, 5], counts[1, 7] = 900, 900
    r.prompted(counts, 1000)
    assert {(s.layer, s.into) for s in r.swaps(10)} == {(0, 5), (1, 7)}


def test_memory_behind_the_slots_holds_the_bytes_of_whoever_the_table_names():
    rng = np.random.default_rng(0)
    stores = []
    for _ in range(2):
        store = ExpertStore("int8_g32", 6, 64, 64)
        for e in range(6):
            store.put(e, *(rng.standard_normal((64, 64), np.float32) for _ in range(3)))
        stores.append(store)
    m = SlotMemory(stores, 2, 1, 2, 0, torch.device("cpu"))

    def right() -> None:
        for l, store in enumerate(stores):
            for e in range(6):
                if (slot := int(m.table[l, e])) >= 0:
                    assert np.array_equal(m.records[l].numpy()[slot * store.record_nbytes:(slot + 1) * store.record_nbytes], store.record(e))
    right()
    for _ in range(24):
        m.asked[:, 0] = torch.tensor([[3, 4], [0, 5]], dtype=torch.int32)
        m.turn(1)
        right()
    assert m.table[0].tolist() == [-1, -1, -1, 0, 1, -1] or m.table[0].tolist() == [-1, -1, -1, 1, 0, -1]
    assert int(m.table[1, 0]) >= 0 and int(m.table[1, 5]) >= 0
    starts = torch.tensor([0, 0, 500, 500, 500, 500, 500], dtype=torch.int32)
    m.prompted(0, starts, 500)
    m.prompted(1, starts, 500)
    m.asked.fill_(-1)
    for _ in range(12):
        m.turn(1)
        right()
    assert int(m.table[0, 1]) >= 0 and m.residents.hits > 20
