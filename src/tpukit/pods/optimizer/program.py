"""The optimizer step as a pure function, used both to compile offline and to run."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ...annotations import AnyMesh, Device, PyTree
from ...errors import PodUnavailable, TPUValidationError
from ...hardware import Slice
from ...runtime.environment import open_devices
from ..causes import Cause

logger = logging.getLogger(__name__)
DATA = "data"
# Sharding smaller arrays saves nothing, so they are replicated.
SMALLEST_DIVIDED = 2**12
LOCAL = "local"


def devices_here(on: Slice, provider: str, devices: Sequence[Device] | None = None) -> list[Device]:
    """Return the devices of this job that belong to a pod's slice.

    For a pod of provider "local" these are this machine's devices, even if they are fewer.

    Raises:
        PodUnavailable: This process does not run on the pod.
    """
    seen = list(open_devices() if devices is None else devices)
    if len(seen) >= on.devices:
        return seen[: on.devices]
    if provider == LOCAL:
        facts = {"slice": str(on), "devices": len(seen), "wanted": on.devices}
        logger.info("fewer devices here than the slice has", extra=facts)
        return seen
    raise PodUnavailable(
        f"{on} has {on.devices} devices, but this process sees {len(seen)}, so it does not run "
        f"on the pod. Start it there (tpukit launch … --on {on}), or rehearse with "
        "provider='local'.",
        cause=Cause.UNREACHABLE.value,
    )


def mesh_of(devices: Sequence[Device]) -> Mesh:
    """Return a mesh with one axis over the devices."""
    grid = np.array(list(devices), dtype=object)
    return Mesh(grid, (DATA,), axis_types=(AxisType.Auto,))


def mesh_without_devices(on: Slice) -> AbstractMesh:
    """Return an abstract mesh over a slice, without devices."""
    return AbstractMesh((on.devices,), (DATA,), axis_types=(AxisType.Auto,))


def divided(shape: Sequence[int], mesh: AnyMesh) -> NamedSharding:
    """Return the sharding of a parameter, over its largest dimension that all devices divide."""
    ways = mesh.shape[DATA]
    entries: list[str | None] = [None] * len(shape)
    able = [at for at, size in enumerate(shape) if size % ways == 0]
    if able and int(np.prod(shape)) >= SMALLEST_DIVIDED:
        entries[max(able, key=lambda at: shape[at])] = DATA
    return NamedSharding(mesh, PartitionSpec(*entries))


def by_example(shape: Sequence[int], mesh: AnyMesh) -> NamedSharding:
    """Return the sharding of a batch, over its first dimension if possible."""
    even = len(shape) > 0 and shape[0] % mesh.shape[DATA] == 0
    return NamedSharding(mesh, PartitionSpec(DATA) if even else PartitionSpec())


def shape_on(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Return an array's shape with its sharding."""
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf), sharding=sharding)


class DatasetGradients:
    """Computes each step's gradients from the next batch, with the step's parameters.

    So a smaller batch size or checkpointing applies from the next step on, also to gradients that
    were loaded before.

    Args:
        data: Arrays over examples, alone or in a tuple or dict, which are repeated; or an iterable
            of such batches, which is used once.
    """

    def __init__(self, data: PyTree | Iterable[PyTree]) -> None:
        arrays = _are_arrays(data)
        self._batches: Iterator[PyTree] = iter(_again(data) if arrays else data)
        self._left: PyTree = None
        self._at = 0
        self.examples = _examples(data) if arrays else _examples(self._fill())

    def take(self, at_most: int | None) -> PyTree:
        """Return the next batch, or its next part of at most `at_most` examples.

        Raises:
            TPUValidationError: The data are used up.
        """
        batch = self._fill()
        count = _examples(batch)
        wanted = min(count - self._at, at_most or count)
        start, self._at = self._at, self._at + wanted
        return jax.tree.map(lambda leaf: leaf[start : start + wanted], batch)

    def peek(self, at_most: int | None) -> PyTree:
        """Return the same as `take`, without advancing."""
        at = self._at
        batch = self.take(at_most)
        self._at = at if at < _examples(self._left) else 0
        return batch

    def _fill(self) -> PyTree:
        if self._left is None or self._at >= _examples(self._left):
            try:
                self._left, self._at = next(self._batches), 0
            except StopIteration:
                raise TPUValidationError(
                    "The dataset is used up; load it again, or pass arrays, which are repeated."
                ) from None
        return self._left


