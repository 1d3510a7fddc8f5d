"""List the assumptions behind a plan, each with its source and the option that changes it."""

from collections.abc import Sequence

from ...hardware.catalog import dcn_rate
from ...hardware.figure import format_quantity, seconds_text
from ..amounts import count_text, days_text
from ..cost.money import ON_DEMAND, RESERVED, SPOT, Market
from ..search.choice import Choice
from ..search.objectives import (
    KAPLAN,
    LARGEST_BATCH_TOKENS,
    LONGEST_RESERVATION_DAYS,
    critical_batch_tokens,
    pod_chips,
)
from ..search.search import Ask


def list_assumptions(
    ask: Ask, choices: Sequence[Choice], *, most_chips: int | None = None
) -> list[str]:
    """Return one line per assumption behind the choices of a plan.

    Args:
        ask: The request.
        choices: The choices of the answer.
        most_chips: The most chips of a choice, if only a budget was given.
    """
    stated = [
        _of_batches(ask),
        f"sequences of {ask.subject.sequence_length:,} tokens; --sequence",
        f"{ask.limits.min_headroom:.0%} of usable HBM stays free by the model; --min-headroom",
        f"states of {ask.space.optimizers[0].name}; --optimizer, --moment-dtype",
    ]
    if (thin := ask.subject.shape.thin) is not None:
        stated.append(
            f"{thin.parameters:,} numbers of adapters are trained, whole on every device; the "
            f"model's own weights stay, in {thin.base}; --lora-rank, --lora-base"
        )
    if most_chips is not None:
        stated.append(
            f"a budget alone: at most {most_chips:,} chips; zones list slices of {pod_chips()} of "
            "every generation, and larger ones in limited quantities (Google Cloud documentation, "
            "/tpu/docs/regions-zones); twice as many while nothing ends within "
            f"{LONGEST_RESERVATION_DAYS:g} days, the longest reservation; --max-chips, --deadline"
        )
    stated += _of_prices(ask.market, choices)
    stated += _of_launches(ask.market, choices)
    stated += _of_failures(ask.market, choices)
    joined = {choice.slice.chip for choice in choices if choice.slice.num_slices > 1}
    for chip in sorted(joined, key=str):
        rate = dcn_rate(chip)
        stated.append(f"between {chip} slices {rate.text} a chip ({rate.origin}): {rate.source}")
    stated.append("gradients, moments and activations as the reference transformer keeps them")
    return stated


def _of_batches(ask: Ask) -> str:
    most = ask.max_batch_tokens
    line = f"a step has at most {count_text(most)} tokens"
    if ask.subject.known is not None and most == critical_batch_tokens(
        ask.subject.shape, ask.tokens
    ):
        line += f", the critical batch size of so large a model on so many tokens ({KAPLAN})"
    elif most == LARGEST_BATCH_TOKENS:
        line += " (Llama 3 405B's largest was 16 M)"
    return f"{line}; --max-batch-tokens"


def _of_prices(market: Market, choices: Sequence[Choice]) -> list[str]:
    priced = next((one for one in choices if one.usd.value is not None), None)
    if priced is None:
        return []
    price = priced.usd_per_chip_hour
    where = f"in {priced.region}" if priced.region else "anywhere"
    return [f"{market.tier} prices, the first choice's {where}: {price.source}, {price.date}"]


def _of_launches(market: Market, choices: Sequence[Choice]) -> list[str]:
    """Return lines on a requested tier or region that the first choice's job cannot contain."""
    if not choices:
        return []
    lines: list[str] = []
    if market.tier not in (ON_DEMAND, SPOT) and not market.tier.startswith(RESERVED):
        lines.append(
            f"the job does not state the tier {market.tier!r}, which only your rates name; choose "
            "its capacity in the job's launch: section"
        )
    if market.regions and not choices[0].job.launch.zones:
        lines.append(
            f"no zone of {', '.join(market.regions)} is known to offer {choices[0].slice}; name "
            "zones in the job's launch: section"
        )
    return lines


def _of_failures(market: Market, choices: Sequence[Choice]) -> list[str]:
    if market.tier != SPOT:
        return ["no failures are counted: how often these slices fail is not public"]
    p = market.preemption
    stated = [
        f"spot: a slice is preempted {p.per_slice_day:,.4g} times a day and back after "
        f"{p.recovery_s / 60:.3g} min ({p.source}); --preemptions-per-day, --recovery-minutes"
    ]
    best = choices[0] if choices else None
    if best is not None and (interval := best.checkpoint_interval_s) is not None:
        saved = format_quantity(best.write_s * p.store_bytes_per_s / 1e9, "GB")
        every = days_text(interval / 86_400)
        stated.append(
            f"the first choice saves {saved} every {every} (Young/Daly, a save "
            f"and its write counted): {seconds_text(best.save_s)} to the hosts, which hold the "
            f"step up, and {seconds_text(best.write_s)} beside it to the store "
            f"({p.store_source}); --store-gb-per-second"
        )
    return stated
