"""Between a training state on a mesh and checkpoints: what is saved, and how it comes back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..step.parts import TrainState
from ..step.workload import Workload
from .checkpoint import TPUCheckpointer


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A state as it was saved, and where data and guard stood."""

    state: TrainState
    step: int
    data: dict[str, Any] | None
    guard: dict[str, Any] | None


class StateKeeper:
    """Saves a workload's state on a mesh, and restores it onto that mesh.

    The random numbers of a step are a function of the seed and the step, so keeping the step
    keeps them too.

    Attributes:
        saved_step: The newest step that is known to be on disk.
        pending_step: A step that is being written.
    """

    def __init__(self, work: Workload, mesh: Any, checkpointer: TPUCheckpointer) -> None:
        self._work, self._mesh, self._checkpointer = work, mesh, checkpointer
        self.saved_step: int | None = None
        self.pending_step: int | None = None

    @property
    def directory(self) -> str:
        """Where the checkpoints are."""
        return self._checkpointer.directory

    @property
    def newest_path(self) -> str | None:
        """The newest checkpoint, or None when none was saved."""
        if self.saved_step is None:
            return None
        return f"{self.directory.rstrip('/')}/{self.saved_step}"

    def prepare(self) -> None:
        """Make ready, beside the compile, what the first save would wait for."""
        shapes, _ = self._work.abstract_args(self._mesh)
        self._checkpointer.prepare(**_items(shapes))

    def save(
        self, step: int, state: TrainState, *, data: Mapping[str, Any], guard: Mapping[str, Any]
    ) -> None:
        """Save the state after `step`; the write goes on in the background.

        Raises:
            TPUStorageError: The storage failed.
        """
        self._checkpointer.save(
            step,
            **_items(state),
            data=data,
            metadata={"guard": dict(guard), "seed": self._work.seed},
        )
        self.pending_step = step

    def restore(self) -> Restored | None:
        """The newest good checkpoint, each leaf in its place; None where there are none.

        Raises:
            TPUCheckpointError: It is of another model, or none of those there is good.
            TPUStorageError: It cannot be read now.
        """
        self.wait()
        if self._checkpointer.latest_step() is None:
            return None
        shapes, _ = self._work.abstract_args(self._mesh)
        found = self._checkpointer.restore(like=_items(shapes))
        self.saved_step = found.step
        place = shapes.step.sharding
        return Restored(
            state=TrainState(
                step=jax.device_put(jnp.asarray(found.step, jnp.int32), place),
                params=found.params,
                opt_state=found.items.get("opt_state", shapes.opt_state),
                model_state=found.items.get("model_state", shapes.model_state),
            ),
            step=found.step,
            data=found.data,
            guard=found.metadata.get("guard"),
        )

    def wait(self) -> None:
        """Return when the last save is on disk.

        Raises:
            TPUStorageError: It could not be written.
        """
        pending, self.pending_step = self.pending_step, None
        self._checkpointer.wait()
        if pending is not None:
            self.saved_step = pending

    def close(self) -> None:
        """Finish the last save and let go of the folder."""
        self._checkpointer.close()


def _items(state: TrainState) -> dict[str, Any]:
    """What a checkpoint holds; trees without leaves are made of nothing but their shape."""
    items = {"params": state.params, "opt_state": state.opt_state, "model_state": state.model_state}
    return {name: tree for name, tree in items.items() if jax.tree.leaves(tree)}
