"""`MultiPod`: a model on several pods, stepped together, with pods dropped as they are lost."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from ...annotations import Device, PyTree
from ...errors import CommunicationTimeout, PodUnavailable, TPUValidationError
from ...parallel.rebalancing.reshard import move
from ...runtime.calls import either_way
from ...shown import Shown
from ...training.checkpoint import TPUCheckpointer
from ..causes import Cause
from ..failures import pod_errors, within
from .contributions import Contributions, place_gradients
from .exchange import REPLICATED, Common, PodExchange, Synchronous
from .local_steps import LocalSteps
from .member import MeshMember, Watch
from .mesh import mesh_over
from .pending import PendingStep
from .result import SynchronizedStep
from .settings import ExchangeSettings
from .strategy import AllReduceStrategy, neighbourly_order

logger = logging.getLogger(__name__)


class Stepper(Protocol):
    """Takes pods from one step to the next."""

    exchange: PodExchange

    def begin(self, common: Common) -> None:
        """Start from what all pods have."""
        ...

    def step(
        self, common: Common, given: Contributions, weights: jax.Array
    ) -> tuple[Common, PyTree, jax.Array]:
        """Return what all pods have then, the gradient and its norm."""
        ...


class MultiPod(Shown):
    """Several pods that train one model; made by `MultiPodManager`.

    Attributes:
        members: The pods that take part, in the order of the mesh's axis "dcn".
        step: Steps taken.
        dropped: Pods that were lost, each with why.
    """

    def __init__(
        self,
        members: Sequence[MeshMember],
        devices: Sequence[Sequence[Device]],
        settings: ExchangeSettings,
        *,
        watch: Watch | None = None,
    ) -> None:
        self.members = tuple(members)
        self.settings = settings
        self.step = 0
        self.dropped: dict[str, str] = {}
        self._devices = [list(group) for group in devices]
        self.mesh = mesh_over(self._devices)
        self._watch = watch
        self._common: Common | None = None
        self._stepper: Stepper | None = None
        self._lock = threading.Lock()
        self._keeper = (
            None
            if settings.checkpoint_dir is None
            else TPUCheckpointer(settings.checkpoint_dir, max_to_keep=2)
        )

    @property
    def parameters(self) -> PyTree:
        """What all pods have in common: after the last step, or the last meeting."""
        return self._state().params

    @property
    def own_parameters(self) -> PyTree:
        """What each pod computes gradients with, first dimension over pods, for local steps."""
        if isinstance(self._stepper, LocalSteps) and self._stepper.own is not None:
            return self._stepper.own.params
        pods = len(self.members)
        return jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (pods, *leaf.shape)), self.parameters
        )

    @either_way
    def distribute_model(self, parameters: PyTree) -> PyTree:
        """Put a copy of the parameters on every device of every pod, and return it.

        With a checkpoint folder that holds an earlier step, training goes on from there.
        """
        with self._lock:
            self._stepper = self._make_stepper(parameters)
            placed = self._replicated(parameters)
            if isinstance(self._stepper, LocalSteps):
                state = self._stepper.first_state(placed)
            else:
                state = self.settings.optimizer.init(placed)
            self._common = Common(placed, self._replicated(state))
            if self._keeper is not None and self._keeper.latest_step() is not None:
                self._restore(self._keeper)
            self._stepper.begin(self._common)
        return self._common.params

    def step_synchronized(
        self, gradients: PyTree, *, weights: Sequence[float] | None = None
    ) -> PendingStep:
        """Add up gradients over all pods and take one step with their mean.

        Args:
            gradients: A list with a tree for each pod, a tree with a first dimension over pods or
                devices, or what this process computed.
            weights: How much each pod counts, such as how many examples it has seen.

        Returns:
            The step; it runs when its result is asked for.
        """
        return PendingStep(lambda seconds: self._run(gradients, weights, seconds))

    def drop(self, name: str, reason: str) -> None:
        """Go on without a pod, from the last step that all have in common.

        Raises:
            PodUnavailable: It is the last one, or part of another process: then the job is
                started again without it, and goes on from the newest checkpoint.
        """
        place = next((at for at, one in enumerate(self.members) if one.name == name), None)
        if place is None:
            return
        if len(self.members) == 1:
            raise PodUnavailable(
                f"{name} was the last pod ({reason}); ask for others.",
                cause=Cause.NODE_GONE.value,
            )
        if jax.process_count() > 1:
            raise PodUnavailable(
                f"{name} is lost ({reason}). A runtime of several processes cannot leave one out: "
                "end this one, and start the job again on the other pods; it goes on from the "
                "last common step" + (" that was saved." if self._keeper else "."),
                cause=Cause.PEER_LOST.value,
            )
        self.dropped[name] = reason
        self.members = (*self.members[:place], *self.members[place + 1 :])
        del self._devices[place]
        self.mesh = mesh_over(self._devices)
        logger.warning("dropped a pod", extra={"pod": name, "reason": reason, "step": self.step})
        if self._common is not None:
            self._common = Common(*self._replicated(tuple(self._common)))
            self._stepper = self._make_stepper(self._common.params)
            self._stepper.begin(self._common)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "pods": {member.name: member.zone for member in self.members},
            "dropped": dict(self.dropped),
            "devices": self.mesh.devices.size,
            "step": self.step,
            **self.settings.to_dict(),
        }

    def _run(
        self, gradients: PyTree, weights: Sequence[float] | None, seconds: float | timedelta
    ) -> SynchronizedStep:
        began = time.perf_counter()
        with self._lock:
            common = self._state()
            asked = [member.name for member in self.members]
            if weights is not None and len(weights) != len(asked):
                raise TPUValidationError(
                    f"{len(weights)} weights were given for {len(asked)} pods: {', '.join(asked)}."
                )
            lost = self._drop_lost()
            while True:
                try:
                    common, mean, norm = self._step(gradients, weights, asked, seconds)
                    break
                except (CommunicationTimeout, PodUnavailable):
                    # Whoever is lost is left out; with all there, the error is the user's.
                    again = self._drop_lost()
                    if not again:
                        raise
                    lost.update(again)
            self._common, self.step = common, self.step + 1
            self._save()
            assert self._stepper is not None
            return SynchronizedStep(
                step=self.step,
                pods=tuple(member.name for member in self.members),
                dropped=lost,
                seconds=time.perf_counter() - began,
                gradient_norm=float(norm),
                sent=self._stepper.exchange.sent_bytes,
                parameters=common.params,
                gradients=mean,
            )

    def _step(
        self,
        gradients: PyTree,
        weights: Sequence[float] | None,
        asked: Sequence[str],
        seconds: float | timedelta,
    ) -> tuple[Common, PyTree, jax.Array]:
        common, stepper = self._state(), self._stepper
        assert stepper is not None
        kept = [asked.index(member.name) for member in self.members]
        counts = jnp.asarray([1.0 if weights is None else weights[at] for at in kept])
        given = _of_pods(gradients, kept, len(asked), common.params)
        placed = place_gradients(given, common.params, self.mesh)

        def run() -> tuple[Common, PyTree, jax.Array]:
            with pod_errors(f"step {self.step + 1} of {len(self.members)} pods"):
                return stepper.step(common, placed, counts)

        return within(run, seconds, what=f"step {self.step + 1} of {len(self.members)} pods")

    def _drop_lost(self) -> dict[str, str]:
        found: Mapping[str, str] = {} if self._watch is None else self._watch()
        here = {member.name for member in self.members}
        lost = {name: why for name, why in found.items() if name in here}
        for name, why in lost.items():
            self.drop(name, why)
        return lost

    def _make_stepper(self, like: PyTree) -> Stepper:
        settings = self.settings
        exchange = PodExchange.over(
            self.mesh,
            like,
            strategy=settings.strategy,
            topology=settings.topology,
            order=neighbourly_order([member.zone for member in self.members]),
            compress=settings.compress,
        )
        if settings.strategy is AllReduceStrategy.LOCAL_STEPS:
            return LocalSteps(
                exchange, settings.optimizer, outer=settings.outer, every=settings.local_steps
            )
        return Synchronous(exchange, settings.optimizer)

    def _replicated(self, tree: PyTree) -> PyTree:
        sharding = NamedSharding(self.mesh, REPLICATED)
        return jax.tree.map(lambda leaf: move(jnp.asarray(leaf), sharding), tree)

    def _state(self) -> Common:
        if self._common is None:
            raise TPUValidationError("There is no model yet; call distribute_model(parameters).")
        return self._common

    def _save(self) -> None:
        meeting = not (isinstance(self._stepper, LocalSteps) and self._stepper.taken)
        if self._keeper is not None and meeting and self.step % self.settings.save_every == 0:
            common = self._state()
            self._keeper.save(self.step, params=common.params, opt_state=common.opt_state)

    def _restore(self, keeper: TPUCheckpointer) -> None:
        common = self._state()
        found = keeper.restore(like={"params": common.params, "opt_state": common.opt_state})
        self._common, self.step = Common(found.params, found.opt_state), found.step

    def close(self) -> None:
        """Finish the last save."""
        if self._keeper is not None:
            self._keeper.close()


def _of_pods(gradients: PyTree, kept: list[int], pods: int, like: PyTree) -> PyTree:
    """Leave out what pods computed that have been dropped since."""
    if len(kept) == pods:
        return gradients
    if isinstance(gradients, list | tuple) and len(gradients) == pods:
        return [gradients[at] for at in kept]

    def of_leaf(leaf: Any, parameter: Any) -> Any:
        if jnp.ndim(leaf) == jnp.ndim(parameter):
            return leaf
        per_pod = leaf.shape[0] // pods
        rows = jnp.concatenate(
            [jnp.asarray(leaf[at * per_pod : (at + 1) * per_pod]) for at in kept]
        )
        return jax.device_get(rows)

    return jax.tree.map(of_leaf, gradients, like)
