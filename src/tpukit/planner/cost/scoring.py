"""Score all candidates by array arithmetic: memory and time."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ...hardware import Chip
from ...hardware.rates import MemoryRates
from ...step.optimizer_spec import state_bytes_per_parameter
from .candidates import Candidates
from .memory_model import MemorySplit, MeshRoles, estimate_memory_bytes, host_bytes, rounds_first
from .model_shape import ModelShape
from .rates import Rates
from .step_model import StepModel
from .step_variant import OUR_STEP, StepSplit, StepVariant

_PURPOSES = ("weights", "gradients", "optimizer", "activations", "temporaries", "host")


@dataclass(frozen=True)
class Scores:
    """Memory and time of every candidate, as arrays of one length.

    Attributes:
        usable_bytes: HBM per device that programs may use.
        host_room_bytes: Host memory per device that may be used; NaN if the host's memory is not
            published.
        host_need_bytes: Host memory per device to train, checkpoint, restore or export.
        saved_bytes: Size of a checkpoint: parameters and optimizer state.
    """

    candidates: Candidates
    memory: MemorySplit
    usable_bytes: np.ndarray
    host_room_bytes: np.ndarray
    host_need_bytes: np.ndarray
    step: StepSplit
    step_time_s: np.ndarray
    tokens_per_step: np.ndarray
    saved_bytes: np.ndarray

    @property
    def memory_share(self) -> np.ndarray:
        """Needed HBM divided by usable HBM."""
        return self.memory.total / self.usable_bytes

    @property
    def host_share(self) -> np.ndarray:
        """Share of the available host memory that is needed.

        If the available memory is unknown, nothing may be offloaded.
        """
        unknown = np.where(self.memory.host > 0, np.inf, 0.0)
        needed = self.host_need_bytes / self.host_room_bytes
        return np.where(np.isnan(self.host_room_bytes), unknown, needed)


def score(
    shape: ModelShape,
    candidates: Candidates,
    *,
    sequence_length: int,
    variant: StepVariant = OUR_STEP,
) -> Scores:
    """Score all candidates.

    Args:
        shape: The model.
        candidates: The candidates.
        sequence_length: Tokens in an example.
        variant: How the step is implemented; by default as in tpukit.
    """
    memory = _memory(shape, candidates, sequence_length)
    usable = [_usable_bytes(mesh.slice.chip) for mesh in candidates.meshes]
    host_room = [_host_room_bytes(mesh.slice.chip) for mesh in candidates.meshes]
    on_host = candidates.of_mesh([mesh.slice.devices_per_host for mesh in candidates.meshes])
    rates = Rates.of(candidates, head_dims={kind.head_dim for kind in shape.kinds})
    model = StepModel(shape, candidates, memory, rates, sequence_length, variant)
    step = model.split()
    shapes = shape.trained_shapes
    states = [state_bytes_per_parameter(one, shapes) for one in candidates.optimizers]
    return Scores(
        candidates=candidates,
        memory=memory,
        usable_bytes=candidates.of_mesh(usable),
        host_room_bytes=candidates.of_mesh(host_room),
        host_need_bytes=host_bytes(memory, shape, on_host) / on_host,
        step=step,
        step_time_s=step.total,
        tokens_per_step=candidates.examples * sequence_length,
        saved_bytes=np.asarray(list(map(shape.state_bytes, states)))[candidates.optimizer],
    )


@cache
def _usable_bytes(chip: Chip) -> float:
    return chip.per_device(chip.hbm_usable_bytes).require("a plan")


def _host_room_bytes(chip: Chip) -> float:
    ram = _host_ram_bytes(chip)
    return np.nan if ram is None else ram * (1 - MemoryRates.of().host_headroom)


@cache
def _host_ram_bytes(chip: Chip) -> float | None:
    return chip.per_device(chip.host_ram_per_chip).value


def _memory(shape: ModelShape, candidates: Candidates, sequence_length: int) -> MemorySplit:
    """Apply the memory model per remat policy, because the policy decides the formula."""
    shapes = shape.trained_shapes
    kept = [state_bytes_per_parameter(one, shapes) for one in candidates.optimizers]
    optimizer_bytes = np.asarray(kept)
    purposes: dict[str, Any] = {name: np.zeros(len(candidates)) for name in _PURPOSES}
    copies = [rounds_first(mesh.slice.chip.name) for mesh in candidates.meshes]
    for index, remat in enumerate(candidates.remats):
        chosen = np.flatnonzero(candidates.remat == index)
        some = candidates.take(chosen)
        # Slices with a full copy each need as much as one slice.
        held_by = some.sizes["fsdp"] * some.slices_sharing
        split = estimate_memory_bytes(
            shape,
            MeshRoles(**{**some.sizes, "fsdp": held_by}),
            per_device_batch=some.batch * some.microbatches,
            sequence_length=sequence_length,
            remat=remat,
            optimizer_bytes=optimizer_bytes[some.optimizer],
            microbatches=some.microbatches,
            whole_copy=some.of_mesh(copies),
            eight_bits=some.precision > 0,
        )
        for name in _PURPOSES:
            purposes[name][chosen] = getattr(split, name)
    return MemorySplit(**purposes)