def mean_gradients(data: PyTree | Iterable[PyTree], like: PyTree) -> PyTree:
    """Return gradients computed elsewhere: a tree like the parameters, or the mean of several.

    Raises:
        TPUValidationError: They do not match the parameters.
    """
    if isinstance(data, Iterator) or not _fits(data, like):
        each = list(data) if isinstance(data, Iterable) else []
    else:
        each = [data]
    if not each or not all(_fits(tree, like) for tree in each):
        shapes = [list(jnp.shape(leaf)) for leaf in jax.tree.leaves(like)][:3]
        raise TPUValidationError(
            f"The data do not match parameters {shapes}, so they are not gradients. For examples, "
            "set a loss: TpuOptimizer(pod).with_loss(lambda parameters, batch: …)."
        )
    return jax.tree.map(lambda *leaves: sum(map(jnp.asarray, leaves)) / len(leaves), *each)


def _fits(tree: Any, like: PyTree) -> bool:
    if jax.tree.structure(tree) != jax.tree.structure(like):
        return False
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(like), strict=True)
    return all(hasattr(a, "shape") and jnp.shape(a) == jnp.shape(b) for a, b in pairs)


def _are_arrays(data: Any) -> bool:
    if not isinstance(data, np.ndarray | jax.Array | tuple | dict):
        return False
    leaves = jax.tree.leaves(data)
    kinds = (np.ndarray, jax.Array)
    return bool(leaves) and all(isinstance(leaf, kinds) and leaf.ndim for leaf in leaves)


def _again(data: PyTree) -> Iterator[PyTree]:
    while True:
        yield data


def _examples(batch: PyTree) -> int:
    sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or () in sizes:
        raise TPUValidationError(
            f"The arrays of a batch have {sorted(sizes)} examples; their first dimensions must "
            "agree."
        )
    return int(sizes.pop()[0])


LossFunction = Callable[[PyTree, PyTree], jax.Array]
"""Function (parameters, batch) -> mean loss of the batch."""


class Stepped(NamedTuple):
    """Results of a step.

    Attributes:
        loss: NaN if gradients were given.
    """

    params: PyTree
    opt_state: PyTree
    loss: jax.Array
    gradient_norm: jax.Array


@dataclass(frozen=True)
class OptimizerProgram:
    """A step with an optimizer.

    Attributes:
        loss: Function to differentiate; None if gradients are given.
        checkpointing: Whether the backward pass recomputes activations, to save memory.
    """

    optimizer: optax.GradientTransformation
    loss: LossFunction | None = None
    checkpointing: bool = False

    def __call__(self, params: PyTree, opt_state: PyTree, given: PyTree) -> Stepped:
        """Take a step; `given` is a batch, or gradients if there is no loss."""
        loss, gradients = self._gradients(params, given)
        updates, opt_state = self.optimizer.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        return Stepped(params, opt_state, loss, optax.tree.norm(gradients))

    @property
    def __name__(self) -> str:
        """Its name in the compiler's output."""
        return "optimizer_step"

    def arguments(self, params: PyTree, given: PyTree, mesh: AnyMesh) -> tuple[Any, Any, Any]:
        """Return the arguments as shapes with shardings on a mesh."""
        placed = jax.tree.map(lambda leaf: shape_on(leaf, divided(jnp.shape(leaf), mesh)), params)
        state = jax.tree.map(
            lambda leaf: shape_on(leaf, divided(leaf.shape, mesh)),
            jax.eval_shape(self.optimizer.init, placed),
        )
        if self.loss is None:
            given = jax.tree.map(lambda leaf: shape_on(leaf, divided(jnp.shape(leaf), mesh)), given)
        else:
            given = jax.tree.map(
                lambda leaf: shape_on(leaf, by_example(jnp.shape(leaf), mesh)), given
            )
        return placed, state, given

    def _gradients(self, params: PyTree, given: PyTree) -> tuple[jax.Array, PyTree]:
        if self.loss is None:
            return jnp.float32(jnp.nan), given
        loss = jax.checkpoint(self.loss) if self.checkpointing else self.loss
        return jax.value_and_grad(loss)(params, given)
