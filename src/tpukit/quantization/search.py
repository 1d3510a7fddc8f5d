"""Search for formats: each matrix gets the bits that its errors are worth to the model's output.

Upgrades are made in the order of what they gain for a byte. How many of them a target needs is
found by measuring on held-out data, never by what was expected. Where a size is asked for, what
matrices cost beside one another is measured too, on calibration data, and bytes are moved from
those that lose little to those that gain much.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import TPUValidationError
from .candidates import Candidates, Choice, Chosen, total_bytes

CANDIDATES = ("vq2", "vq3.5", "vq4", "int4", "int8", "bf16")
# How often bytes are moved after measuring every move from a plan.
_ROUNDS = 2


@dataclass(frozen=True)
class Upgrade:
    """A finer format for a matrix."""

    name: str
    to: Choice
    gain: float  # expected KL for each byte more


@dataclass(frozen=True)
class Ladder:
    """The coarsest plan, and upgrades in the order of what they gain.

    Attributes:
        candidates: What it chooses from.
        hulls: Of each matrix, the choices that are best for some price of a byte.
        upgrades: From the best one on.
    """

    candidates: Candidates
    hulls: dict[str, list[Choice]]
    upgrades: tuple[Upgrade, ...]

    @classmethod
    def of(cls, candidates: Candidates) -> "Ladder":
        """The ladder of all candidates."""
        hulls = {name: lower_hull(choices) for name, choices in candidates.choices.items()}
        upgrades = [one for name, hull in hulls.items() for one in _upgrades(name, hull)]
        return cls(candidates, hulls, tuple(sorted(upgrades, key=lambda one: -one.gain)))

    def choices(self, steps: int) -> dict[str, Choice]:
        """Every matrix's format after the first `steps` upgrades."""
        first = {name: hull[0] for name, hull in self.hulls.items()}
        return first | {one.name: one.to for one in self.upgrades[:steps]}

    def within(self, nbytes: float, *, rounds: int = _ROUNDS) -> dict[str, Choice]:
        """The best choices that fit in so many bytes.

        Args:
            nbytes: Of all quantized matrices.
            rounds: How often bytes are moved by what is measured beside all other matrices.

        Raises:
            TPUValidationError: Not even the coarsest plan does.
        """
        chosen = self.choices(0)
        least = total_bytes(chosen)
        if least > nbytes:
            raise TPUValidationError(
                f"the coarsest plan takes {least:,} bytes ({self.candidates.bits(chosen):.2f} bits "
                f"a weight), more than the {int(nbytes):,} asked for; allow more, or add coarser "
                "candidates."
            )
        blocked: set[str] = set()
        for one in self.upgrades:
            # A matrix whose next upgrade does not fit gets none of those after it.
            more = one.to.nbytes - chosen[one.name].nbytes
            if one.name in blocked or total_bytes(chosen) + more > nbytes:
                blocked.add(one.name)
                continue
            chosen[one.name] = one.to
        for _ in range(rounds):
            better = self._exchanged(chosen, nbytes)
            if better is None:
                break
            chosen = better
        return chosen

    def steps_within(self, nbytes: float) -> int:
        """The most upgrades, in their order, that fit in so many bytes."""
        self.within(nbytes, rounds=0)
        sizes = range(len(self.upgrades) + 1)
        return max(step for step in sizes if total_bytes(self.choices(step)) <= nbytes)

    def until(self, target: float, limit: int) -> int | None:
        """The fewest upgrades, at most `limit`, after which the target is surely met, or None."""
        if self._kept(limit) < target:
            return None
        low, high = -1, limit
        while high - low > 1:
            middle = (low + high) // 2
            if self._kept(middle) >= target:
                high = middle
            else:
                low = middle
        return high

    def _kept(self, steps: int) -> float:
        """The lower end of what is kept after so many upgrades, on held-out data."""
        chosen = self.choices(steps)
        found = self.candidates.measure(chosen)
        self.candidates.calibrated.progress(
            f"{steps} of {len(self.upgrades)} upgrades: retention {found.retention.text()}, "
            f"{self.candidates.bits(chosen):.2f} bits a weight"
        )
        return found.retention.low

    def _exchanged(self, chosen: Chosen, nbytes: float) -> dict[str, Choice] | None:
        """Choices of no more bytes that measure better, or None."""
        now = self.candidates.kl(chosen)
        moves: list[Move] = []
        for name, choice in chosen.items():
            place = self.hulls[name].index(choice)
            for other in self.hulls[name][max(0, place - 1) : place + 2]:
                if other is not choice:
                    lost = self.candidates.kl({**chosen, name: other}) - now
                    moves.append(Move(name, other, other.nbytes - choice.nbytes, lost))
        groups = exchanges(moves, nbytes - total_bytes(chosen))
        while groups:
            made = {**chosen, **{move.name: move.to for group in groups for move in group}}
            found = self.candidates.kl(made)
            if found < now:
                self.candidates.calibrated.progress(
                    f"{len(groups)} exchanges: KL {now:.4g} to {found:.4g}"
                )
                return made
            # Together they gain less than one by one: the best half of them may still gain.
            groups = groups[: len(groups) // 2]
        return None


@dataclass(frozen=True)
class Move:
    """Another format for one matrix of a plan: bytes more, and KL more, either below zero."""

    name: str
    to: Choice
    more_bytes: int
    more_kl: float


def exchanges(moves: Sequence[Move], room: float) -> list[list[Move]]:
    """Groups of moves, the best first, each of which gains and pays for its own bytes.

    Args:
        moves: Measured one by one.
        room: Bytes that are free.
    """
    finer = sorted(
        (one for one in moves if one.more_kl < 0),
        key=lambda one: one.more_kl / max(1, one.more_bytes),
    )
    coarser = sorted(
        (one for one in moves if one.more_bytes < 0 and one.more_kl >= 0),
        key=lambda one: one.more_kl / -one.more_bytes,
    )
    moved: set[str] = set()
    groups: list[list[Move]] = []
    for one in finer:
        if one.name in moved:
            continue
        group, left = [one], room - one.more_bytes
        for other in coarser:
            if left >= 0:
                break
            if other.name not in moved and other.name != one.name:
                group.append(other)
                left -= other.more_bytes
        if left >= 0 and sum(move.more_kl for move in group) < 0:
            groups.append(group)
            moved |= {move.name for move in group}
            room = left
    return groups


def lower_hull(choices: Sequence[Choice]) -> list[Choice]:
    """The choices that are best for some price of a byte, from the smallest on."""
    hull: list[Choice] = []
    for one in sorted(choices, key=lambda choice: (choice.nbytes, choice.cost)):
        if hull and one.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], one):
            hull.pop()
        hull.append(one)
    return hull


def _slope(a: Choice, b: Choice) -> float:
    """What a byte gains from one choice to a larger one."""
    return (a.cost - b.cost) / max(1, b.nbytes - a.nbytes)


def _upgrades(name: str, hull: Sequence[Choice]) -> list[Upgrade]:
    pairs = itertools.pairwise(hull)
    return [Upgrade(name, finer, _slope(coarser, finer)) for coarser, finer in pairs]
