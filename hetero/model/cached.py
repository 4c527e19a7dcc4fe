"""The experts of one routed layer that have a slot on the GPU, within a captured step; knows no other layer and no policy."""

from torch import Tensor

from hetero.gpu import few, mailbox
from hetero.gpu.experts import Shape
from hetero.memory.slots import SlotMemory


class Cached:
    """`index` counts routed layers."""

    def __init__(self, memory: SlotMemory, index: int, shape: Shape) -> None:
        self.memory, self.index, self.shape = memory, index, shape

    def slots(self, tokens: int) -> mailbox.Slots:
        """Where the posting kernel looks experts up, and what it leaves behind."""
        m = self.memory
        return mailbox.Slots(m.table[self.index], m.asked[self.index], m.ids[:tokens], m.slots[:tokens], m.weights[:tokens])

    def run(self, x: Tensor) -> Tensor:
        """x [T, H] as posted -> [T, H] f32: the sum over those of its experts that are here."""
        m, T = self.memory, x.shape[0]
        return few.few(self.shape, x, m.ids[:T], m.slots[:T], m.weights[:T], m.records[self.index])
