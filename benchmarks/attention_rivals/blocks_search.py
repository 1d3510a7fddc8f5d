"""The best blocks of a rival: a stated grid, then steps around the best until none gains."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from attention_rivals.cases import Case
from attention_rivals.contenders import Family, Sizes
from attention_rivals.times import Timing

LEAST_GAIN = 0.01
NEAR = 1.05  # a kernel further than this behind the fastest begins with its first sizes alone
# Nor does one further than this take part in the steps. Kernels step by turns: the best of one
# moves by up to a tenth before the other has had the same step.
WITHIN_STEPS = 1.15
# Larger tiles of scores than 8 MiB take minutes to compile and spill.
LARGEST_TILE = 2048 * 1024
SMALLEST = 256
SIZES = ("compute", "kv", "q")
Timer = Callable[[Family, Sizes], Timing | str]
Found = dict[tuple[str, Sizes], Timing | str]


class Searched(NamedTuple):
    """Everything that was timed, and whether the search ended because no step gained."""

    found: Found
    to_the_end: bool


def search(
    starts: Mapping[Family, Sequence[Sizes]],
    case: Case,
    timer: Timer,
    *,
    rounds: int | None,
    budget: int | None = None,
) -> Searched:
    """Time the families at where they begin, then around the best.

    Args:
        starts: The families, and where the search of each begins.
        case: Its length bounds the blocks.
        timer: Times one choice, or says why it has no time.
        rounds: Steps around the best at most; None goes on until none gains.
        budget: Choices timed around the best at most; None knows no end.
    """
    found: Found = {}
    begun: int | None = None  # choices timed before the steps began

    def time(family: Family, choices: Iterable[Sizes]) -> None:
        for sizes in choices:
            spent = budget is not None and begun is not None and len(found) - begun >= budget
            if (family.name, sizes) not in found and not spent:
                found[family.name, sizes] = timer(family, sizes)

    for family, choices in starts.items():
        time(family, choices[:1])
    for family in near(starts, found):
        time(family, starts[family][1:])
    step, moving, begun = 0, True, len(found)
    while moving and (rounds is None or step < rounds):
        step, moving = step + 1, False
        for family in near(starts, found, WITHIN_STEPS):
            before = fastest(found, family.name)
            assert before is not None
            time(family, around(family, before[0], case))
            now = fastest(found, family.name)
            moving |= now is not None and now[1] < before[1] * (1 - LEAST_GAIN)
    return Searched(found, is_ended(starts, found, case))


def is_ended(families: Iterable[Family], found: Found, case: Case) -> bool:
    """Whether every kernel that takes part in the steps has a best around which none gains."""
    return all(_is_settled(family, found, case) for family in near(families, found, WITHIN_STEPS))


def _is_settled(family: Family, found: Found, case: Case) -> bool:
    best = fastest(found, family.name)
    return best is not None and any(
        one.time_us * (1 - LEAST_GAIN) <= best[1]
        and all((family.name, other) in found for other in around(family, sizes, case))
        for (name, sizes), one in found.items()
        if name == family.name and isinstance(one, Timing)
    )


def near(families: Iterable[Family], found: Found, most: float = NEAR) -> list[Family]:
    """The families whose best is not more than so many times the fastest of all."""
    best = {family: one for family in families if (one := fastest(found, family.name))}
    leader = min((time_us for _, time_us in best.values()), default=0.0)
    return [family for family, (_, time_us) in best.items() if time_us <= most * leader]


def fastest(found: Found, family: str) -> tuple[Sizes, float] | None:
    """The best sizes of a family, and their microseconds."""
    timed = [
        (sizes, one.time_us)
        for (name, sizes), one in found.items()
        if name == family and isinstance(one, Timing)
    ]
    return min(timed, key=lambda pair: pair[1], default=None)


def around(family: Family, sizes: Sizes, case: Case) -> Iterator[Sizes]:
    """The switch the other way, and sizes half and twice as large, one at a time.

    What gained in cells searched to the end comes first, for a search that is cut short.
    """
    if family.has_scheduler:
        yield dataclasses.replace(sizes, scheduler=not sizes.scheduler)
    together = [SIZES] if family.square else [(name,) for name in SIZES]
    for names, factor in product(together, (0.5, 2.0)):
        step = {name: int(getattr(sizes, name) * factor) for name in names}
        other = dataclasses.replace(sizes, **step)
        if _possible(other, case):
            yield other


def _possible(sizes: Sizes, case: Case) -> bool:
    largest = max(sizes.q, sizes.kv)
    return (
        SMALLEST <= sizes.compute <= sizes.kv
        and sizes.q >= SMALLEST
        and largest <= case.tokens
        and sizes.q * sizes.compute <= LARGEST_TILE
    )
