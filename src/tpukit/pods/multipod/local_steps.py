"""Pods that train alone for many steps and then meet (DiLoCo), for zones that are far apart.

Between two meetings each pod takes steps of its own with the inner optimizer. When they meet, the
mean of how far they have moved is a gradient for the outer optimizer, and all go on from the same
parameters: a hundredth of the traffic, for a loss that is a little higher or the same.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ...annotations import PyTree
from .contributions import EVERY_DEVICE, Contributions
from .exchange import REPLICATED, Common, PodExchange
from .sums import DCN, ICI

PER_POD = PartitionSpec(DCN)
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9  # of the paper: Nesterov, for both language models it trains


def outer_optimizer() -> optax.GradientTransformation:
    """Return the outer optimizer of the paper."""
    return optax.sgd(OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)


class LocalSteps:
    """Pods take steps of their own, and meet after every `every` of them.

    Attributes:
        own: Parameters and inner optimizer state of each pod, first dimension over pods.
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
        """Return the state of the outer optimizer, and inner state of one pod."""
        return self._outer.init(params), self._inner.init(params)

    def begin(self, common: Common) -> None:
        """Give every pod what they have in common; inner optimizers begin anew."""
        inner = common.opt_state[1]
        sharding = NamedSharding(self.exchange.mesh, PER_POD)

        def copies(tree: PyTree) -> PyTree:
            return jax.tree.map(
                lambda leaf: jnp.broadcast_to(leaf, (self.exchange.pods, *leaf.shape)), tree
            )

        made = jax.jit(copies, out_shardings=sharding)(Common(common.params, inner))
        self.own, self.taken = made, 0

    def step(
        self, common: Common, given: Contributions, weights: jax.Array
    ) -> tuple[Common, PyTree, jax.Array]:
        """Take one step in each pod; what they have in common changes only when they meet."""
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
        # The inner state stays each pod's own, as in the paper.
        restarted = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], (params, mine.opt_state))
        return Common(params, (outer, inner)), Common(*restarted), residuals
