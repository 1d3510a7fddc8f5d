"""A serving plan for a terminal: what is cheapest by format, every choice, and what was assumed."""

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from .serving_answer import ServingChoice, ServingPlan

MILLISECOND = 1e-3
ASSUMED = (
    "A decode step reads every weight once for all sequences of a replica and each sequence's "
    "cache once, sums activations along tensor twice a layer and starts its ops; a replica reads "
    "prompts one after the other."
)
HEADINGS = (
    *("weights", "slice", "split", "GiB\n+ cache", "tokens\n/s", "a\nchip"),
    *("ms a\ntoken", "bound\nby", "ms to\nfirst", "$ per M\ntokens"),
)


def serving_report(plan: ServingPlan) -> Group:
    """The whole answer."""
    caption = f"origin: model. split: replicas x tensor. {ASSUMED} {price_words(plan)}"
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False, caption=caption)
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=True)
    for one in plan.choices:
        table.add_row(*_cells(one))
    return Group(
        Text(f"serving {plan.model}: {traffic_words(plan)}", style="bold"),
        *(Text(cheapest_words(one)) for one in plan.cheapest.values()),
        "",
        table,
        *(Text(line) for line in remarks(plan)),
    )


def traffic_words(plan: ServingPlan) -> str:
    """What is asked of the server."""
    t = plan.traffic
    at_once = "1 request" if t.batch == 1 else f"{t.batch:,} requests at once"
    return f"{at_once} of {t.prompt:,} + {t.new:,} tokens, cache in {plan.cache}"


def cheapest_words(one: ServingChoice) -> str:
    """Where a format's tokens cost least, how much that is, and how fast they come."""
    return (
        f"{one.weights}: cheapest on {one.slice}, {money_text(one)} a million new tokens, "
        f"{one.tokens_per_s:,.0f}/s, {milliseconds(one.token_time.value)} ms each"
    )


def price_words(plan: ServingPlan) -> str:
    """Which prices count, and where they are from."""
    priced = [one.usd_per_chip_hour for one in plan.choices if one.usd_per_chip_hour is not None]
    known = next((price for price in priced if price.value is not None), None)
    if known is None:
        return f"No {plan.tier} price is known of these slices."
    dated = f", {known.date}" if known.date else ""
    return (
        f"$: a server kept busy, {plan.tier} prices in the cheapest region allowed "
        f"({known.source}{dated}), the reading of prompts counted with the new tokens."
    )


def remarks(plan: ServingPlan) -> list[str]:
    """Why there is no slice or no price, and what the compiler said."""
    said: list[str] = []
    for one in plan.choices:
        if one.slice is None:
            said.append(f"{one.weights} on {one.generation}: {one.reason}")
        if one.compiled is not None and one.modelled is not None:
            by_roofs = f"{milliseconds(one.modelled.token_s)} ms a token by roofs"
            how = "compiled" if one.is_compiled else "not compiled"
            said.append(f"{one.weights} on {one.slice}, {how}: {one.compiled.reason or by_roofs}")
        if one.slice is not None and one.usd_per_million.value is None:
            said.append(f"no price of {one.usd_per_million.reason}")
    return list(dict.fromkeys(said))


def money_text(one: ServingChoice) -> str:
    """Dollars for a million new tokens, or "–"."""
    usd = one.usd_per_million.value
    return "–" if usd is None else f"${usd:,.2f}"


def split_text(one: ServingChoice) -> str:
    """Replicas and the devices of each."""
    return "" if one.tensor is None else f"{one.replicas} x {one.tensor}"


def milliseconds(seconds: float | None) -> str:
    """Seconds in milliseconds, or "–"."""
    return "–" if seconds is None else f"{seconds / MILLISECOND:,.1f}"


def _cells(one: ServingChoice) -> tuple[str, ...]:
    sizes = f"{_gib(one.weight_bytes)} + {_gib(one.cache_bytes)}"
    where = (one.weights, one.slice or f"no {one.generation}", split_text(one), sizes)
    if one.decode is None:
        return (*where, "–", "", "", "", "–", "–")
    return (
        *where,
        f"{one.tokens_per_s:,.0f}",
        f"{one.tokens_per_s_per_chip:,.0f}",
        milliseconds(one.token_time.value),
        one.decode.bound_by,
        milliseconds(one.first_token_time.value),
        money_text(one).removeprefix("$"),
    )


def _gib(amount: float) -> str:
    gib = amount / 2**30
    return f"{gib:,.0f}" if gib >= 10 else f"{gib:.1f}"
