"""Slices than which none is both faster and cheaper, in the figures that the answer shows."""

from collections.abc import Sequence

import numpy as np

from ..search.objectives import PlanLimits, pareto_front
from ..search.search import Search
from ..search.verification import Verifier, broken_limit, is_compiled
from .choice import Choice

MOST_SHOWN = 8


def modelled_front(search: Search, order: np.ndarray, choices: Sequence[Choice]) -> list[Choice]:
    """The front by the model, the fastest first; a choice of the answer stands as it is there."""
    shown = {choice.slice: choice for choice in choices}
    found = [
        shown.get(search.slice(index)) or search.choice(index) for index in search.front(order)
    ]
    return _thinned(found, choices)


def verified_front(
    search: Search,
    order: np.ndarray,
    choices: Sequence[Choice],
    *,
    verifier: Verifier,
    limits: PlanLimits,
) -> list[Choice]:
    """The front once the compiler was asked, the fastest first.

    Of slices that were not compiled stand those that no compiled one beats, with the model's
    figures as corrected by the compiled ones. One that would beat a compiled slice by them is told
    of and left out: arithmetic alone says so.
    """
    compiled = [choice for choice in choices if is_compiled(choice)]
    done = {choice.slice for choice in compiled} | verifier.dropped
    others = [
        verifier.corrected(search.choice(index), compiled)
        for index in search.front(order)
        if search.slice(index) not in done
    ]
    sure = _undominated(compiled)
    unsure = [
        one
        for one in others
        if not broken_limit(one, limits) and not any(_beats(choice, one) for choice in sure)
    ]
    for one in unsure:
        if beaten := [str(choice.slice) for choice in sure if _beats(one, choice)]:
            verifier.notes.append(
                f"{one.slice} may be faster and cheaper than {', '.join(beaten)} by the model; "
                "it was not compiled (--verify-top)"
            )
    kept = [one for one in unsure if not any(_beats(one, choice) for choice in sure)]
    return _thinned(_undominated([*sure, *kept]), choices)


def _money(choice: Choice) -> float:
    return choice.chip_hours if choice.usd.value is None else choice.usd.value


def _beats(one: Choice, other: Choice) -> bool:
    """Whether one is no slower and no dearer than the other, and better in one of them."""
    mine, its = (one.days, _money(one)), (other.days, _money(other))
    return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))


def _undominated(choices: Sequence[Choice]) -> list[Choice]:
    days, money = ([read(one) for one in choices] for read in (lambda one: one.days, _money))
    found = pareto_front(np.asarray(days, float), np.asarray(money, float))
    return [choices[position] for position in found]


def _thinned(front: list[Choice], choices: Sequence[Choice]) -> list[Choice]:
    """A few of them, evenly spread; the answer's first choice is never left out."""
    if len(front) <= MOST_SHOWN:
        return front
    step = (len(front) - 1) / (MOST_SHOWN - 1)
    wanted = {round(step * number) for number in range(MOST_SHOWN)}
    if choices and choices[0] in front:
        wanted.add(front.index(choices[0]))
    return [front[position] for position in sorted(wanted)]
