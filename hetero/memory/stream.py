"""Experts from the host's arena into a ring of slots on the GPU, in an order that is known beforehand and goes round for ever; knows no layer.

Copies run on their own stream as far ahead as the ring has slots, also past the end of a step: the next one finds its first groups there. A slot
is filled again once what was enqueued before `done` has run. Nothing here waits for the device.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hetero.errors import DoesNotFit, UnusableHardware
from hetero.gpu import driver
from hetero.memory.arena import PIECE_BYTES, Arena
from hetero.memory.cost import Machine

SLOTS, WANTED_BYTES = 3, 64 << 20
PROOF_BYTES = 1 << 16                     # of each piece


@dataclass(frozen=True)
class Group:
    """Experts first .. first + count - 1 of one layer, `nbytes` of records one after another at a host address."""

    address: int
    nbytes: int
    first: int
    count: int


def groups_of(address: int, record_nbytes: int, experts: int, wanted_bytes: int = WANTED_BYTES) -> list[Group]:
    """One layer in equal groups: as many experts as divide their number and stay within `wanted_bytes`, at least one."""
    count = max(n for n in range(1, experts + 1) if experts % n == 0 and (n == 1 or n * record_nbytes <= wanted_bytes))
    return [Group(address + e * record_nbytes, count * record_nbytes, e, count) for e in range(0, experts, count)]


def cut(address: int, nbytes: int, base: int, piece_bytes: int = PIECE_BYTES) -> list[tuple[int, int]]:
    """(offset, nbytes) of the copies that move a range of memory registered in pieces from `base` on: none may reach over a piece's end."""
    parts, at = [], 0
    while at < nbytes:
        room = piece_bytes - (address + at - base) % piece_bytes
        parts.append((at, min(room, nbytes - at)))
        at += parts[-1][1]
    return parts


class Pinned:
    """An arena pinned for the GPU, piece by piece: `nbytes` of it, and `why` not all. After huge pages were asked for, never before.

    The pins go when this is closed, or with the arena: the GPU would else go on seeing the old memory behind addresses that are given out again."""

    def __init__(self, arena: Arena, device: torch.device) -> None:
        self.nbytes, self.why, pieces = 0, "", []
        base = int(arena.memory.ctypes.data)
        for start, nbytes in arena.pieces():
            try:
                driver.register(base + start, nbytes)
            except UnusableHardware as error:
                self.why = error.message
                continue
            pieces.append(base + start)
            self.nbytes += nbytes
        self._undo = weakref.finalize(arena, unpin, pieces)
        self._undo.atexit = False                            # the driver may be gone by then, and the process's memory goes anyway
        for start, nbytes in arena.pieces():
            self._prove(arena, start, min(nbytes, PROOF_BYTES), device)

    @staticmethod
    def _prove(arena: Arena, start: int, nbytes: int, device: torch.device) -> None:
        """What a copy brings to the GPU is what the CPU reads at the same address. Raises UnusableHardware."""
        view, there = arena.view(start, nbytes), torch.empty(nbytes, dtype=torch.uint8, device=device)
        driver.copy_in(there.data_ptr(), int(view.ctypes.data), nbytes, torch.cuda.current_stream(device).cuda_stream)
        if not np.array_equal(there.cpu().numpy(), view):
            raise UnusableHardware(f"the GPU sees other bytes than the CPU at offset {start} of the experts' memory", "please report this with the "
                                   "output of hetero doctor; --device cpu works without")

    def close(self) -> None:
        """Nothing on the GPU may read the arena any more."""
        self._undo()


def unpin(pieces: Sequence[int]) -> None:
    for address in pieces:
        driver.unregister(address)


def break_even(record_nbytes: int, experts: int, top_k: int, expert_parameters: int, machine: Machine, most: int) -> int:
    """Tokens from which copying a whole layer takes less time than computing it on the CPU, by the machine's rates; most + 1 when never."""
    copy_s = experts * record_nbytes / machine.pcie_bytes_s
    for tokens in range(1, most + 1):
        used = experts * (1.0 - (1.0 - top_k / experts) ** tokens)
        if max(used * record_nbytes / machine.dram_bytes_s, 2.0 * tokens * top_k * expert_parameters / machine.cpu_flops) > copy_s:
            return tokens
    return most + 1


class Ring:
    """`orders` in the sequence in which they will be asked for, again and again; all lie in one arena that begins at `base`.

    Raises DoesNotFit when the GPU has no room for the slots."""

    def __init__(self, orders: Sequence[Group], base: int, device: torch.device, slots: int = SLOTS) -> None:
        self.orders, self.device = tuple(orders), device
        self.parts = [cut(order.address, order.nbytes, base) for order in orders]
        nbytes = max(order.nbytes for order in orders)
        try:
            self.slots = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(slots)]
        except torch.OutOfMemoryError as error:
            raise DoesNotFit(f"{slots} slots of {nbytes / 2**20:.0f} MiB for streamed experts", "a larger --vram, or a smaller --ctx") from error
        self.stream = torch.cuda.Stream(device)
        self.ready = [torch.cuda.Event() for _ in range(slots)]
        self.free = [torch.cuda.Event() for _ in range(slots)]
        self.issued = self.taken = 0
        self.copied_bytes = 0                                # since it was made; a restart takes nothing back

    @property
    def nbytes(self) -> int:
        return sum(slot.numel() for slot in self.slots)

    def pump(self) -> None:
        """Enqueues copies as far ahead as there are slots."""
        while self.issued < self.taken + len(self.slots):
            i = self.issued % len(self.slots)
            if self.issued >= len(self.slots):
                self.stream.wait_event(self.free[i])
            o = self.issued % len(self.orders)
            for at, nbytes in self.parts[o]:
                driver.copy_in(self.slots[i].data_ptr() + at, self.orders[o].address + at, nbytes, self.stream.cuda_stream)
            self.ready[i].record(self.stream)
            self.copied_bytes += self.orders[o].nbytes
            self.issued += 1

    def next(self) -> tuple[Group, torch.Tensor]:
        """The next group and the slot that holds it, once the current stream gets there."""
        self.pump()
        i = self.taken % len(self.slots)
        torch.cuda.current_stream(self.device).wait_event(self.ready[i])
        return self.orders[self.taken % len(self.orders)], self.slots[i]

    def done(self) -> None:
        """What was enqueued so far is all that reads the slot."""
        self.free[self.taken % len(self.slots)].record(torch.cuda.current_stream(self.device))
        self.taken += 1
        self.pump()

    def restart(self) -> None:
        """The next group asked for is the first: after a step that ended early."""
        torch.cuda.synchronize(self.device)
        self.issued = self.taken = 0
