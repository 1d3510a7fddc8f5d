"""Measured Pallas rows followed bundle by bundle, as `tpukit kernel bench` follows any kernel."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu_kernel as ragged_kernel

from kernel_rows.programs import program_of
from kernel_rows.ragged_dot import Sizes
from kernel_rows.rows import Row
from tpukit.compiler.bundles import CallTrace, trace_call, words_of
from tpukit.errors import TPUError
from tpukit.kernels.timing import (
    Calibration,
    KernelEstimate,
    KernelProfile,
    profile_kernel,
    time_profile,
)
from tpukit.kernels.timing.profile import kernel_calls

KINDS = {
    "attention_fwd": "flash_attention",
    "attention_bwd": "flash_attention_backward",
    "ragged_dot": "grouped_matmul",
    "linear_softmax_cross_entropy_fwd": "cross_entropy",
    "linear_softmax_cross_entropy_bwd": "cross_entropy_backward",
}


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
    groups: dict[tuple[str, str, str], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row.op in KINDS and row.impl == "pallas_mosaic_tpu" and row.config:
            key = (row.device, row.op, row.dims.get("variant", ""))
            groups[key].setdefault(row.shape_key, row)
    chosen: list[Row] = []
    for shapes in groups.values():
        ordered = sorted(shapes.values(), key=lambda row: row.measured_us)
        count = min(per_group, len(ordered))
        places = {round(i * (len(ordered) - 1) / max(count - 1, 1)) for i in range(count)}
        chosen += [ordered[place] for place in sorted(places)]
    return chosen


def follow(row: Row) -> Followed | str:
    """Compile a row's program and run through its kernels, or say why that failed."""
    program = program_of(row)
    if program is None:
        return "not a kernel of tokamax 0.0.12"
    try:
        profile = profile_kernel(*program, row.device)
        if row.op == "ragged_dot":
            profile = _with_groups(row, profile)
    except TPUError as error:
        return str(error)
    if profile.reasons:
        return "; ".join(profile.reasons.values())
    cores = profile.chip.cores_per_device
    calls = {name: replace(call, cores=call.cores[:cores]) for name, call in profile.calls.items()}
    return Followed(row, replace(profile, calls=calls))


def _with_groups(row: Row, profile: KernelProfile) -> KernelProfile:
    """Follow a grouped product with the tables tokamax computes from its group sizes.

    It passes them as plain operands, which `profile_kernel` does not evaluate.
    """
    traces: dict[str, CallTrace] = dict(profile.calls)
    for call, parent in kernel_calls(profile.compiled):
        shapes = [parent.by_name[name].shapes[0] for name in call.operands]
        tables = {
            index: words_of(values, shapes[index]) for index, values in enumerate(_tables(row))
        }
        listing = profile.compiled.kernel_listings[call.name]
        traces[call.name] = trace_call(call.name, listing, profile.chip.name, tables=tables)
    return replace(profile, calls=traces, reasons={})


def _tables(row: Row) -> list[Any]:
    sizes = Sizes.of(row)
    metadata, active = ragged_kernel.make_group_metadata(
        group_sizes=jnp.asarray(sizes.group_sizes, jnp.int32),
        m=sizes.m,
        tm=row.config["tile_m"],
        start_group=jnp.int32(0),
        num_nonzero_groups=sizes.groups,
        visit_empty_groups=sizes.is_weight_gradient,
    )
    first = np.zeros(1, np.int32)
    return [np.asarray(active).reshape(1), *(np.asarray(one) for one in metadata), first]
