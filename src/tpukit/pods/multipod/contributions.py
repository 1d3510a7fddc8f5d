"""Gradients as users have them, brought to the devices that add them up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...annotations import PyTree
from ...errors import TPUValidationError
from .sums import DCN, ICI

EVERY_DEVICE = PartitionSpec((DCN, ICI))


@dataclass(frozen=True)
class Contributions:
    """What each device adds to the sum.

    Attributes:
        tree: Like the parameters, each leaf with a first dimension over all devices.
        per_pod: How many of a pod's devices have something to add: the mean is over those.
    """

    tree: PyTree
    per_pod: int


def place_gradients(gradients: PyTree, like: PyTree, mesh: Mesh) -> Contributions:
    """Bring gradients to the devices of a mesh.

    Args:
        gradients: One of:
            - a list with a tree for each pod;
            - a tree whose leaves have a first dimension over pods, or over all devices;
            - a tree like the parameters: what this process computed. In a single process, all
              pods computed the same.
        like: The parameters.
        mesh: Over pods and their devices.

    Raises:
        TPUValidationError: They are none of these.
    """
    pods, chips = mesh.devices.shape
    structure = jax.tree.structure(like)
    if isinstance(gradients, list | tuple) and jax.tree.structure(gradients) != structure:
        each = list(cast("Sequence[PyTree]", gradients))
        if len(each) != pods or any(jax.tree.structure(one) != structure for one in each):
            raise _refusal(gradients, like, pods, chips)
        stacked = jax.tree.map(
            lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *each
        )
        return Contributions(_one_of_each_pod(stacked, mesh), 1)
    if jax.tree.structure(gradients) != structure:
        raise _refusal(gradients, like, pods, chips)
    leading = _leading(gradients, like)
    if leading == (pods * chips,):
        return Contributions(_on_every_device(gradients, mesh), chips)
    if leading == (pods,):
        return Contributions(_one_of_each_pod(gradients, mesh), 1)
    if leading == ():
        return _own(gradients, mesh)
    raise _refusal(gradients, like, pods, chips)


def _leading(gradients: PyTree, like: PyTree) -> tuple[int, ...] | None:
    """The dimensions that all leaves have before those of the parameters."""
    found: set[tuple[int, ...]] = set()
    for gradient, parameter in zip(jax.tree.leaves(gradients), jax.tree.leaves(like), strict=True):
        shape, inner = jnp.shape(gradient), jnp.shape(parameter)
        extra = len(shape) - len(inner)
        if extra < 0 or shape[extra:] != inner:
            return None
        found.add(tuple(shape[:extra]))
    return found.pop() if len(found) == 1 else None


def _on_every_device(tree: PyTree, mesh: Mesh) -> PyTree:
    sharding = NamedSharding(mesh, EVERY_DEVICE)
    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding), tree)


def _one_of_each_pod(tree: PyTree, mesh: Mesh) -> PyTree:
    """The first device of a pod adds what the pod computed, the others nothing."""
    chips = mesh.devices.shape[1]

    def add(host: np.ndarray, number: int) -> np.ndarray:
        pod, chip = divmod(number, chips)
        return host[pod] if chip == 0 else np.zeros_like(host[0])

    return jax.tree.map(lambda leaf: _by_device(np.asarray(leaf), leaf.shape[1:], add, mesh), tree)


def _own(tree: PyTree, mesh: Mesh) -> Contributions:
    """The first device of each process, in each pod, adds what that process computed."""
    pods, chips = mesh.devices.shape
    owners = [
        (number // chips, device.process_index)
        for number, device in enumerate(mesh.devices.reshape(-1))
    ]
    firsts = {owners.index(owner) for owner in set(owners)}

    def add(host: np.ndarray, number: int) -> np.ndarray:
        return host if number in firsts else np.zeros_like(host)

    placed = jax.tree.map(lambda leaf: _by_device(np.asarray(leaf), leaf.shape, add, mesh), tree)
    return Contributions(placed, len(firsts) // pods)


def _by_device(
    host: np.ndarray,
    shape: tuple[int, ...],
    add: Callable[[np.ndarray, int], np.ndarray],
    mesh: Mesh,
) -> jax.Array:
    """Return an array whose row of each device is what that device adds."""

    def row(index: Any) -> np.ndarray:
        return add(host, index[0].start or 0)[None]

    whole = (mesh.devices.size, *shape)
    return jax.make_array_from_callback(whole, NamedSharding(mesh, EVERY_DEVICE), row)


def _refusal(gradients: PyTree, like: PyTree, pods: int, chips: int) -> TPUValidationError:
    def shapes(tree: PyTree) -> str:
        return ", ".join(str(list(jnp.shape(leaf))) for leaf in jax.tree.leaves(tree)[:3])

    return TPUValidationError(
        f"The gradients ({shapes(gradients)}, …) are not those of the parameters "
        f"({shapes(like)}, …); give a tree like them, a list of {pods} such trees (one for each "
        f"pod), or leaves with a first dimension of {pods} pods or {pods * chips} devices."
    )
