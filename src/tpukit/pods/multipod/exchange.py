"""Add up gradients of several pods and step the parameters that all pods share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...annotations import PyTree
from ...errors import TPUValidationError
from ...hardware import Figure
from .sums import (
    BLOCK,
    DCN,
    ICI,
    AllReduceStrategy,
    LeafPacking,
    PodTopology,
    RoundingResiduals,
    compressed_sum,
    sum_between_pods,
    sum_over_devices,
)

EVERY_DEVICE = PartitionSpec((DCN, ICI))


@dataclass(frozen=True)
class Contributions:
    """The gradients that each device adds to the sum.

    Attributes:
        tree: A tree like the parameters; each leaf has a leading dimension over all devices.
        per_pod: Number of devices per pod that contribute; the mean is over these.
    """

    tree: PyTree
    per_pod: int


def place_gradients(gradients: PyTree, like: PyTree, mesh: Mesh) -> Contributions:
    """Place gradients on the devices of a mesh.

    Args:
        gradients: A list with one tree per pod, a tree whose leaves have a leading dimension over
            pods or over all devices, or a tree like the parameters with this process's own
            gradients. In a single process the last form counts for every pod.
        like: The parameters.
        mesh: The mesh over pods and their devices.

    Raises:
        TPUValidationError: The gradients have none of these forms.
    """
    pods, chips = mesh.devices.shape
    structure = jax.tree.structure(like)
    if isinstance(gradients, list | tuple) and jax.tree.structure(gradients) != structure:
        each = list(cast("Sequence[PyTree]", gradients))
        if len(each) != pods or any(jax.tree.structure(tree) != structure for tree in each):
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
        return _by_process(gradients, mesh)
    raise _refusal(gradients, like, pods, chips)


def _leading(gradients: PyTree, like: PyTree) -> tuple[int, ...] | None:
    """Return the leading dimensions that all gradients have in addition to the parameters'."""
    leading: set[tuple[int, ...]] = set()
    for gradient, parameter in zip(jax.tree.leaves(gradients), jax.tree.leaves(like), strict=True):
        shape, inner = jnp.shape(gradient), jnp.shape(parameter)
        extra = len(shape) - len(inner)
        if extra < 0 or shape[extra:] != inner:
            return None
        leading.add(tuple(shape[:extra]))
    return leading.pop() if len(leading) == 1 else None


def _on_every_device(tree: PyTree, mesh: Mesh) -> PyTree:
    sharding = NamedSharding(mesh, EVERY_DEVICE)
    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding), tree)


def _one_of_each_pod(tree: PyTree, mesh: Mesh) -> PyTree:
    """Let the first device of each pod contribute the pod's gradients, and the others zeros."""
    chips = mesh.devices.shape[1]

    def add(host: np.ndarray, number: int) -> np.ndarray:
        pod, chip = divmod(number, chips)
        return host[pod] if chip == 0 else np.zeros_like(host[0])

    return jax.tree.map(lambda leaf: _by_device(np.asarray(leaf), leaf.shape[1:], add, mesh), tree)


def _by_process(tree: PyTree, mesh: Mesh) -> Contributions:
    """Let the first device of each process in each pod contribute the process's gradients."""
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
    """Return an array with one row per device, its contribution."""

    def row(index: Any) -> np.ndarray:
        return add(host, index[0].start or 0)[None]

    full_shape = (mesh.devices.size, *shape)
    return jax.make_array_from_callback(full_shape, NamedSharding(mesh, EVERY_DEVICE), row)


def _refusal(gradients: PyTree, like: PyTree, pods: int, chips: int) -> TPUValidationError:
    def shapes(tree: PyTree) -> str:
        return ", ".join(str(list(jnp.shape(leaf))) for leaf in jax.tree.leaves(tree)[:3])

    return TPUValidationError(
        f"The gradients ({shapes(gradients)}, …) do not match the parameters ({shapes(like)}, …); "
        f"give a tree like the parameters, a list of {pods} such trees (one for each pod), or "
        f"leaves with a first dimension of {pods} pods or {pods * chips} devices."
    )


REPLICATED = PartitionSpec()


class Common(NamedTuple):
    """The state that all pods share, and that survives the loss of a pod."""

    params: PyTree
    opt_state: PyTree


