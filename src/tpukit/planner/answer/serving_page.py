"""A serving plan as one HTML page: price per token, causes of its time, and HBM."""

from collections.abc import Sequence

from ...hardware.figure import bytes_text
from ...pages.charts import BarMark, BarPiece, stacked_bar
from ...pages.frame import Page
from ...pages.markup import Child, Markup, join, tag
from ...pages.parts import (
    Column,
    PageSection,
    absent,
    bullets,
    card,
    headline,
    legend,
    section,
    table,
)
from ..cost.serving_model import ROOFS
from .serving_answer import (
    ASSUMED,
    ServingChoice,
    ServingPlan,
    milliseconds,
    money_text,
    price_words,
    remarks,
    split_text,
    traffic_words,
)

# Colors of the causes, as named in the style sheet.
_WAITS = dict(zip(ROOFS, ("c-matrix", "c-hbm", "c-ici", "c-overhead"), strict=True))
_PROMPTS = "prompts of others"
_KINDS = {**_WAITS, _PROMPTS: "c-kernel"}
_HELD = {"weights": "p-parameters", "cache": "p-cache"}


def render_serving_page(plan: ServingPlan) -> str:
    """Return the page as text."""
    return Page(
        title=f"Serving {plan.model}",
        headline=headline(
            plan.model,
            f"served: {traffic_words(plan)}",
            lead="Fewer bits cost less and lose more: tpukit quantize measures what.",
            cards=[_card(weights, one) for weights, one in plan.cheapest.items()],
        ),
        sections=_sections(plan),
        footer="Made by tpukit plan --serve, without a TPU.",
    ).render()


def _card(weights: str, one: ServingChoice) -> Markup:
    below = f"per million new tokens on {one.slice}, {one.tokens_per_s:,.0f} tokens/s"
    return card(f"Cheapest in {weights}", money_text(one), below, one.usd_per_million.origin or "")


def _sections(plan: ServingPlan) -> list[PageSection]:
    found = [one for one in plan.choices if one.slice is not None]
    shown = [_choices(found)]
    if found:
        shown += [_times(found), _memories(found)]
    said = remarks(plan)
    if said:
        shown.append(section("Remarks", bullets(said)))
    shown.append(section("Assumed", bullets([ASSUMED, price_words(plan)])))
    return shown


def _choices(found: Sequence[ServingChoice]) -> PageSection:
    title = "The smallest slices"
    if not found:
        return section(title, absent("no slice holds the weights and the cache"))
    columns = (
        Column("weights"),
        Column("slice"),
        Column("replicas x tensor"),
        Column("tokens/s", is_number=True, origin="model"),
        Column("a chip", is_number=True),
        Column("ms a token", is_number=True),
        Column("ms to the first", is_number=True),
        Column("$ per M tokens", is_number=True),
        Column("bound by"),
    )
    rows: list[Sequence[Child]] = [
        (
            one.weights,
            _slice(one),
            split_text(one),
            f"{one.tokens_per_s:,.0f}",
            f"{one.tokens_per_s_per_chip:,.0f}",
            milliseconds(one.token_time.value),
            milliseconds(one.first_token_time.value),
            money_text(one),
            "" if one.decode is None else one.decode.bound_by,
        )
        for one in found
    ]
    return section(title, table(columns, rows, caption="Of each generation, by weight format"))


def _times(found: Sequence[ServingChoice]) -> PageSection:
    """Draw one bar per choice with the causes of a token's time, all on one scale."""
    waits = {id(one): _waits(one) for one in found}
    longest = max(sum(parts.values()) for parts in waits.values())
    rows: list[Sequence[Child]] = []
    for one in found:
        parts = waits[id(one)]
        pieces = [
            BarPiece(_KINDS[name], seconds, f"{name}: {milliseconds(seconds)} ms")
            for name, seconds in parts.items()
            if seconds
        ]
        bar = stacked_bar(pieces, whole=longest, label=f"A token in {one.weights} on {one.slice}")
        rows.append((one.weights, _slice(one), bar, f"{milliseconds(sum(parts.values()))} ms"))
    columns = (
        *(Column("weights"), Column("slice"), Column("a token", is_bar=True)),
        Column("by roofs", is_number=True, origin="model"),
    )
    bars = table(columns, rows, caption="What a token waits for, one scale for all")
    waited = {name for parts in waits.values() for name, seconds in parts.items() if seconds}
    words = {kind: name for name, kind in _KINDS.items() if name in waited}
    return section("Where a token's time goes", join(bars, legend(words)))


def _waits(one: ServingChoice) -> dict[str, float]:
    """Return the seconds between two tokens of an answer, by cause."""
    assert one.decode is not None
    assert one.modelled is not None
    own = {roof: getattr(one.decode, roof) for roof in ROOFS}
    return {**own, _PROMPTS: one.modelled.token_s - one.modelled.decode_s}


def _memories(found: Sequence[ServingChoice]) -> PageSection:
    """Draw one bar per choice with its HBM, up to the device's capacity."""
    rows: list[Sequence[Child]] = []
    for one in found:
        used, room = one.device_bytes or 0.0, one.room_bytes or 0.0
        weights = one.weight_bytes / (one.tensor or 1)
        pieces = [
            BarPiece(_HELD[name], amount, f"{name}: {bytes_text(amount)}")
            for name, amount in (("weights", weights), ("cache", used - weights))
        ]
        limit = BarMark(room, is_limit=True)
        label = f"HBM of one device of {one.slice}"
        bar = stacked_bar(pieces, whole=max(room, used), label=label, marks=[limit])
        rows.append((one.weights, _slice(one), bar, f"{bytes_text(used)} of {bytes_text(room)}"))
    columns = (
        *(Column("weights"), Column("slice"), Column("HBM", is_bar=True)),
        Column("used", is_number=True, origin="model"),
    )
    bars = table(columns, rows, caption="What is in the memory of one device")
    return section("Memory", join(bars, legend({kind: name for name, kind in _HELD.items()})))


def _slice(one: ServingChoice) -> Markup:
    return tag("code", str(one.slice), class_="nowrap")
