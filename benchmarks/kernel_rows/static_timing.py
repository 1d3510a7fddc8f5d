"""Measured Pallas rows followed bundle by bundle, as `tpukit kernel bench` follows any kernel."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kernel_rows.programs import program_of
from kernel_rows.rows import Row
from tpukit.errors import TPUError
from tpukit.kernels.timing import (
    Calibration,
    KernelEstimate,
    KernelProfile,
    profile_kernel,
    time_profile,
)

# tokamax's cross-entropy is not among them: a forward kernel takes minutes to compile, and the
# backward one is refused by this compiler (scoped VMEM).
KINDS = {
    "attention_fwd": "flash_attention",
    "attention_bwd": "flash_attention_backward",
    "ragged_dot": "grouped_matmul",
}
LARGEST_TILE = 1024 * 2048  # attention in larger tiles takes minutes to compile, too


@dataclass(frozen=True)
class Followed:
    """A measured row whose program was compiled and run through."""

    row: Row
    profile: KernelProfile

    @property
    def kind(self) -> str:
        """What `tpukit kernel bench` calls kernels of this kind."""
        return KINDS[self.row.op]

    @cached_property
    def parts(self) -> KernelEstimate:
        """Its estimate at the rates in use: how often each kernel runs, and what is around them."""
        return time_profile(self.profile)

    def time_us(self, calibration: Calibration) -> float:
        """Its time at the rates of a calibration."""
        rates = calibration.rates(self.profile.chip)
        kernels = sum(
            call.estimate(rates).time_s * self.parts.times[name]
            for name, call in self.profile.calls.items()
        )
        return (kernels + self.parts.surrounding_s) * 1e6

    @property
    def turns(self) -> float:
        """Turns of all its kernels' outermost loops."""
        return self.parts.grid_steps


def spread(rows: Sequence[Row], per_group: int) -> list[Row]:
    """Some Pallas rows of each device and op, of different shapes, from fastest to slowest."""
    groups: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row.op in KINDS and row.impl == "pallas_mosaic_tpu" and _tile(row) <= LARGEST_TILE:
            groups[row.device, row.op].setdefault(row.shape_key, row)
    chosen: list[Row] = []
    for shapes in groups.values():
        ordered = sorted(shapes.values(), key=lambda row: row.measured_us)
        count = min(per_group, len(ordered))
        places = {round(i * (len(ordered) - 1) / max(count - 1, 1)) for i in range(count)}
        chosen += [ordered[place] for place in sorted(places)]
    return chosen


def _tile(row: Row) -> int:
    """Scores in one tile of an attention kernel; 0 for others."""
    suffix = "_dkv" if row.op.endswith("_bwd") else ""
    return row.config.get(f"block_q{suffix}", 0) * row.config.get(f"block_kv{suffix}", 0)


def follow(row: Row) -> Followed | str:
    """Compile a row's program and run through its kernels, or say why that failed."""
    program = program_of(row)
    if program is None:
        return "not a kernel of tokamax 0.0.12"
    try:
        profile = profile_kernel(*program, row.device)
    except TPUError as error:
        return str(error)
    return "; ".join(profile.reasons.values()) or Followed(row, profile)