@dataclass(frozen=True)
class PodExchange:
    """Adds up trees like the parameters over the pods of a mesh.

    Attributes:
        order: Order of the pods in a ring or tree.
        compress: Whether sums between pods are rounded to int8.
    """

    mesh: Mesh
    strategy: AllReduceStrategy
    topology: PodTopology
    order: tuple[int, ...]
    compress: bool
    packing: LeafPacking

    @classmethod
    def over(
        cls,
        mesh: Mesh,
        like: PyTree,
        *,
        strategy: AllReduceStrategy,
        topology: PodTopology,
        order: Sequence[int],
        compress: bool,
    ) -> "PodExchange":
        """Make the exchange for trees of one structure, over a mesh."""
        multiple = mesh.devices.size * (BLOCK if compress else 1)
        packing = LeafPacking.of(like, multiple=multiple)
        return cls(mesh, strategy, topology, tuple(order), compress, packing)

    @property
    def pods(self) -> int:
        """Number of pods."""
        return self.mesh.devices.shape[0]

    @property
    def chips(self) -> int:
        """Number of devices per pod."""
        return self.mesh.devices.shape[1]

    def first_residuals(self) -> dict[str, RoundingResiduals]:
        """Return the rounding residuals before the first step, which are zeros."""
        if not self.compress:
            return {}
        sharding = NamedSharding(self.mesh, EVERY_DEVICE)

        def make() -> dict[str, RoundingResiduals]:
            none = {
                name: RoundingResiduals.zeros(self.packing.size(name) // self.chips, self.pods)
                for name in self.packing.members
            }
            return jax.tree.map(lambda leaf: jnp.tile(leaf, (self.mesh.devices.size, 1)), none)

        return jax.jit(make, out_shardings=sharding)()

    def total(
        self, tree: PyTree, residuals: dict[str, RoundingResiduals]
    ) -> tuple[PyTree, dict[str, RoundingResiduals]]:
        """Return the sum of all devices' trees; call it inside `shard_map`."""
        sums: dict[str, jax.Array] = {}
        lost: dict[str, RoundingResiduals] = {}
        for name, vector in self.packing.pack(tree).items():
            if self.compress:
                piece = lax.psum_scatter(vector, ICI, tiled=True)
                before = jax.tree.map(lambda leaf: leaf[0], residuals[name])
                piece, after = compressed_sum(piece, before, self.pods)
                sums[name] = lax.all_gather(piece, ICI, tiled=True)
                lost[name] = jax.tree.map(lambda leaf: leaf[None], after)
            else:
                sums[name] = sum_over_devices(
                    vector,
                    strategy=self.strategy,
                    topology=self.topology,
                    pods=self.pods,
                    chips=self.chips,
                    order=self.order,
                )
        return self.packing.unpack(sums), lost

    def total_of_pods(
        self, tree: PyTree, residuals: dict[str, RoundingResiduals]
    ) -> tuple[PyTree, dict[str, RoundingResiduals]]:
        """Return the sum over pods of trees that are the same on all devices of a pod."""
        sums: dict[str, jax.Array] = {}
        lost: dict[str, RoundingResiduals] = {}
        for name, vector in self.packing.pack(tree).items():
            # Each device adds up only its own shard.
            size = vector.size // self.chips
            piece = lax.dynamic_slice_in_dim(vector, lax.axis_index(ICI) * size, size)
            if self.compress:
                before = jax.tree.map(lambda leaf: leaf[0], residuals[name])
                piece, after = compressed_sum(piece, before, self.pods)
                lost[name] = jax.tree.map(lambda leaf: leaf[None], after)
            else:
                piece = sum_between_pods(piece, self.topology, self.order)
            sums[name] = lax.all_gather(piece, ICI, tiled=True)
        return self.packing.unpack(sums), lost

    def mapped(self, function: Callable[..., Any], ins: Any, outs: Any) -> Any:
        """Return the function compiled over the mesh."""
        return jax.jit(
            jax.shard_map(function, mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=False)
        )

    @cached_property
    def sent_bytes(self) -> Figure:
        """Bytes that one pod sends to others per sum, computed."""
        share = 2 * (self.pods - 1) / self.pods
        if self.compress:
            numbers = sum(self.packing.size(name) for name in self.packing.members)
            size = numbers * (1 + 4 / BLOCK)
        else:
            size = float(self.packing.bytes)
        source = "2 (n - 1) / n of the gradients, the least that an all-reduce can send"
        return Figure(round(size * share), "B", "model", source)


class Synchronous:
    """Adds up the gradients of all pods in every step."""

    def __init__(self, exchange: PodExchange, optimizer: optax.GradientTransformation) -> None:
        self.exchange, self._optimizer = exchange, optimizer
        self._residuals = exchange.first_residuals()
        ins = (REPLICATED, EVERY_DEVICE, EVERY_DEVICE, REPLICATED, REPLICATED)
        outs = (REPLICATED, EVERY_DEVICE, REPLICATED, REPLICATED)
        self.program = exchange.mapped(self._step, ins, outs)

    def begin(self, common: Common) -> None:
        """Start from the shared state."""

    def step(
        self, common: Common, given: Contributions, weights: jax.Array
    ) -> tuple[Common, PyTree, jax.Array]:
        """Return the shared state after a step, the mean gradient and its norm."""
        common, residuals, mean, norm = self.program(
            common, self._residuals, given.tree, weights, jnp.float32(given.per_pod)
        )
        jax.block_until_ready(common)
        self._residuals = residuals
        return common, mean, norm

    def _step(
        self, common: Common, residuals: Any, tree: PyTree, weights: jax.Array, per_pod: jax.Array
    ) -> Any:
        weight = weights[lax.axis_index(DCN)]
        own = jax.tree.map(lambda leaf: leaf[0] * weight.astype(leaf.dtype), tree)
        total, residuals = self.exchange.total(own, residuals)
        over = weights.sum() * per_pod
        mean = jax.tree.map(lambda leaf: leaf / over.astype(leaf.dtype), total)
        updates, opt_state = self._optimizer.update(mean, common.opt_state, common.params)
        params = optax.apply_updates(common.params, updates)
        return Common(params, opt_state), residuals, mean, optax.tree.norm(mean)


PER_POD = PartitionSpec(DCN)


OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9  # the paper's values for Nesterov momentum


def outer_optimizer() -> optax.GradientTransformation:
    """Return the outer optimizer of the DiLoCo paper."""
    return optax.sgd(OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)


class LocalSteps:
    """Lets pods step separately, and averages them after every `every` steps.

    Attributes:
        own: Parameters and inner optimizer state of each pod, with a leading dimension over pods.
    """

    def __init__(
        self,
        exchange: PodExchange,
        optimizer: optax.GradientTransformation,
        *,
        outer: optax.GradientTransformation | None,
        every: int,
    ) -> None:
        self.exchange, self._inner = exchange, optimizer
        self._outer = outer_optimizer() if outer is None else outer
        self.every = every
        self.taken = 0
        self.own: Common | None = None
        self._residuals = exchange.first_residuals()
        ins = (PER_POD, EVERY_DEVICE, REPLICATED)
        self._alone = exchange.mapped(self._step, ins, (PER_POD, PER_POD, PER_POD))
        ins = (REPLICATED, PER_POD, EVERY_DEVICE, REPLICATED)
        self.meet = exchange.mapped(self._meet, ins, (REPLICATED, PER_POD, EVERY_DEVICE))

    def first_state(self, params: PyTree) -> PyTree:
        """Return the outer optimizer's state, and the inner state of one pod."""
        return self._outer.init(params), self._inner.init(params)

    def begin(self, common: Common) -> None:
        """Copy the shared parameters to every pod, and reset the inner optimizers."""
        inner = common.opt_state[1]
        sharding = NamedSharding(self.exchange.mesh, PER_POD)

        def copies(tree: PyTree) -> PyTree:
            return jax.tree.map(
                lambda leaf: jnp.broadcast_to(leaf, (self.exchange.pods, *leaf.shape)), tree
            )

        copies_of_state = jax.jit(copies, out_shardings=sharding)(Common(common.params, inner))
        self.own, self.taken = copies_of_state, 0

    def step(
        self, common: Common, given: Contributions, weights: jax.Array
    ) -> tuple[Common, PyTree, jax.Array]:
        """Take a step in each pod; the shared state changes only when pods are averaged."""
        assert self.own is not None
        own, mean, norms = self._alone(self.own, given.tree, jnp.float32(given.per_pod))
        if self.taken + 1 < self.every:
            jax.block_until_ready(own)
            self.own, self.taken = own, self.taken + 1
            return common, mean, norms.mean()
        common, own, residuals = self.meet(common, own, self._residuals, weights)
        jax.block_until_ready(common)
        self.own, self.taken, self._residuals = own, 0, residuals
        return common, mean, norms.mean()

    def _step(self, own: Common, tree: PyTree, per_pod: jax.Array) -> Any:
        def within_pod(leaf: jax.Array) -> jax.Array:
            return lax.psum(leaf[0], ICI) / per_pod.astype(leaf.dtype)

        mean = jax.tree.map(within_pod, tree)
        mine = jax.tree.map(lambda leaf: leaf[0], own)
        updates, state = self._inner.update(mean, mine.opt_state, mine.params)
        after = Common(optax.apply_updates(mine.params, updates), state)
        stacked = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], (after, mean))
        return (*stacked, optax.tree.norm(mean)[None])

    def _meet(self, common: Common, own: Common, residuals: Any, weights: jax.Array) -> Any:
        weight = weights[lax.axis_index(DCN)]
        mine = jax.tree.map(lambda leaf: leaf[0], own)
        moved = jax.tree.map(
            lambda start, now: (start - now) * weight.astype(now.dtype), common.params, mine.params
        )
        total, residuals = self.exchange.total_of_pods(moved, residuals)
        mean = jax.tree.map(lambda leaf: leaf / weights.sum().astype(leaf.dtype), total)
        outer, inner = common.opt_state
        updates, outer = self._outer.update(mean, outer, common.params)
        params = optax.apply_updates(common.params, updates)
        # Each pod keeps its own inner state, as in the paper.
        restarted = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], (params, mine.opt_state))
        return Common(params, (outer, inner)), Common(*restarted), residuals
