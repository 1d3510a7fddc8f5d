"""What pods have in common, and the compiled steps that bring them from one step to the next."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...annotations import PyTree
from ...hardware import Figure
from .compression import BLOCK, RoundingResiduals, compressed_sum
from .contributions import EVERY_DEVICE, Contributions
from .packing import LeafPacking
from .strategy import AllReduceStrategy, PodTopology
from .sums import DCN, ICI, sum_between_pods, sum_over_devices

REPLICATED = PartitionSpec()


class Common(NamedTuple):
    """What every pod has: a pod that is lost takes nothing of it away."""

    params: PyTree
    opt_state: PyTree


@dataclass(frozen=True)
class PodExchange:
    """How the pods of a mesh add up trees like the parameters.

    Attributes:
        order: Pods in the order of a ring or tree.
        compress: Whether sums between pods are rounded to eight bits.
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
        """Return the exchange of trees like one, over a mesh."""
        multiple = mesh.devices.size * (BLOCK if compress else 1)
        packing = LeafPacking.of(like, multiple=multiple)
        return cls(mesh, strategy, topology, tuple(order), compress, packing)

    @property
    def pods(self) -> int:
        """How many pods there are."""
        return self.mesh.devices.shape[0]

    @property
    def chips(self) -> int:
        """How many devices a pod has."""
        return self.mesh.devices.shape[1]

    def first_residuals(self) -> dict[str, RoundingResiduals]:
        """Return what rounding has lost before the first step: nothing."""
        if not self.compress:
            return {}
        sharding = NamedSharding(self.mesh, EVERY_DEVICE)

        def make() -> dict[str, RoundingResiduals]:
            none = {
                name: RoundingResiduals.zeros(self.packing.size(name) // self.chips, self.pods)
                for name in self.packing.members
            }
            return jax.tree.map(lambda one: jnp.tile(one, (self.mesh.devices.size, 1)), none)

        return jax.jit(make, out_shardings=sharding)()

    def total(
        self, tree: PyTree, residuals: dict[str, RoundingResiduals]
    ) -> tuple[PyTree, dict[str, RoundingResiduals]]:
        """Return the sum of all devices' trees, inside `shard_map`."""
        sums: dict[str, jax.Array] = {}
        lost: dict[str, RoundingResiduals] = {}
        for name, vector in self.packing.pack(tree).items():
            if self.compress:
                piece = lax.psum_scatter(vector, ICI, tiled=True)
                before = jax.tree.map(lambda one: one[0], residuals[name])
                piece, after = compressed_sum(piece, before, self.pods)
                sums[name] = lax.all_gather(piece, ICI, tiled=True)
                lost[name] = jax.tree.map(lambda one: one[None], after)
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
        """Return the sum over pods of trees that all devices of a pod hold alike."""
        sums: dict[str, jax.Array] = {}
        lost: dict[str, RoundingResiduals] = {}
        for name, vector in self.packing.pack(tree).items():
            # Each device takes its part of what all of them have.
            size = vector.size // self.chips
            piece = lax.dynamic_slice_in_dim(vector, lax.axis_index(ICI) * size, size)
            if self.compress:
                before = jax.tree.map(lambda one: one[0], residuals[name])
                piece, after = compressed_sum(piece, before, self.pods)
                lost[name] = jax.tree.map(lambda one: one[None], after)
            else:
                piece = sum_between_pods(piece, self.topology, self.order)
            sums[name] = lax.all_gather(piece, ICI, tiled=True)
        return self.packing.unpack(sums), lost

    def mapped(self, function: Callable[..., Any], ins: Any, outs: Any) -> Any:
        """Return a function compiled over the mesh."""
        return jax.jit(
            jax.shard_map(function, mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=False)
        )

    @cached_property
    def sent_bytes(self) -> Figure:
        """What one pod sends to others for each sum, by arithmetic."""
        share = 2 * (self.pods - 1) / self.pods
        if self.compress:
            numbers = sum(self.packing.size(name) for name in self.packing.members)
            size = numbers * (1 + 4 / BLOCK)
        else:
            size = float(self.packing.bytes)
        source = "2 (n - 1) / n of the gradients, which no all-reduce can do with less"
        return Figure(round(size * share), "B", "model", source)


class Synchronous:
    """Every step, all pods add up their gradients and take the same step."""

    def __init__(self, exchange: PodExchange, optimizer: optax.GradientTransformation) -> None:
        self.exchange, self._optimizer = exchange, optimizer
        self._residuals = exchange.first_residuals()
        ins = (REPLICATED, EVERY_DEVICE, EVERY_DEVICE, REPLICATED, REPLICATED)
        outs = (REPLICATED, EVERY_DEVICE, REPLICATED, REPLICATED)
        self.program = exchange.mapped(self._step, ins, outs)

    def begin(self, common: Common) -> None:
        """Start from what all pods have."""

    def step(
        self, common: Common, given: Contributions, weights: jax.Array
    ) -> tuple[Common, PyTree, jax.Array]:
        """Return what all pods have after one step, the mean gradient and its norm."""
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
