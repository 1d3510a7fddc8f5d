"""Which slices a job may have, and how long its step would take on each of them."""

from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError
from ...hardware import Figure, PriceBook, Slice, list_slices
from .metrics import WorkloadMetrics


def cores_of(on: Slice) -> int:
    """Return the TensorCores of all chips."""
    return on.chips * on.chip.cores_per_chip


def legal_slices(on: Slice, *, min_cores: int, max_cores: int) -> tuple[Slice, ...]:
    """Return what a slice may become, smallest first: sizes of one slice, or more slices like it.

    Raises:
        ConfigError: None has that many cores.
    """
    if on.num_slices == 1:
        possible = list(list_slices(on.chip.name))
    else:
        of_one = cores_of(on) // on.num_slices
        most = max(1, max_cores // of_one)
        possible = [Slice(on.chip, on.topology, number) for number in range(1, most + 1)]
    sizes = {cores_of(one): one for one in possible}
    sizes[cores_of(on)] = on  # in its own shape
    found = [sizes[cores] for cores in sorted(sizes) if min_cores <= cores <= max_cores]
    if not found:
        near = ", ".join(str(cores) for cores in sorted(sizes)[:12])
        raise ConfigError(
            f"No {on.chip.name} slice has {min_cores} to {max_cores} cores; they come with "
            f"{near} …; set with_min_cores and with_max_cores around one of them."
        )
    return tuple(found)


@dataclass(frozen=True)
class Size:
    """A slice, and what the job's step would be on it.

    What the devices compute is divided by the cores; what they wait for stays as long as it is.

    Attributes:
        step_s: Predicted; measured for the slice that runs now.
        utilization: The same of the share of a step in which devices compute.
        usd_per_step: By the catalogue; missing where no price is known.
    """

    slice: Slice
    step_s: Figure
    utilization: Figure
    usd_per_step: Figure

    @property
    def cores(self) -> int:
        """TensorCores."""
        return cores_of(self.slice)

    @property
    def core_seconds(self) -> float:
        """Of one step: what it costs where no price is known."""
        return self.cores * (self.step_s.value or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "slice": str(self.slice),
            "cores": self.cores,
            "step_s": self.step_s.to_dict(),
            "utilization": self.utilization.to_dict(),
            "usd_per_step": self.usd_per_step.to_dict(),
        }


def predict_size(metrics: WorkloadMetrics, on: Slice, prices: PriceBook) -> Size:
    """Return what the job would be like on another slice of the same generation."""
    now = metrics.config.slice
    step_s = metrics.step_s.require("scaling")
    busy_s = step_s * metrics.utilization.require("scaling")
    busy_there = busy_s * cores_of(now) / cores_of(on)
    there_s = busy_there + (step_s - busy_s)
    model = Figure(1.0, "", "model", "computing divided by cores, waiting as it is")
    inputs = (metrics.step_s, metrics.utilization)
    inputs = inputs if on == now else (*inputs, model)
    # Any region will do: the question is which size, and regions scale all of them alike.
    zones = metrics.config.zones
    region = zones[0].rpartition("-")[0] if zones else None
    priced = {rate.region for rate in prices.find(on.chip.name)}
    price = prices.cost_per_hour(
        on, region=region if region in priced else None, tier=_tier(metrics)
    )
    step = Figure.derived(there_s, "s", inputs=inputs)
    value = None if price.value is None else price.value * there_s / 3600
    return Size(
        slice=on,
        step_s=step,
        utilization=Figure.derived(busy_there / there_s if there_s else 1.0, "", inputs=inputs),
        usd_per_step=Figure.derived(value, "USD/step", inputs=(price, step)),
    )


def _tier(metrics: WorkloadMetrics) -> str:
    return "spot" if metrics.config.tier.value == "spot" else "on_demand"
