"""Tokens or examples per second and MFU of a step, with the convention they are counted by."""

from dataclasses import dataclass
from typing import Any

from ..errors import SliceError
from ..hardware import (
    Chip,
    Figure,
    get_chip,
    mfu_convention,
    model_flop_utilization,
    peak_of_products,
)
from ..models.transformer.config import operand_format
from ..step.traced_flops import model_flops
from ..step.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """How to turn a step's seconds into rates.

    Attributes:
        devices: JAX devices that take part.
        chips: What they are on; as many as devices where nothing else is known.
        tokens_per_step: Over all devices; None when the batch is not made of sequences.
        flops_per_step: Of the model, over all devices; a figure of origin `model`.
        examples_per_step: Over all devices, where the batch is not made of sequences; else None.
        mfu_peak: The peak that MFU is a share of: by the formats of the products, or "the given".
        peak_tflops: That peak, of all devices together.
    """

    devices: int
    chips: int
    device_kind: str
    tokens_per_step: int | None
    flops_per_step: Figure
    peak_tflops: Figure
    mfu_peak: str = "bf16"
    examples_per_step: int | None = None

    @classmethod
    def of(
        cls, work: Workload, devices: list[Any], *, peak_tflops: float | None = None
    ) -> "Throughput":
        """Make it for a workload on devices; `peak_tflops` is one device's, given by the user."""
        kind: str = devices[0].device_kind
        chip = _chip(devices[0])
        formats = () if work.config is None else (operand_format(work.config.matmul),)
        name = "the given"
        if peak_tflops is not None:
            peak = Figure(peak_tflops, "TFLOP/s", "user", "peak_tflops").scaled(len(devices))
        elif chip is not None:
            name = peak_of_products(chip, formats)
            peak = chip.per_device(chip.peak(name)).scaled(len(devices))
        else:
            peak = Figure.missing(
                "TFLOP/s", f"no peak is known for '{kind}'; give peak_tflops of one device"
            )
        # To trace somebody's own model takes a while, which only a peak is worth.
        counted = work.config is not None or peak.value is not None
        flops = model_flops(work) if counted else Figure.missing("FLOP", peak.reason)
        return cls(
            devices=len(devices),
            chips=count_chips(devices),
            device_kind=kind,
            tokens_per_step=work.tokens_per_step,
            flops_per_step=flops,
            peak_tflops=peak,
            mfu_peak=name,
            examples_per_step=work.examples if work.tokens_per_step is None else None,
        )

    def tokens_per_s_per_chip(self, step_time_s: float) -> float | None:
        """Tokens a chip gets through in a second."""
        if self.tokens_per_step is None or step_time_s <= 0:
            return None
        return self.tokens_per_step / step_time_s / self.chips

    def examples_per_s_per_chip(self, step_time_s: float) -> float | None:
        """Examples per second and chip, where they are not made of tokens."""
        if self.examples_per_step is None or step_time_s <= 0:
            return None
        return self.examples_per_step / step_time_s / self.chips

    def mfu(self, step_time_s: float) -> float | None:
        """Model FLOPs over those of `mfu_peak`; None where either is not known."""
        flops, peak = self.flops_per_step.value, self.peak_tflops.value
        return model_flop_utilization(flops, step_time_s, peak)

    @property
    def mfu_convention(self) -> str:
        """How the FLOPs of MFU are counted, and over which peak."""
        return mfu_convention(self.mfu_peak)

    @property
    def no_mfu(self) -> str:
        """Why there is no MFU, or ""."""
        return self.flops_per_step.reason or self.peak_tflops.reason

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "devices": self.devices,
            "chips": self.chips,
            "device_kind": self.device_kind,
            "tokens_per_step": self.tokens_per_step,
            "examples_per_step": self.examples_per_step,
            "flops_per_step": self.flops_per_step.to_dict(),
            "peak_tflops": self.peak_tflops.to_dict(),
            "mfu_convention": self.mfu_convention,
        }


def count_chips(devices: list[Any]) -> int:
    """Chips that some devices are on; a device that is no TPU counts as one."""
    chip = _chip(devices[0])
    return len(devices) // chip.devices_per_chip if chip else len(devices)


def _chip(device: Any) -> Chip | None:
    try:
        return get_chip(device.device_kind) if device.platform == "tpu" else None
    except SliceError:
        return None
