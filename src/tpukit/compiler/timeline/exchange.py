"""Collectives between slices: what the data-centre network carries, and how long that takes."""

import math
import re
from dataclasses import dataclass

from ..hlo import Instruction
from .machine import Machine

_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_KIND = re.compile(r'_xla_megascale_transfer_type="([A-Z_]+)"')
_SLICES = re.compile(r'_xla_megascale_target="\{([\d,]*)\}')


@dataclass(frozen=True)
class Exchange:
    """One device's part of a collective between slices.

    The compiler writes it as a send and a receive with the same rendezvous; the hosts do the rest.

    Attributes:
        name: The rendezvous.
        kind: As the compiler calls it, e.g. "ALL_REDUCE".
        slices: How many take part.
        sent_bytes: What the device hands to its host.
    """

    name: str
    kind: str
    slices: int
    sent_bytes: int

    @classmethod
    def of(cls, instruction: Instruction) -> "Exchange":
        """Read a `send` or `recv`; one that names no collective is a plain message."""
        rendezvous, kind, slices = (
            pattern.search(instruction.attributes) for pattern in (_RENDEZVOUS, _KIND, _SLICES)
        )
        return cls(
            name=rendezvous[1] if rendezvous else instruction.name,
            kind=kind[1] if kind else "",
            slices=len(slices[1].split(",")) if slices else 2,
            sent_bytes=max((shape.bytes for shape in instruction.shapes), default=0),
        )

    @property
    def wire_bytes(self) -> float:
        """Bytes that leave the device's share of its host's network card, and come in.

        No algorithm needs fewer: a reduced array is scattered and gathered once each, a gathered
        one arrives from every other slice.
        """
        others = self.slices - 1
        match self.kind:
            case "ALL_REDUCE":
                return 2.0 * self.sent_bytes * others / self.slices
            case "ALL_GATHER":
                return float(self.sent_bytes * others)
            case "REDUCE_SCATTER" | "ALL_TO_ALL":
                return self.sent_bytes * others / self.slices
            case _:
                return float(self.sent_bytes)

    def seconds(self, machine: Machine) -> float:
        """Time on an idle network."""
        return self.wire_bytes / machine.dcn_bytes_per_s


def waiting_share(slices: int, *, per_doubling: float) -> float:
    """How much longer a step takes because slices wait for the slowest of them at every exchange.

    Delays of machines have long tails, and the longest of n such delays grows with log n.
    """
    return per_doubling * math.log2(max(1, slices))
