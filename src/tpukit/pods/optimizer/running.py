"""Compiled steps on some devices, and the optimizer's state that goes from one to the next."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...annotations import Device, PyTree
from ...errors import TPUValidationError
from ...parallel.rebalancing.reshard import move
from .placement import by_example, divided, mesh_of
from .program import OptimizerProgram, Stepped


class Runner:
    """Runs step programs on a mesh.

    Attributes:
        opt_state: After the last step that was kept; None before the first.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.mesh: Mesh = mesh_of(devices)
        self.opt_state: PyTree = None
        self._like: PyTree = None
        self._compiled: dict[OptimizerProgram, Any] = {}

    def move_to(self, devices: Sequence[Device]) -> None:
        """Go on with other devices; the state is moved there."""
        self.mesh = mesh_of(devices)
        self._compiled.clear()
        if self.opt_state is not None:
            self.opt_state = self.divide(self.opt_state)

    def divide(self, tree: PyTree) -> PyTree:
        """Return parameters, or what is like them, divided among the devices."""
        return jax.tree.map(lambda leaf: move(leaf, divided(leaf.shape, self.mesh)), tree)

    def divide_batch(self, batch: PyTree) -> PyTree:
        """Return a batch divided by examples."""
        return jax.tree.map(
            lambda leaf: move(jnp.asarray(leaf), by_example(leaf.shape, self.mesh)), batch
        )

    def run(
        self,
        program: OptimizerProgram,
        values: PyTree,
        given: PyTree,
        *,
        options: Mapping[str, Any],
        whole: bool,
    ) -> Stepped:
        """Take a step; the state is replaced by whoever keeps the result.

        Args:
            program: The step.
            values: Parameters, wherever they are.
            given: A batch or gradients, divided.
            options: Of the compiler, on TPU.
            whole: Whether it is compiled as a whole, or run operation by operation.
        """
        values = self.divide(values)
        self._prepare_state(program, values)
        if not whole:
            return program(values, self.opt_state, given)
        if program not in self._compiled:
            on_tpu = jax.default_backend() == "tpu"
            whole_copy = NamedSharding(self.mesh, PartitionSpec())
            params, state = jax.tree.map(lambda leaf: leaf.sharding, (values, self.opt_state))
            self._compiled[program] = jax.jit(
                program,
                # What comes out lies where it lay, so that the next step moves nothing.
                out_shardings=Stepped._make((params, state, whole_copy, whole_copy)),
                compiler_options=dict(options) if on_tpu else None,
            )
        return self._compiled[program](values, self.opt_state, given)

    def _prepare_state(self, program: OptimizerProgram, values: PyTree) -> None:
        shapes = jax.tree.map(shape_of, values)
        if self.opt_state is None:
            self._like = shapes
            self.opt_state = self.divide(program.optimizer.init(values))
        elif shapes != self._like:
            raise TPUValidationError(
                "These parameters are not those of the steps before, whose optimizer state is "
                "kept here; make another TpuOptimizer for them."
            )


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and format of an array."""
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
