"""Rates of one device of each candidate, as arrays, from the timeline's machine model."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ...compiler.timeline.machine import Machine
from ...hardware import Slice
from ...hardware.rates import StepRates
from .candidates import PRECISIONS, Candidates, SliceMesh
from .torus import AXES, Links


@dataclass(frozen=True)
class AxisRates:
    """Rates of the links of one mesh axis by candidate: bytes per second, shares, latency."""

    bytes_per_s: np.ndarray
    share: np.ndarray
    latency_s: np.ndarray
    all_to_all: np.ndarray

    def gather_s(self, amount: np.ndarray, *, times: np.ndarray | float = 1.0) -> np.ndarray:
        """Return the seconds of `times` all-gathers or reduce-scatters of `amount` bytes."""
        return times * (amount * self.share / self.bytes_per_s + self.latency_s)

    def reduce_s(self, amount: np.ndarray, *, times: np.ndarray | float = 1.0) -> np.ndarray:
        """Return the seconds of all-reduces, each a reduce-scatter and an all-gather.

        Over several torus axes, the timeline reduces axis by axis. Published tensor-parallel steps
        do not show that: a 512B model on v5p would be predicted 17 % too slow instead of 11 %.
        """
        return 2 * self.gather_s(amount, times=times)


@dataclass(frozen=True)
class Rates:
    """Rates of one device of every candidate, in SI units.

    Attributes:
        attention_share: Share of peak of attention, by head size.
        narrow_time: Time of a matmul in the candidate's format relative to bfloat16.
        narrow_gradient_time: The same for the matmuls of weight gradients.
        gather_bytes: Bytes that a weight gather moves relative to the minimum.
        waiting_share: Share by which a step is longer because slices wait for the slowest.
        step: Constants of compiled steps on any chip.
    """

    bf16_flops_per_s: np.ndarray
    narrow_time: np.ndarray
    narrow_gradient_time: np.ndarray
    matrix_share: np.ndarray
    streamed_share: np.ndarray
    attention_share: Mapping[float, np.ndarray]
    backward_over_forward: np.ndarray
    op_time_in_a_step: np.ndarray
    resident_bytes: np.ndarray
    hbm_bytes_per_s: np.ndarray
    ici_bytes_per_s: np.ndarray
    gather_bytes: np.ndarray
    int8_moment_bytes: np.ndarray
    dcn_bytes_per_s: np.ndarray
    waiting_share: np.ndarray
    host_bytes_per_s: np.ndarray
    op_overhead_s: np.ndarray
    axes: dict[str, AxisRates]
    step: StepRates

    @classmethod
    def of(cls, candidates: Candidates, *, head_dims: Iterable[float]) -> "Rates":
        """Look up each rate once per slice, and expand it to the candidates."""
        machines = _machines(candidates.meshes)

        def spread(read: Callable[[Machine], float]) -> np.ndarray:
            known = {on: read(machine) for on, machine in machines.items()}
            return candidates.of_mesh([known[mesh.slice] for mesh in candidates.meshes])

        def of_precision(read: Callable[[Machine, str], float]) -> np.ndarray:
            table = [spread(lambda m, name=name: read(m, name)) for name in PRECISIONS]
            return np.stack(table)[candidates.precision, np.arange(len(candidates))]

        ici = spread(lambda m: m.ici_bytes_per_s)
        hop = spread(lambda m: m.hop_latency_s)
        return cls(
            bf16_flops_per_s=spread(lambda m: m.peak_flops("bf16")),
            narrow_time=of_precision(_narrow_time),
            narrow_gradient_time=of_precision(_narrow_gradient_time),
            matrix_share=spread(lambda m: m.matrix_efficiency),
            streamed_share=spread(lambda m: m.streamed_matrix_efficiency),
            attention_share={
                size: spread(lambda m, size=size: m.attention_share(size)) for size in head_dims
            },
            backward_over_forward=spread(lambda m: m.attention.backward_over_forward),
            op_time_in_a_step=spread(lambda m: m.op_time_in_a_step),
            resident_bytes=spread(lambda m: m.resident_bytes),
            hbm_bytes_per_s=spread(lambda m: m.hbm_bytes_per_s * m.hbm_efficiency),
            ici_bytes_per_s=ici,
            gather_bytes=candidates.of_mesh(
                [_gather_bytes(mesh, machines[mesh.slice]) for mesh in candidates.meshes]
            ),
            int8_moment_bytes=spread(lambda m: m.int8_moment_bytes),
            dcn_bytes_per_s=spread(lambda m: m.dcn_bytes_per_s),
            waiting_share=spread(lambda m: m.wait_per_doubling) * np.log2(candidates.num_slices),
            host_bytes_per_s=spread(lambda m: m.host_bytes_per_s),
            op_overhead_s=spread(lambda m: m.op_overhead_s),
            axes={axis: _axis(candidates, axis, ici, hop) for axis in AXES},
            step=StepRates.of(),
        )


def _machines(meshes: tuple[SliceMesh, ...]) -> dict[Slice, Machine]:
    by_chip: dict[str, Machine] = {}
    machines: dict[Slice, Machine] = {}
    for on in {mesh.slice for mesh in meshes}:
        name = on.chip.name
        if name not in by_chip:
            by_chip[name] = Machine.of(on)
        machines[on] = by_chip[name]
    return machines


def _narrow_time(machine: Machine, precision: str) -> float:
    share = machine.int8_over_bf16 if precision == "int8" else 1.0
    return machine.peak_flops("bf16") / (machine.peak_flops(precision) * share)


def _narrow_gradient_time(machine: Machine, precision: str) -> float:
    gain = machine.int8_gain_over_rows if precision == "int8" else 1.0
    return 1.0 - gain * (1.0 - _narrow_time(machine, precision))


def _gather_bytes(mesh: SliceMesh, machine: Machine) -> float:
    """Return a factor above 1 if one axis spans a whole 3D slice of some generations."""
    topology = mesh.slice.topology
    whole = mesh.sizes.get("fsdp", 1) == mesh.slice.chips_per_slice
    is_torus = len(topology) == 3 and all(size > 1 for size in topology)
    return machine.gathers_along_whole_torus if whole and is_torus else 1.0


def _axis(candidates: Candidates, axis: str, ici: np.ndarray, hop: np.ndarray) -> AxisRates:
    links = [mesh.links.get(axis, Links()) for mesh in candidates.meshes]
    return AxisRates(
        bytes_per_s=ici * candidates.of_mesh([link.lanes for link in links]),
        share=candidates.of_mesh([link.share for link in links]),
        latency_s=hop * candidates.of_mesh([link.hops for link in links]),
        all_to_all=candidates.of_mesh([link.all_to_all for link in links]) / ici,
    )
