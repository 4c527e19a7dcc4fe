"""A tiny decoder whose logits depend on the KV that is really stored in the cache: a wrong, stale or shared page changes its answer."""

import torch

from hetero.arch import spec
from hetero.engine.engine import Engine
from hetero.memory.cache import Cache

VOCAB = 61
TABLE = torch.randn(8191, VOCAB, generator=torch.Generator().manual_seed(1)) * 3


def windows(window: int | tuple[int | None, ...] | None) -> tuple[int | None, ...]:
    """Of each of the layers: two of one window, or as given."""
    return window if isinstance(window, tuple) else (window, window)


def model(window: int | tuple[int | None, ...] | None = None, stateful: bool = False) -> spec.Model:
    parts = [spec.GQA(heads=1, kv_heads=1, head_dim=2, rope=None, window=w) for w in windows(window)] + [spec.GatedDeltaNet(1, 1, 1, 1, 2)] * stateful
    return spec.Model("fake", 2, VOCAB, 1e-6, tuple(spec.Layer(part, spec.Dense(1)) for part in parts), True, {}, 4096)


class FakeDecoder:
    """Each layer stores (token, position) of what it is given; the next token hashes, per row, everything the row may see, exactly in integers."""

    def __init__(self, window: int | tuple[int | None, ...] | None = None, poison: int | None = None) -> None:
        self.windows, self.poison, self.steps, self.sizes = windows(window), poison, 0, []

    def __call__(self, step, cache):
        self.steps += 1
        self.sizes.append(len(step.tokens))
        size = cache.page_size
        for l in range(len(self.windows)):
            kv = cache.layer(l)
            slots = step.of(kv.group).slots
            for value, part in ((step.tokens, kv.keys), (step.positions, kv.values)):
                part[slots // size, 0, slots % size] = torch.stack([value, value + l], -1).to(part.dtype)
        starts = step.starts.tolist()
        owner = [s for s in range(len(starts) - 1) for _ in range(starts[s], starts[s + 1])]
        for state in cache.states.values():
            self.states(step, state, starts)
        for s in range(len(starts) - 1):                                             # the last row of each sequence sees the most
            self.row(step, cache, s, int(step.positions[starts[s + 1] - 1]))
        logits = [self.row(step, cache, owner[r], int(step.positions[r])) for r in step.wanted.tolist()]
        logits = torch.stack(logits) if logits else torch.zeros(0, VOCAB)
        return torch.cat([logits, torch.full((len(logits), 3), 1e4)], 1)             # three padded columns that would always win

    def states(self, step, state, starts):
        """Each token's state hashes all tokens before it; the state knows how many they were."""
        self.hashes = []
        for s in range(len(starts) - 1):
            slot = int(step.states[s])
            for t in range(starts[s], starts[s + 1]):
                position = int(step.positions[t])
                if position == 0:
                    state.conv[slot], state.memory[slot] = 0, 0
                assert int(state.conv[slot, 0, 0]) == position, "a state of another place"
                state.conv[slot] = position + 1
                state.memory[slot] = (state.memory[slot] * 31 + step.tokens[t]) % 65521
                self.hashes.append(int(state.memory[slot]))

    def row(self, step, cache, s, position):
        size, hashed, seen = cache.page_size, 7, []
        for l, window in enumerate(self.windows):
            kv = cache.layer(l)
            where = torch.arange(0 if window is None else max(0, position - window + 1), position + 1)
            page = step.of(kv.group).pages[s][where // size].long()
            assert (page >= 0).all(), "a needed page was given back"
            tokens, places = kv.keys[page, 0, where % size], kv.values[page, 0, where % size]
            assert torch.equal(places[:, 1], (where + l).float()), "another sequence's or a stale page"
            hashed = (hashed * 31 + int((tokens[:, 1].long() * (where % 13 + 1)).sum())) % 1000003
            seen += tokens[:, 0].tolist()
        if cache.states:
            hashed += self.hashes[int(step.starts[s]) + position - int(step.positions[step.starts[s]])]
        logits = TABLE[hashed % len(TABLE)]
        if self.poison is not None and self.poison in seen:
            logits = logits.clone().index_fill_(0, torch.tensor([5]), torch.nan)
        return logits

    def diagnose(self, step, cache):
        return 1


def engine(pages=64, page_size=4, host_pages=0, window=None, limits=None, context=200, eos=(0,), poison=None, marks=None, **kw):
    from hetero.engine.scheduler import Limits
    limits = limits or Limits(max_batch=4, chunk_tokens=16)
    cache = Cache(model(window, marks is not None), pages, page_size, "f32", host_pages=host_pages, rows=limits.max_batch, marks=marks or 0)
    return Engine(FakeDecoder(window, poison), cache, VOCAB, context, eos, limits, **kw)


def run(engine, check=True):
    """Steps until idle: {(id, index): [outputs]}"""
    told = {}
    while not engine.idle:
        for output in engine.step():
            told.setdefault((output.id, output.index), []).append(output)
        if check:
            engine.scheduler.check()
    return told


def tokens(outputs):
    return [t for o in outputs for t in o.tokens]
