"""Layer patterns such as "5 local, global", and the runs of layers that one scan covers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...errors import TPUModelError, did_you_mean
from .field_types import MOST_LAYERS

_ITEM = re.compile(r"(?:(\d+) )?([A-Za-z_]\w*)")


def kinds_of_layers(pattern: str, n_layers: int, *, known: Sequence[str]) -> tuple[str, ...]:
    """Return the kind of every layer for a pattern: "5 local, global", "3 dense then moe".

    The part before `then` comes once. The part after it, or the whole pattern, repeats to the end.

    Raises:
        TPUModelError: A word is not a kind, or the pattern cannot be parsed.
    """
    once, _, repeated = pattern.partition(" then ")
    if not repeated:
        once, repeated = "", once
    first = _read(once, pattern, known) if once else ()
    cycle = _read(repeated, pattern, known)
    rest = max(0, n_layers - len(first))
    kinds = (*first, *(cycle[number % len(cycle)] for number in range(rest)))
    return kinds[:n_layers]


def spell_pattern(kinds: Sequence[str]) -> str:
    """Return the shortest pattern that `kinds_of_layers` reads as these kinds."""
    order = tuple(kinds)
    spelled = [_spell_items(order)]
    for start in range(len(order)):
        rest = order[start:]
        period = _periods(rest)[-1]
        before = f"{_spell_items(order[:start])} then " if start else ""
        spelled.append(before + _spell_items(rest[:period]))
    return min(spelled, key=lambda text: (len(re.split(",| then ", text)), _digits(text)))


@dataclass(frozen=True)
class LayerRun:
    """Consecutive layers: `cycle` repeated `repeats` times, then its first `rest` layers."""

    first: int
    cycle: tuple[str, ...]
    repeats: int
    rest: int = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of every layer of the run."""
        return self.cycle * self.repeats + self.cycle[: self.rest]


@lru_cache(maxsize=256)
def find_runs(kinds: tuple[str, ...], *, alone: tuple[int, ...] = ()) -> tuple[LayerRun, ...]:
    """Return the runs that cover all layers with the fewest unrolled layers.

    A scan over repeated cycles compiles its cycle once, so sixty equal layers compile as fast as
    two.

    Args:
        kinds: The kind of every layer.
        alone: Numbers of layers that must be runs of their own.
    """
    count = len(kinds)
    best: list[tuple[int, tuple[LayerRun, ...]]] = [(0, ())] * (count + 1)
    for start in range(count - 1, -1, -1):
        reach = next((cut for cut in range(start + 1, count) if cut in alone), count)
        choices: list[tuple[int, int, int]] = []
        periods = _periods(kinds[start:reach])
        for end in range(start + 1, start + 2 if start in alone else reach + 1):
            cost, following = best[end]
            period = periods[end - start - 1]
            # A scan itself costs 1, so that a short rest is unrolled instead.
            cost += period + (end - start) % period + 1
            choices.append((cost, 1 + len(following), end))
        cost, _, end = min(choices, key=lambda choice: choice[:2])
        length, period = end - start, periods[end - start - 1]
        run = LayerRun(start, kinds[start : start + period], length // period, length % period)
        best[start] = (cost, (run, *best[end][1]))
    return best[0][1]


def _periods(kinds: Sequence[str]) -> list[int]:
    """Return the period of every prefix of the kinds, by the Knuth-Morris-Pratt algorithm."""
    borders: list[int] = []
    for number, kind in enumerate(kinds):
        border = borders[-1] if borders else 0
        while border and kinds[border] != kind:
            border = borders[border - 1]
        borders.append(border + 1 if number and kinds[border] == kind else 0)
    return [number + 1 - border for number, border in enumerate(borders)]


def _read(text: str, pattern: str, known: Sequence[str]) -> tuple[str, ...]:
    kinds: list[str] = []
    for item in text.split(","):
        found = _ITEM.fullmatch(item.strip())
        if found is None:
            raise TPUModelError(
                f"layer_pattern='{pattern}' contains '{item.strip()}'; expected kinds of layers "
                "separated by commas, with a number before a repeated kind: '5 local, global'."
            )
        count, kind = found.groups()
        if kind not in known:
            raise TPUModelError(
                f"layer_pattern='{pattern}' has '{kind}', which is not in layer_kinds; "
                f"expected {', '.join(known) or 'none'}.{did_you_mean(kind, known)}"
            )
        repeats = int((count or "1")[:9])
        if len(kinds) + repeats > MOST_LAYERS:
            raise TPUModelError(
                f"layer_pattern='{pattern:.60}' has more than {MOST_LAYERS:,} layers, the limit."
            )
        kinds += [kind] * repeats
    return tuple(kinds)


def _digits(text: str) -> int:
    return sum(letter.isdigit() for letter in text)


def _spell_items(kinds: Sequence[str]) -> str:
    items: list[list[str | int]] = []
    for kind in kinds:
        if items and items[-1][1] == kind:
            items[-1][0] = int(items[-1][0]) + 1
        else:
            items.append([1, kind])
    return ", ".join(f"{n} {kind}" if n != 1 else str(kind) for n, kind in items)
