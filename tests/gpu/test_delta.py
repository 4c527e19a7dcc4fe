"""The gated delta rule: chunks of any size give what token by token gives, and states go on where a sequence stopped."""

import pytest
import torch

from hetero.arch import spec
from hetero.gpu.delta import PlainDelta, delta_chunks, delta_step
from hetero.gpu.ops import DeltaState, Step

PART = spec.GatedDeltaNet(key_heads=2, value_heads=4, key_dim=8, value_dim=6, kernel=4)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tokens", [1, 5, 16, 33])
@pytest.mark.parametrize("chunk", [1, 4, 16, 64])
def test_chunks_give_what_token_by_token_gives(tokens, chunk):
    q, k = (torch.nn.functional.normalize(draw(tokens, 4, 8, seed=s), dim=-1) for s in (1, 2))
    v, g, beta = draw(tokens, 4, 6, seed=3), -draw(tokens, 4, seed=4).abs(), draw(tokens, 4, seed=5).sigmoid()
    state = draw(4, 8, 6, seed=6)
    out, end = delta_chunks(q, k, v, g, beta, state, chunk)
    one, rows = state[None], []
    for t in range(tokens):
        row, one = delta_step(q[t:t + 1], k[t:t + 1], v[t:t + 1], g[t:t + 1], beta[t:t + 1], one)
        rows.append(row)
    torch.testing.assert_close(out, torch.cat(rows), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(end, one[0], atol=2e-5, rtol=1e-4)


def step(counts, starts, slots):
    """A step of len(counts) sequences, sequence s at positions starts[s]... in state slot slots[s]."""
    at, flat = [0], []
    for n, first in zip(counts, starts, strict=True):
        flat += range(first, first + n)
        at.append(len(flat))
    empty = torch.zeros(0, dtype=torch.int64)
    return Step(empty, torch.tensor(flat, dtype=torch.int32), torch.tensor(at, dtype=torch.int32), empty, empty, empty, torch.tensor(slots, dtype=torch.int32),
                empty, max(counts))


def make():
    part = PlainDelta(PART, 1e-6, draw(PART.channels, 4, seed=7), draw(4, seed=8), draw(4, seed=9), draw(6, seed=10).abs())
    nan = torch.nan
    return part, DeltaState(torch.full((3, PART.channels, 3), nan), torch.full((3, 4, 8, 6), nan)), draw(40, PART.channels + PART.values + 8, seed=11)


@pytest.mark.parametrize("cuts", [[40], [1] * 40, [7, 1, 1, 30, 1], [39, 1]])
def test_a_sequence_gives_the_same_however_it_is_cut_and_whatever_its_slot_held(cuts):
    part, state, x = make()
    whole = part(x, state, step([40], [0], [1]))
    _, state, _ = make()
    rows, done = [], 0
    for n in cuts:
        rows.append(part(x[done:done + n], state, step([n], [done], [1])))
        done += n
    assert whole.isfinite().all() and state.memory[0].isnan().all()
    torch.testing.assert_close(torch.cat(rows), whole, atol=2e-5, rtol=1e-4)


def test_neighbours_keep_to_their_own_slots():
    part, state, x = make()
    alone = [part(x[:9], state, step([9], [0], [0])), part(x[9:12], state, step([3], [0], [0]))]
    _, state, _ = make()
    both = part(x[:12], state, step([9, 3], [0, 0], [2, 0]))
    torch.testing.assert_close(both, torch.cat(alone), atol=2e-5, rtol=1e-4)
    after = part(x[20:22], state, step([1, 1], [3, 9], [0, 2]))
    _, again, _ = make()
    part(x[:9], again, step([9], [0], [1]))
    torch.testing.assert_close(after[1:], part(x[21:22], again, step([1], [9], [1])), atol=2e-5, rtol=1e-4)
    assert state.memory[1].isnan().all()
