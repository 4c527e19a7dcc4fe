"""CPU kernels for mixture-of-experts layers: packed weight formats, a team of pinned threads, and the routed layer.

Knows memory and numbers only: numpy views, ids, scales. Knows no tensor library, no layer number and no model name.
"""
from .formats import FORMATS, Format
from .moe import Act, ExpertLayer
from .store import ExpertStore
from .team import Mailbox, Program, Team

__all__ = ["FORMATS", "Act", "ExpertLayer", "ExpertStore", "Format", "Mailbox", "Program", "Team"]
