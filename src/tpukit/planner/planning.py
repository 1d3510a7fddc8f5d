"""`plan`: choose slices, meshes and batches from a model, tokens, a deadline and a budget."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np

from ..errors import ConfigError
from ..hardware.figure import format_quantity
from ..job.train import LoraSettings, TrainingSettings
from ..plain_data import JsonMapping, JsonObject
from ..runtime.progress import Progress, watched
from ..runtime.ranges import Range
from .amounts import parse_days, parse_tokens, parse_usd
from .answer.assumptions import list_assumptions
from .answer.result import PlanResult
from .cost.candidates import GENERATIONS, Space, named_slice, optimizers_of
from .cost.money import Market, Preemption
from .search.choice import Choice
from .search.objectives import (
    LARGEST_BATCH_TOKENS,
    PlanLimits,
    critical_batch_tokens,
    is_budget_alone,
    pareto_front,
    read_objective,
)
from .search.rejections import state_bytes
from .search.search import Ask, Search, replaced
from .search.subject import PlannedModel, read_subject
from .search.verification import OwnModelSearch, Verifier, broken_limit, is_compiled

MOST_CHOICES, LONGEST_VERIFICATION_S = 100, 86_400.0
UNPRICED_SHOWN = 2


def plan(
    model: object,
    *,
    tokens: float | str,
    deadline: float | str | timedelta | None = None,
    budget: float | str | None = None,
    objective: str | None = None,
    on: str | Sequence[str] = GENERATIONS,
    spot: bool = False,
    tier: str | None = None,
    regions: Sequence[str] = (),
    rates: JsonMapping | str | Path | None = None,
    preemption: Preemption | None = None,
    max_chips: int | None = None,
    min_headroom: float = 0.05,
    multi_slice: bool = True,
    sequence_length: int | None = None,
    max_batch_tokens: float | str | None = None,
    precisions: Sequence[str] | None = None,
    optimizer: str = "adamw",
    moment_dtype: str | None = None,
    lora: LoraSettings | JsonMapping | None = None,
    top: int = 5,
    verify: int = 3,
    verify_seconds: float = 300.0,
    progress: Progress = watched,
) -> PlanResult:
    """Find the slices and settings to train a model.

    Args:
        model: A preset, a config.json, "module:function", a `TransformerConfig`, a `Workload`, or
            any model that a `Workload` takes. Models without known dimensions are compiled.
        tokens: Tokens to train on: 15e12 or "15T".
        deadline: "30d", "12h", a `timedelta` or days.
        budget: Dollars: 50000 or "50k".
        objective: "cheapest", "fastest" or "fewest-chips"; by default the cheapest. With only a
            budget, it is the fastest on as many chips as zones usually offer.
        on: Generations, or slices such as "v6e-64", as a list or "v6e,v5p".
        spot: Whether to use spot prices and count preemptions; the same as `tier="spot"`.
        tier: "on_demand", "spot", or a tier of your own `rates`, such as "reserved-1y".
        regions: Allowed regions; any by default.
        rates: Your own prices, which override public ones; see `PriceBook.with_rates`.
        preemption: Preemption rates on spot; see `Preemption`.
        max_chips: Most chips over all slices.
        min_headroom: Share of usable HBM to leave free.
        multi_slice: Whether several slices may be joined.
        sequence_length: Tokens per example; by default 8192, or the model's maximum if that is
            less.
        max_batch_tokens: Most tokens per step; by default the critical batch size of the model, or
            more if no candidate fits with that.
        precisions: Formats of matmuls: "bf16", "int8", "fp8"; the model's by default.
        optimizer: "adamw", "lion", "adafactor" or "sgd".
        moment_dtype: Format of its moments: "float32", "bfloat16", or with adamw "int8"; by default
            the first two are tried.
        lora: LoRA settings, as in a job's `train: {lora: …}`: {"rank": 16, "base": "int4"}. For a
            folder of `tpukit quantize`, weights count in their stored format.
        top: Number of choices in the answer.
        verify: Number of choices to compile; 0 for none.
        verify_seconds: No compile starts after this time.
        progress: Called with a line about each step of the search.

    Raises:
        ConfigError: An argument is not valid; the message says what to give.
        TPUModelError: The model's dimensions are not known.
    """
    market = Market.asked(spot=spot, tier=tier, regions=regions, rates=rates, preemption=preemption)
    Range(1, MOST_CHOICES).check_whole("top", top, unit="choices")
    Range(0, MOST_CHOICES).check_whole("verify", int(verify), unit="choices")
    Range(0, LONGEST_VERIFICATION_S).check("verify_seconds", verify_seconds, unit="seconds")
    limits = PlanLimits(
        deadline_days=None if deadline is None else parse_days(deadline),
        budget_usd=None if budget is None else parse_usd(budget),
        min_headroom=min_headroom,
    )
    names = [part.strip() for part in on.split(",")] if isinstance(on, str) else list(on)
    stated: JsonObject = {"lora": lora}
    thin = TrainingSettings(**stated).lora
    subject = read_subject(model, sequence_length=sequence_length, lora=thin)
    amount = parse_tokens(tokens)
    named = any(named_slice(name) is not None for name in names)
    ask = Ask(
        subject=subject,
        tokens=amount,
        objective=read_objective(objective, limits),
        limits=limits,
        space=Space(
            generations=names,
            max_chips=max_chips,
            multi_slice=multi_slice,
            precisions=precisions or [subject.precision],
            optimizers=optimizers_of(optimizer, moment_dtype),
        ),
        market=market,
        max_batch_tokens=_batch_tokens(max_batch_tokens, subject, amount),
        any_chips=not (is_budget_alone(objective, limits) and max_chips is None and not named),
    )
    if ask.subject.known is None:
        budget_s = verify_seconds if verify else 0.0
        return _ask_compiler(ask, top=top, budget_s=budget_s, progress=progress)
    search = Search.run(ask)
    if max_batch_tokens is None and not search.verdicts.fits.any():
        search = Search.run(replace(ask, max_batch_tokens=LARGEST_BATCH_TOKENS))
    progress(f"weighed {len(search.scores.candidates):,} candidates in {search.seconds:.2f} s")
    verifier = Verifier(verify_seconds, progress) if verify else None
    return _answer(search, top=top, verify=verify, verifier=verifier)


def _batch_tokens(stated: float | str | None, subject: PlannedModel, tokens: float) -> float:
    """Return the most tokens per step: as given, or from the size of the model."""
    if stated is not None:
        return parse_tokens(stated)
    if subject.known is None:
        return LARGEST_BATCH_TOKENS
    return critical_batch_tokens(subject.shape, tokens)


def _ask_compiler(ask: Ask, *, top: int, budget_s: float, progress: Progress) -> PlanResult:
    """Plan a model of unknown dimensions by compiling it for one slice after another."""
    if not budget_s:
        raise ConfigError(
            f"{ask.subject.name} says no dimensions, so only the compiler can judge it; leave "
            "verification on."
        )
    search = OwnModelSearch(ask, budget_s, progress)
    found, shortfall = search.choices()
    return PlanResult(
        ask=ask,
        choices=tuple(found[:top]),
        shortfall=shortfall,
        disagreements=tuple(search.notes),
        assumptions=(
            "one fsdp axis over the whole slice, batch and remat as the builder chose them",
            "memory is the compiler's and time the compiled schedule's",
        ),
        ranked_by="dollars" if any(one.usd.value is not None for one in found) else "chip-hours",
        scored=search.compiled,
        search_s=search.seconds,
        verify_s=search.seconds,
    )


def _answer(search: Search, *, top: int, verify: int, verifier: Verifier | None) -> PlanResult:
    order, shortfall = search.order(most_chips=search.most_chips), ""
    if not len(order):
        order, shortfall = search.nearest()
    wider: Search | None = None
    if not len(order) and not search.verdicts.fits.any():
        wider, shortfall = _wider(search)
        order = wider.order() if wider is not None else order
        order = wider.nearest()[0] if wider is not None and not len(order) else order
    source = wider or search
    # Larger slices stay on the front if no slice is both faster and cheaper.
    everything = order if search.most_chips is None else search.order()
    if verifier is None:
        indices = itertools.islice(source.best_of_each_slice(order), top)
        choices = [source.choice(index) for index in indices]
        front = modelled_front(source, everything, choices)
    else:
        limits = PlanLimits() if shortfall else search.ask.limits
        choices = verifier.best(source, order, top=top, verify=verify, limits=limits)
        front = verified_front(source, everything, choices, verifier=verifier, limits=limits)
        if not choices and len(order):
            shortfall = "every choice of the model is too slow, too dear or too large when compiled"
            choices = verifier.late
    unpriced = search.best_of_each_slice(search.unpriced_order())
    indices = itertools.islice(unpriced, UNPRICED_SHOWN)
    return PlanResult(
        ask=search.ask,
        choices=tuple(choices),
        shortfall=shortfall,
        unpriced=tuple(search.choice(index) for index in indices),
        front=() if shortfall else tuple(front),
        most_chips=search.most_chips,
        least=_least(source, order),
        rejected=search.rejections(),
        disagreements=() if verifier is None else tuple(verifier.notes),
        assumptions=tuple(list_assumptions(search.ask, choices, most_chips=search.most_chips)),
        ranked_by=_ranked_by(source, order),
        scored=len(search.scores.candidates),
        search_s=search.seconds,
        verify_s=None if verifier is None else verifier.seconds,
    )


def _least(search: Search, order: np.ndarray) -> float | None:
    """Return the lowest value that choices are ranked by, over all candidates; None without any."""
    if not len(order):
        return None
    values = {
        "days": search.costs.days,
        "chips": search.scores.candidates.chips,
        "dollars": search.costs.usd,
        "chip-hours": search.costs.chip_hours,
    }[_ranked_by(search, order)]
    return float(np.min(values[order]))


def _ranked_by(search: Search, order: np.ndarray) -> str:
    if search.ask.objective != "cheapest":
        return {"fastest": "days", "fewest-chips": "chips"}[search.ask.objective]
    return "dollars" if search.costs.priced[order].any() else "chip-hours"


def _wider(search: Search) -> tuple[Search | None, str]:
    """Search beyond the limits when no allowed slice fits the model; return what was short."""
    ask = search.ask
    state = state_bytes(search.scores)
    names = ", ".join(ask.space.generations)
    most = f" of at most {ask.space.max_chips:,} chips" if ask.space.max_chips else ""
    words = f"no {names} slice{most} holds {ask.subject.name}'s training step"
    if search.verdicts.fits_device.any():
        words += f": {search.rejections()[0].reason}"
    elif state == state:  # NaN when there was nothing to score
        chip = search.slice(0).chip
        usable = chip.hbm_usable_bytes.require("a plan")
        chips = -(-state // usable)
        words += (
            f": weights, gradients and moments alone are {format_quantity(state, 'B')}, "
            f"which is at least {chips:,.0f} {chip.name} chips"
        )
    limits = replace(ask.limits, deadline_days=None, budget_usd=None)
    for space in (replace(ask.space, max_chips=None), replace(ask.space, generations=GENERATIONS)):
        wider = Search.run(replace(ask, space=replace(space, max_chips=None), limits=limits))
        if wider.verdicts.passed.any():
            # With a chip limit, the next answer should exceed it as little as possible.
            return replaced(wider, "fewest-chips") if ask.space.max_chips else wider, words
    return None, words


MOST_SHOWN = 8


def modelled_front(search: Search, order: np.ndarray, choices: Sequence[Choice]) -> list[Choice]:
    """Return the front from the model, the fastest first; choices of the answer are reused."""
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
    """Return the front after verification, the fastest first.

    Slices that were not compiled are included, with corrected figures, if no compiled slice beats
    them. A slice that would beat a compiled one is left out and reported, because only arithmetic
    supports it.
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
    """Whether a choice is no slower and no more expensive than another, and better in one."""
    mine, its = (one.days, _money(one)), (other.days, _money(other))
    return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))


def _undominated(choices: Sequence[Choice]) -> list[Choice]:
    days, money = ([read(one) for one in choices] for read in (lambda one: one.days, _money))
    found = pareto_front(np.asarray(days, float), np.asarray(money, float))
    return [choices[position] for position in found]


def _thinned(front: list[Choice], choices: Sequence[Choice]) -> list[Choice]:
    """Return a few choices, evenly spaced; the answer's first choice is always included."""
    if len(front) <= MOST_SHOWN:
        return front
    step = (len(front) - 1) / (MOST_SHOWN - 1)
    wanted = {round(step * number) for number in range(MOST_SHOWN)}
    if choices and choices[0] in front:
        wanted.add(front.index(choices[0]))
    return [front[position] for position in sorted(wanted)]
