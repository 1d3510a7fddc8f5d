"""Which kind every layer is of, in words, and the runs of layers that one loop can go through."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...errors import TPUModelError, did_you_mean

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
        period = next(p for p in range(1, len(rest) + 1) if _repeats(rest, p))
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
        choices: list[tuple[int, int, tuple[LayerRun, ...]]] = []
        for end in range(start + 1, start + 2 if start in alone else reach + 1):
            part = kinds[start:end]
            period = next(p for p in range(1, len(part) + 1) if _repeats(part, p))
            run = LayerRun(start, part[:period], len(part) // period, len(part) % period)
            cost, following = best[end]
            # One more for the loop itself, so that a short rest is written out instead.
            choices.append((period + run.rest + 1 + cost, 1 + len(following), (run, *following)))
        cost, _, runs = min(choices, key=lambda choice: choice[:2])
        best[start] = (cost, runs)
    return best[0][1]


def _repeats(kinds: Sequence[str], period: int) -> bool:
    return all(kinds[n] == kinds[n - period] for n in range(period, len(kinds)))


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
        kinds += [kind] * int(count or 1)
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
