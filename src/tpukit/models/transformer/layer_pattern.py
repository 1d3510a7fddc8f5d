"""Which kind every layer is of, in words, and the runs of layers that one loop can go through."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...errors import TPUModelError, did_you_mean
from .field_types import MOST_LAYERS

_ITEM = re.compile(r"(?:(\d+) )?([A-Za-z_]\w*)")


def kinds_of_layers(pattern: str, n_layers: int, *, known: Sequence[str]) -> tuple[str, ...]:
    """The kind of every layer, by a pattern that repeats: "5 local, global", "3 dense then moe".

    What stands before `then` comes once; what stands after it, or all of it, repeats to the end.

    Raises:
        TPUModelError: A word is not a kind, or the pattern cannot be read.
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
    """The shortest pattern that `kinds_of_layers` reads as these kinds."""
    whole = tuple(kinds)
    spelled = [_spell_items(whole)]
    for start in range(len(whole)):
        rest = whole[start:]
        period = _periods(rest)[-1]
        before = f"{_spell_items(whole[:start])} then " if start else ""
        spelled.append(before + _spell_items(rest[:period]))
    return min(spelled, key=lambda text: (len(re.split(",| then ", text)), _digits(text)))


@dataclass(frozen=True)
class LayerRun:
    """Consecutive layers: `cycle` repeated `repeats` times, and its first `rest` layers again."""

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
    """The runs that cover all layers with the fewest layers written out.

    A loop over repeated cycles is compiled once for its cycle: a model of sixty equal layers
    compiles as fast as one of two.

    Args:
        kinds: Of every layer.
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
            # One more for the loop itself, so that a short rest is written out instead.
            cost += period + (end - start) % period + 1
            choices.append((cost, 1 + len(following), end))
        cost, _, end = min(choices, key=lambda choice: choice[:2])
        length, period = end - start, periods[end - start - 1]
        run = LayerRun(start, kinds[start : start + period], length // period, length % period)
        best[start] = (cost, (run, *best[end][1]))
    return best[0][1]


def _periods(kinds: Sequence[str]) -> list[int]:
    """For each beginning of the kinds, by its length, after how many layers it repeats.

    Knuth, Morris and Pratt: what is left after the longest end that is also a beginning.
    """
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
                f"layer_pattern='{pattern}' has '{item.strip()}' in it; write kinds of layers with "
                "commas between them, a number before one that repeats: '5 local, global'."
            )
        count, kind = found.groups()
        if kind not in known:
            raise TPUModelError(
                f"layer_pattern='{pattern}' names '{kind}', which layer_kinds does not describe; "
                f"it has {', '.join(known) or 'none'}.{did_you_mean(kind, known)}"
            )
        repeats = int((count or "1")[:9])
        if len(kinds) + repeats > MOST_LAYERS:
            raise TPUModelError(
                f"layer_pattern='{pattern:.60}' describes more than {MOST_LAYERS:,} layers."
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
