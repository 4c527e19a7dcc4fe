"""Memory behind the experts' slots on a GPU, and the table by which a captured step finds them; knows no arithmetic.

Once a step's last layer was answered, while the GPU makes its logits: what the step asked is counted, swaps that have landed are entered in the table
of the next step, new ones are begun. Nothing waits for the device. An expert leaves the table before its slot is written, the next enters it after.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cpu_kernels import ExpertStore
from hetero.errors import DoesNotFit
from hetero.gpu import driver
from hetero.memory.residents import Residents, Swap
from hetero.memory.stream import cut

SHARE = 128                              # one swap per step for so many experts that a token asks for: below a hundredth of the CPU's reading
EVERY = 4                                # steps from one look for swaps to the next
SEEDING, SEEDED_STEPS = 8, 32            # after a prompt: so many times more swaps, for so many steps


@dataclass
class Flight:
    """Swaps whose bytes are on their way; `there` None: on a CPU, at once."""

    swaps: list[Swap]
    there: torch.cuda.Event | None

    @property
    def landed(self) -> bool:
        return self.there is None or self.there.query()


class SlotMemory:
    """`slots` experts of each routed layer; stores in layer order, in one arena that begins at `base`. For steps of up to `tokens` tokens.

    Raises DoesNotFit when the GPU has no room."""

    def __init__(self, stores: Sequence[ExpertStore], slots: int, tokens: int, top_k: int, base: int, device: torch.device) -> None:
        self.stores, self.base, self.device, self.top_k = tuple(stores), base, device, top_k
        pin = device.type == "cuda"
        layers, experts = len(stores), stores[0].experts
        assert all(store.experts == experts for store in stores)
        self.residents = Residents(layers, experts, slots)
        try:
            self.records = [torch.empty(slots * store.record_nbytes, dtype=torch.uint8, device=device) for store in stores]
        except torch.OutOfMemoryError as error:
            need = sum(slots * store.record_nbytes for store in stores)
            raise DoesNotFit(f"{slots} slots per layer for hot experts ({need / 2**30:.1f} GiB)", "a smaller --expert-cache, or off") from error
        self.shadow = torch.from_numpy(self.residents.where.copy())
        self.shadow = self.shadow.pin_memory() if pin else self.shadow
        self.table = self.shadow.to(device)
        self.asked = torch.full((layers, tokens, top_k), -1, dtype=torch.int32, pin_memory=pin)
        self.ids, self.slots = (torch.full((tokens, top_k), -1, dtype=torch.int32, device=device) for _ in range(2))
        self.weights = torch.zeros(tokens, top_k, device=device)
        self.counted = torch.zeros(layers, experts, dtype=torch.int32, device=device)
        self.told = torch.zeros(layers, experts, dtype=torch.int32, pin_memory=pin)
        self.stream = torch.cuda.Stream(device) if pin else None
        self.flights: deque[Flight] = deque()
        self.prompt = self.seeding = self.turns = 0
        self.telling: tuple[Flight, int] | None = None       # counts of a prompt on their way, and its tokens
        for l in range(layers):
            self._copy(l, 0, 0, slots)

    @property
    def nbytes(self) -> int:
        return sum(r.numel() for r in self.records)

    def _copy(self, l: int, expert: int, slot: int, count: int = 1) -> None:
        store = self.stores[l]
        address, nbytes, to = store.address + expert * store.record_nbytes, count * store.record_nbytes, slot * store.record_nbytes
        if self.stream is None:
            start = expert * store.record_nbytes
            self.records[l][to:to + nbytes] = torch.from_numpy(store.buffer.reshape(-1)[start:start + nbytes])
            return
        for at, n in cut(address, nbytes, self.base):
            driver.copy_in(self.records[l].data_ptr() + to + at, address + at, n, self.stream.cuda_stream)

    def _mark(self, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        if stream is None:
            return None
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def _here(self) -> torch.cuda.Stream | None:
        return None if self.stream is None else torch.cuda.current_stream(self.device)

    def prompted(self, l: int, starts: Tensor, tokens: int) -> None:
        """Enqueues the counting of what a prompt's chunk asked of layer l: starts [E + 1] int32, the first row of each expert."""
        self.counted[l] += starts[1:] - starts[:-1]
        self.prompt += tokens if l == 0 else 0

    def turn(self, tokens: int) -> None:
        """After a step of so many tokens was enqueued and all its layers asked what they ask, before the next is enqueued."""
        self.residents.saw(self.asked[:, :tokens].numpy())
        self._hear()
        changed = False
        while self.flights and self.flights[0].landed:
            self.residents.landed(self.flights.popleft().swaps)
            changed = True
        self.turns, self.seeding = self.turns + 1, self.seeding - (self.seeding > 0)
        most = EVERY * max(1, len(self.stores) * self.top_k // SHARE) * (SEEDING if self.seeding else 1)
        swaps = self.residents.swaps(most) if self.turns % EVERY == 0 and len(self.flights) < 4 else []
        if swaps and self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))      # a step may still be reading what leaves
        for swap in swaps:
            self._copy(swap.layer, swap.into, swap.slot)
        if swaps:
            self.flights.append(Flight(swaps, self._mark(self.stream)))
        if swaps or changed:
            self.shadow.numpy()[:] = self.residents.where
            self.table.copy_(self.shadow, non_blocking=True)

    def _hear(self) -> None:
        """What prompts asked, as far as it is known without waiting."""
        if self.telling is not None and self.telling[0].landed:
            self.residents.prompted(self.told.numpy().astype(np.float64), self.telling[1])
            self.telling, self.seeding = None, SEEDED_STEPS
        if self.telling is None and self.prompt:
            self.told.copy_(self.counted, non_blocking=True)
            self.counted.zero_()
            self.telling, self.prompt = (Flight([], self._mark(self._here())), self.prompt), 0
