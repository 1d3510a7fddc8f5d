"""Memory and time of every candidate together: one pass of array arithmetic."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ...hardware import Chip
from ...hardware.rates import MemoryRates
from ...step.optimizer.spec import state_bytes_per_parameter
from ..cost.host_memory import host_bytes
from ..cost.memory_model import MemorySplit, MeshRoles, estimate_memory_bytes, rounds_first
from ..cost.model_shape import ModelShape
from ..cost.rates import Rates
from ..cost.step_model import StepModel
from ..cost.step_variant import OUR_STEP, StepSplit, StepVariant
from .candidates import Candidates

_PURPOSES = ("weights", "gradients", "optimizer", "activations", "temporaries", "host")


@dataclass(frozen=True)
class Scores:
    """What the models say of every candidate; arrays of one length.

    Attributes:
        usable_bytes: HBM of a device that programs may use.
        host_room_bytes: A device's share of its host's memory that may be filled; NaN where nobody
            published how much a host has.
        host_need_bytes: A device's share of what its host needs to train, save, restore or export.
        saved_bytes: Of a checkpoint, one copy of all parameters and optimizer states.
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
        """HBM needed over HBM that programs may use."""
        return self.memory.total / self.usable_bytes

    @property
    def host_share(self) -> np.ndarray:
        """Share of the host's room that is needed.

        Where that room is not known, nothing may be offloaded.
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
        candidates: What to score.
        sequence_length: Tokens in an example.
        variant: How the step is written, where it is not as we write it.
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
    """The memory model a remat policy at a time: the policy decides which formula holds."""
    shapes = shape.trained_shapes
    kept = [state_bytes_per_parameter(one, shapes) for one in candidates.optimizers]
    optimizer_bytes = np.asarray(kept)
    purposes: dict[str, Any] = {name: np.zeros(len(candidates)) for name in _PURPOSES}
    copies = [rounds_first(mesh.slice.chip.name) for mesh in candidates.meshes]
    for index, remat in enumerate(candidates.remats):
        chosen = np.flatnonzero(candidates.remat == index)
        some = candidates.take(chosen)
        # Slices that hold a copy each need what one of them needs.
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
