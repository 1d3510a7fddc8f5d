"""Why slices are not in the answer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...hardware import Slice
from ...hardware.figure import format_quantity
from ...shown import Facts
from ..amounts import days_text
from ..cost.money import Costs, Preemption
from ..cost.scoring import Scores
from .objectives import SAME, Judgement, PlanLimits


@dataclass(frozen=True)
class Rejection(Facts):
    """Slices of one generation that fail for the same reason."""

    slices: tuple[str, ...]
    reason: str

    @property
    def what(self) -> str:
        """The slices as a short text."""
        if len(self.slices) == 1:
            return self.slices[0]
        return f"{self.slices[0]} … {self.slices[-1]} ({len(self.slices)} slices)"


def find_rejections(
    where: Sequence[Slice],
    scores: Scores,
    costs: Costs,
    verdicts: Judgement,
    limits: PlanLimits,
    preemption: Preemption,
) -> tuple[Rejection, ...]:
    """Return the slices without a candidate that passes, by generation and reason.

    Slices whose fastest layouts do not fit in their hosts' memory are included.
    """
    found: dict[tuple[str, str], list[tuple[float, str, str]]] = {}
    meshes_of = {mesh.slice: [] for mesh in scores.candidates.meshes}
    for number, mesh in enumerate(scores.candidates.meshes):
        meshes_of[mesh.slice].append(number)
    order = np.argsort(scores.candidates.mesh, kind="stable")
    edges = np.searchsorted(
        scores.candidates.mesh[order], np.arange(len(scores.candidates.meshes) + 1)
    )
    for on in where:
        meshes = meshes_of.get(on, [])
        indices = np.concatenate(
            [order[edges[mesh] : edges[mesh + 1]] for mesh in meshes] or [order[:0]]
        )
        if verdicts.passed[indices].any():
            if skipped := _faster_but_for_hosts(indices, scores, costs, verdicts):
                found.setdefault((on.chip.name, "skipped"), []).append((0.0, str(on), skipped))
            continue
        kind, distance, words = _why(indices, scores, costs, verdicts, limits, preemption)
        found.setdefault((on.chip.name, kind), []).append((distance, str(on), words))
    return tuple(
        Rejection(tuple(name for _, name, _ in entries), min(entries)[2])
        for entries in found.values()
    )


def _why(
    indices: np.ndarray,
    scores: Scores,
    costs: Costs,
    verdicts: Judgement,
    limits: PlanLimits,
    preemption: Preemption,
) -> tuple[str, float, str]:
    """Return the first limit that no candidate passes: kind, distance and text."""
    if not len(indices):
        return "batch", 0.0, "one example for each share of the batch is more than a step may have"
    on_device = indices[verdicts.fits_device[indices]]
    if not len(on_device):
        share = scores.memory_share[indices]
        best = indices[np.argmin(share)]
        need = format_quantity(float(scores.memory.total[best]), "B")
        have = format_quantity(float(scores.usable_bytes[best]), "B")
        spare = f" with {limits.min_headroom:.0%} to spare" if limits.min_headroom else ""
        words = f"does not fit: the leanest needs {need} of {have} a device{spare} (model)"
        return "memory", float(share.min()), words
    fits = on_device[verdicts.fits_host[on_device]]
    if not len(fits):
        return _no_room_on_hosts(on_device, scores)
    finishes = fits[verdicts.finishes[fits]]
    if not len(finishes):
        return "progress", 0.0, why_never(fits, scores, costs, preemption)
    in_time = finishes[verdicts.in_time[finishes]]
    if not len(in_time):
        days = float(costs.days[finishes].min())
        return (
            "time",
            days,
            f"too slow: at best {days_text(days)}, {days_text(limits.deadline_days or 0)} asked",
        )
    usd = costs.usd[in_time]
    if np.isnan(usd).all():
        return "price", 0.0, "no price is known, so nothing says it is within the budget"
    least = float(np.nanmin(usd))
    return "money", least, f"too dear: at best ${least:,.0f}, ${limits.budget_usd:,.0f} asked"


def _no_room_on_hosts(indices: np.ndarray, scores: Scores) -> tuple[str, float, str]:
    share = scores.host_share[indices]
    best = indices[np.argmin(share)]
    words = f"does not fit on its hosts: the leanest puts {_host_text(scores, best)}"
    return "host", float(share.min()), words


def _faster_but_for_hosts(
    indices: np.ndarray, scores: Scores, costs: Costs, verdicts: Judgement
) -> str:
    """Return a layout that would be faster with more host memory; "" if there is none."""
    passed = indices[verdicts.passed[indices]]
    wanted = verdicts.fits_device & ~verdicts.fits_host & verdicts.finishes
    others = indices[wanted[indices]]
    if not len(others):
        return ""
    best = others[np.argmin(costs.days[others])]
    gain = 1 - costs.days[best] / costs.days[passed].min()
    if gain < SAME:
        return ""
    remat = scores.candidates.remats[scores.candidates.remat[best]]
    return f"{remat} would be {gain:.0%} faster and puts {_host_text(scores, best)}"


def _host_text(scores: Scores, index: int) -> str:
    on = scores.candidates.meshes[scores.candidates.mesh[index]].slice
    room = float(scores.host_room_bytes[index])
    if np.isnan(room):
        return f"activations on hosts whose memory is {on.chip.host_ram_bytes.reason}"
    need, have = (
        format_quantity(share * room * on.devices_per_host / 1e9, "GB")
        for share in (float(scores.host_share[index]), 1.0)
    )
    return f"{need} on each host, which has room for {have} (model)"


def why_never(indices: np.ndarray, scores: Scores, costs: Costs, preemption: Preemption) -> str:
    """Return why no candidate makes progress on spot, and what would help the best of them."""
    best = indices[np.argmin(costs.save_s[indices])]
    slices = int(scores.candidates.num_slices[best])
    step_s = float(scores.step_time_s[best])
    save_s, write_s = float(costs.save_s[best]), float(costs.write_s[best])
    return preemption.why_never(save_s, slices, write_s=write_s, step_s=step_s)


def state_bytes(scores: Scores) -> float:
    """Return weights, gradients and moments of the whole model in bytes, in the leanest format."""
    if not len(scores.candidates):
        return float("nan")
    sizes = scores.candidates.sizes
    devices = np.ones(len(scores.candidates))
    for axis in ("fsdp", "tensor", "stage", "expert"):
        devices = devices * sizes[axis]
    memory = scores.memory
    return float(np.min((memory.weights + memory.gradients + memory.optimizer) * devices))
