"""Time collectives: on the torus by the links they span, between slices over the DCN."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...errors import XLACompilationError
from ..hlo import Collective, Instruction
from .machine import Machine

Coordinate = tuple[int, ...]
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_KIND = re.compile(r'_xla_megascale_transfer_type="([A-Z_]+)"')
_SLICES = re.compile(r'_xla_megascale_target="\{([\d,]*)\}')


@dataclass(frozen=True)
class LinkUse:
    """A collective's time, the network lanes it occupies, and their torus axes."""

    seconds: float
    lanes: frozenset[str]
    axes: str = ""

    @property
    def track(self) -> str:
        """The timeline's name for the links it uses, e.g. "ici x" or "ici xy"."""
        return f"ici {self.axes}".strip()


@dataclass(frozen=True)
class Network:
    """The links between the devices of one program.

    Attributes:
        coordinates: Torus coordinates of each device, in the program's order; the devices of one
            chip have the same.
        slices: Slice number of each device.
    """

    machine: Machine
    coordinates: tuple[Coordinate, ...]
    slices: tuple[int, ...]
    _routes: dict[tuple[tuple[int, ...], ...], tuple[int, int, str]] = field(
        default_factory=dict[tuple[tuple[int, ...], ...], tuple[int, int, str]], repr=False
    )

    def transfer(self, collective: Collective) -> LinkUse:
        """Return the time of `collective` on an idle network."""
        if collective.kind == "collective-permute":
            return self._permute(collective)
        group = collective.groups[0] if collective.groups else ()
        if max(group, default=0) >= len(self.coordinates):
            raise XLACompilationError(
                f"{collective.name} names device {max(group)} of a program of "
                f"{len(self.coordinates)} devices; use the slice that the program was compiled for."
            )
        if len(group) < 2:
            return LinkUse(0.0, frozenset())
        chips = {self.coordinates[device] for device in group}
        extents = self._extents(chips)
        if not extents:  # only the devices of one chip: the link between them is not modelled
            return LinkUse(self.machine.hop_latency_s, frozenset())
        share = (len(chips) - 1) / len(chips)
        rate = sum(self._axis_rate(axis, extent) for axis, extent in extents.items())
        hops = sum(self._hops(axis, extent) for axis, extent in extents.items())
        latency = hops * self.machine.hop_latency_s
        if collective.kind == "all-to-all":
            seconds = max(
                collective.bytes * extent / (4 * self._axis_rate(axis, extent))
                for axis, extent in extents.items()
            )
        elif collective.kind == "reduce-scatter":
            seconds = self._reduce_s(collective.bytes, extents)
        else:
            seconds = collective.bytes * share / rate
            if collective.kind == "all-reduce":  # reduced and scattered, then gathered
                seconds += self._reduce_s(collective.bytes, extents)
                latency *= 2
        axes = "".join(map(_letter, extents))
        lanes = frozenset(f"{axis}{way}" for axis in axes for way in "+-")
        return LinkUse(seconds + latency, lanes, axes)

    def _reduce_s(self, size: int, extents: dict[int, int]) -> float:
        """Return the time to reduce-scatter over one axis after another, each on what is left.

        Published profiles of qwen3-8b on v6e-8 take 143 to 161 ms for the 13.9 GB that a step
        reduces this way. This function gives 135; both axes at once would give 68. The sum of 0.606
        GB over a v6e-256 was published at 236 GB/s (AI-Hypercomputer/tpu-recipes, microbenchmarks).
        Reducing this way and gathering over both axes at once gives 239; both phases over both axes
        give 357.

        Recipes for TPU7x request reductions over several dimensions. Three published steps with
        them are predicted at 1.11, 1.06 and 1.01 of their time without them, and at 0.94, 1.02 and
        0.99 with all axes at once (deepseek3-671b, gpt-oss-120b, gemma4-31b).
        """
        rates = {axis: self._axis_rate(axis, extent) for axis, extent in extents.items()}
        if self.machine.reduces_at_once:
            places = math.prod(extents.values())
            return size * (places - 1) / places / sum(rates.values())
        seconds, left = 0.0, float(size)
        for axis, extent in extents.items():
            seconds += left * (extent - 1) / extent / rates[axis]
            left /= extent
        return seconds

    def _extents(self, chips: set[Coordinate]) -> dict[int, int]:
        """Return the extent of the chips along each axis where it is more than one."""
        dims = len(next(iter(chips)))
        counts = {axis: len({chip[axis] for chip in chips}) for axis in range(dims)}
        return {axis: count for axis, count in counts.items() if count > 1}

    def _axis_rate(self, axis: int, extent: int) -> float:
        """Return the bytes per second that a device receives along an axis; a ring has two ways."""
        return self.machine.ici_bytes_per_s * (2 if self._is_ring(axis, extent) else 1)

    def _hops(self, axis: int, extent: int) -> int:
        return extent // 2 if self._is_ring(axis, extent) else extent - 1

    def _is_ring(self, axis: int, extent: int) -> bool:
        target = self.machine.slice
        return target.wraps[axis] and extent == target.topology[axis]

    def _permute(self, collective: Collective) -> LinkUse:
        load, hops, axes = self._route(collective.groups)
        seconds = collective.bytes * load / self.machine.ici_bytes_per_s
        way = "+" if self._goes_up(collective) else "-"
        latency = hops * self.machine.hop_latency_s
        lanes = frozenset(f"{axis}{way}" for axis in axes)
        return LinkUse(seconds + latency, lanes, axes)

    def _goes_up(self, collective: Collective) -> bool:
        """Whether most pairs go to a higher device number, as each direction has its own links."""
        up = sum(target > source for source, target in collective.groups)
        return 2 * up >= len(collective.groups)

    def _route(self, pairs: tuple[tuple[int, ...], ...]) -> tuple[int, int, str]:
        """Return the most pairs on one link, and the longest route with its axes, axis by axis."""
        if pairs not in self._routes:
            links: Counter[tuple[int, Coordinate, Coordinate]] = Counter()
            longest = 0
            for source, target in pairs:
                path = list(self._path(self.coordinates[source], self.coordinates[target]))
                # Slices have the same coordinates and links of their own.
                links.update((self.slices[source], here, there) for here, there in path)
                longest = max(longest, len(path))
            # Devices of one chip send over the same links, each its own half.
            per_chip = max(1, self.machine.slice.chip.devices_per_chip)
            busiest = max(links.values(), default=0)
            moved = {axis for _, a, b in links for axis in range(len(a)) if a[axis] != b[axis]}
            axes = "".join(map(_letter, sorted(moved)))
            self._routes[pairs] = (-(-busiest // per_chip) if busiest else 0, longest, axes)
        return self._routes[pairs]

    def _path(self, start: Coordinate, end: Coordinate) -> Iterator[tuple[Coordinate, Coordinate]]:
        here = list(start)
        target = self.machine.slice
        sides = zip(target.topology, target.wraps, strict=True)
        for axis, (size, wraps) in enumerate(sides):
            distance = end[axis] - here[axis]
            if wraps and abs(distance) > size / 2:
                distance -= size if distance > 0 else -size
            step = 1 if distance > 0 else -1
            for _ in range(abs(distance)):
                before = tuple(here)
                here[axis] = (here[axis] + step) % size
                yield before, tuple(here)


def _letter(axis: int) -> str:
    return "xyz"[axis]


@dataclass(frozen=True)
class SliceExchange:
    """One device's part of a collective between slices.

    The compiler writes it as a send and a receive with the same rendezvous; the hosts do the rest.

    Attributes:
        name: Name of the rendezvous.
        kind: The compiler's name, e.g. "ALL_REDUCE".
        slices: Number of participating slices.
        sent_bytes: Bytes that the device sends to its host.
    """

    name: str
    kind: str
    slices: int
    sent_bytes: int

    @classmethod
    def of(cls, instruction: Instruction) -> "SliceExchange":
        """Parse a `send` or `recv`; one without a collective is a plain message."""
        rendezvous, kind, slices = (
            pattern.search(instruction.attributes) for pattern in (_RENDEZVOUS, _KIND, _SLICES)
        )
        return cls(
            name=rendezvous[1] if rendezvous else instruction.name,
            kind=kind[1] if kind else "",
            slices=len(slices[1].split(",")) if slices else 2,
            sent_bytes=max(shape.bytes for shape in instruction.shapes),
        )

    @property
    def wire_bytes(self) -> float:
        """Bytes that leave and enter the device's share of its host's network card.

        No algorithm needs fewer: a reduced array is scattered and gathered once each, and a
        gathered one arrives from every other slice.
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
        """Return the time on an idle network."""
        return self.wire_bytes / machine.dcn_bytes_per_s


def waiting_share(slices: int, *, per_doubling: float) -> float:
    """Return the share by which slices lengthen a step by waiting for the slowest of them.

    Delays of machines have long tails, and the longest of n such delays grows with log n.
    """
    return per_doubling * math.log2(max(1, slices))
