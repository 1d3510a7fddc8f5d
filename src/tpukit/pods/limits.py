"""Limits on chips that a project was granted, kept before anybody is asked.

No public API shows what a project of TPU Research Cloud was granted, and what was not granted is
billed. So a job says it (`launch.limits`): a zone in which a pod would be above a limit is passed
over, and one that no row names has none to give. Whatever a provider still shows holds its chips,
also what is lost or being deleted: that is how quota counts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import PodUnavailable, did_you_mean
from ..hardware import Slice
from ..job.sections import ChipLimit
from ..runtime.doctor.finding import DoctorFinding
from ..runtime.progress import Progress, silent
from .causes import Cause
from .config import PodConfig
from .pod import Pod, Tier

WAY_OUT = (
    "Give some back (tpukit pods ls), add zones, take a smaller slice, or correct launch.limits "
    "where you were granted more."
)
_NAMED = 3  # pods that a message names


@dataclass(frozen=True)
class Hold:
    """Chips that a pod holds, or was just asked for with."""

    pod: str
    zone: str
    slice: Slice
    tier: Tier

    @classmethod
    def of(cls, pod: Pod) -> "Hold":
        """Return what a pod holds."""
        return cls(pod.name, pod.zone, pod.slice, pod.tier)


@dataclass(frozen=True)
class Refusal:
    """Why a limit does not allow a pod in a zone.

    Attributes:
        is_final: Whether it would not be allowed if nothing else were held either.
    """

    zone: str
    why: str
    is_final: bool


def find_refusal(
    config: PodConfig, zone: str, limits: Sequence[ChipLimit], held: Iterable[Hold]
) -> Refusal | None:
    """Return why a pod is not allowed in a zone, or None.

    Args:
        config: What would be asked for.
        zone: Where.
        limits: The table; an empty one allows everything.
        held: What is held already, by anybody and anywhere; each pod once or more.
    """
    if not limits:
        return None
    asked = config.slice
    what = f"{asked.chip.name} chips ({_listed(config.tier)})"
    row = _row_of(config, zone, limits)
    if row is None:
        zones = [one.zone for one in limits if is_of(one, config)]
        near = did_you_mean(zone, dict.fromkeys(zones))
        return Refusal(zone, f"launch.limits grants no {what} in {zone or 'any zone'}.{near}", True)
    granted = f"launch.limits grants {row.chips} {what} in {zone}"
    if asked.chips > row.chips:
        return Refusal(zone, f"{granted}, and {asked} has {asked.chips}.", True)
    there = _held_in(config, zone, held)
    taken = sum(there.values())
    if taken + asked.chips <= row.chips:
        return None
    holders = ", ".join(list(there)[:_NAMED]) + (", …" if len(there) > _NAMED else "")
    return Refusal(
        zone, f"{granted}: {taken} are held ({holders}), and {asked} has {asked.chips}.", False
    )


def zones_within_limits(
    config: PodConfig,
    zones: Sequence[str],
    *,
    limits: Sequence[ChipLimit],
    held: Sequence[Hold],
    progress: Progress = silent,
) -> list[str]:
    """Return the zones in which limits allow a pod, in the same order.

    Args:
        config: What would be asked for.
        zones: Where it may be.
        limits: The table; an empty one allows everything.
        held: What is held already.
        progress: Told of each zone that is passed over, and why.

    Raises:
        PodUnavailable: There is none; the message says which limits refuse it, and the way out.
    """
    refusals = [find_refusal(config, zone, limits, held) for zone in zones]
    found = [one for one in refusals if one is not None]
    if found and len(found) == len(zones):
        raise unavailable(found)
    for one in found:
        progress(f"{one.zone} is passed over: {one.why}")
    return [zone for zone, refusal in zip(zones, refusals, strict=True) if refusal is None]


def limit_findings(
    config: PodConfig, zones: Sequence[str], limits: Sequence[ChipLimit], held: Sequence[Hold]
) -> Iterator[DoctorFinding]:
    """Say for each zone whether limits allow a pod; an error where they do in none."""
    if not limits:
        return
    refusals = [find_refusal(config, zone, limits, held) for zone in zones]
    severity = "error" if all(refusals) else "warning"
    for zone, refusal in zip(zones, refusals, strict=True):
        if refusal is not None:
            yield DoctorFinding("limits", "resources", severity, refusal.why, fix=WAY_OUT)
            continue
        row = _row_of(config, zone, limits)
        taken = sum(_held_in(config, zone, held).values())
        yield DoctorFinding(
            *("limits", "resources", "ok"),
            f"{taken} of the {row.chips if row else 0} {config.slice.chip.name} chips "
            f"({_listed(config.tier)}) granted in {zone} are held, and {config.slice} has "
            f"{config.slice.chips}",
        )


def unavailable(refusals: Sequence[Refusal]) -> PodUnavailable:
    """Return the error of a pod that limits allow nowhere."""
    said = " ".join(dict.fromkeys(one.why for one in refusals))
    hopeless = all(one.is_final for one in refusals)
    cause = Cause.UNPLACEABLE if hopeless else Cause.QUOTA
    return PodUnavailable(f"{said} {WAY_OUT}", cause=cause.value)


def _row_of(config: PodConfig, zone: str, limits: Sequence[ChipLimit]) -> ChipLimit | None:
    return next((one for one in limits if one.zone == zone and is_of(one, config)), None)


def is_of(row: ChipLimit, config: PodConfig) -> bool:
    """Whether a row limits what is asked for, in its zone."""
    return (row.type, row.tier) == (config.slice.chip.name, _listed(config.tier))


def _held_in(config: PodConfig, zone: str, held: Iterable[Hold]) -> dict[str, int]:
    """Return the chips that each pod holds of what the same row limits."""
    generation = config.slice.chip.name
    return {
        one.pod: one.slice.chips
        for one in held
        if (one.zone, one.slice.chip.name, one.tier) == (zone, generation, config.tier)
    }


def _listed(tier: Tier) -> str:
    """Return a tier as rows of the table have it."""
    return tier.value.replace("_", "-")
