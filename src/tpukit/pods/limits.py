"""Limits on the chips that a project was granted, enforced before a provider is asked.

No public API reports a TPU Research Cloud grant, and chips beyond the grant are billed. So a job
states the grant in `launch.limits`. A zone in which a pod would exceed its limit is skipped, and so
is a zone without a row. As for quota, every pod that the provider still lists counts, including
lost pods and pods that are being deleted.
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
    "Release pods (tpukit pods ls), add zones, use a smaller slice, or correct launch.limits if "
    "you were granted more."
)
_NAMED = 3  # number of pods that a message names


@dataclass(frozen=True)
class Hold:
    """Chips in use by a pod, or just requested for it."""

    pod: str
    zone: str
    slice: Slice
    tier: Tier

    @classmethod
    def of(cls, pod: Pod) -> "Hold":
        """Return the chips in use by a pod."""
        return cls(pod.name, pod.zone, pod.slice, pod.tier)


@dataclass(frozen=True)
class Refusal:
    """Why a limit rules out a pod in a zone.

    Attributes:
        is_final: Whether the limit would rule it out even if no other chips were in use.
    """

    zone: str
    why: str
    is_final: bool


def find_refusal(
    config: PodConfig, zone: str, limits: Sequence[ChipLimit], held: Iterable[Hold]
) -> Refusal | None:
    """Return why limits rule out a pod in a zone, or None.

    Args:
        config: The request.
        zone: The zone.
        limits: Rows of `launch.limits`; without rows everything is allowed.
        held: Chips in use by any pod, in any zone; a pod may be listed several times.
    """
    if not limits:
        return None
    wanted = config.slice
    what = f"{wanted.chip.name} chips ({_listed(config.tier)})"
    row = _row_of(config, zone, limits)
    if row is None:
        zones = [row.zone for row in limits if applies_to(row, config)]
        near = did_you_mean(zone, dict.fromkeys(zones))
        return Refusal(zone, f"launch.limits grants no {what} in {zone or 'any zone'}.{near}", True)
    granted = f"launch.limits grants {row.chips} {what} in {zone}"
    if wanted.chips > row.chips:
        return Refusal(zone, f"{granted}, but {wanted} needs {wanted.chips}.", True)
    there = _held_in(config, zone, held)
    taken = sum(there.values())
    if taken + wanted.chips <= row.chips:
        return None
    holders = ", ".join(list(there)[:_NAMED]) + (", …" if len(there) > _NAMED else "")
    return Refusal(
        zone,
        f"{granted}: {taken} are in use ({holders}), and {wanted} needs {wanted.chips}.",
        False,
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
        config: The request.
        zones: Zones to consider.
        limits: Rows of `launch.limits`; without rows everything is allowed.
        held: Chips in use.
        progress: Called with each zone that is skipped, and why.

    Raises:
        PodUnavailable: Limits allow the pod in no zone. The message names the limits and the fix.
    """
    refusals = [find_refusal(config, zone, limits, held) for zone in zones]
    refused = [refusal for refusal in refusals if refusal is not None]
    if refused and len(refused) == len(zones):
        raise unavailable(refused)
    for refusal in refused:
        progress(f"{refusal.zone} is skipped: {refusal.why}")
    return [zone for zone, refusal in zip(zones, refusals, strict=True) if refusal is None]


def limit_findings(
    config: PodConfig, zones: Sequence[str], limits: Sequence[ChipLimit], held: Sequence[Hold]
) -> Iterator[DoctorFinding]:
    """Yield for each zone whether limits allow a pod; errors if no zone is allowed."""
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
            f"({_listed(config.tier)}) granted in {zone} are in use, and {config.slice} needs "
            f"{config.slice.chips}",
        )


def unavailable(refusals: Sequence[Refusal]) -> PodUnavailable:
    """Return the error for a pod that limits allow in no zone."""
    text = " ".join(dict.fromkeys(refusal.why for refusal in refusals))
    hopeless = all(refusal.is_final for refusal in refusals)
    cause = Cause.UNPLACEABLE if hopeless else Cause.QUOTA
    return PodUnavailable(f"{text} {WAY_OUT}", cause=cause.value)


def _row_of(config: PodConfig, zone: str, limits: Sequence[ChipLimit]) -> ChipLimit | None:
    return next((row for row in limits if row.zone == zone and applies_to(row, config)), None)


def applies_to(row: ChipLimit, config: PodConfig) -> bool:
    """Whether a row applies to the requested chips and tier."""
    return (row.type, row.tier) == (config.slice.chip.name, _listed(config.tier))


def _held_in(config: PodConfig, zone: str, held: Iterable[Hold]) -> dict[str, int]:
    """Return the chips per pod that count against the same row."""
    generation = config.slice.chip.name
    return {
        hold.pod: hold.slice.chips
        for hold in held
        if (hold.zone, hold.slice.chip.name, hold.tier) == (zone, generation, config.tier)
    }


def _listed(tier: Tier) -> str:
    """Return a tier in the spelling of `launch.limits`."""
    return tier.value.replace("_", "-")
