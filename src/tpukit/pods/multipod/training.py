"""`MultiPod`: step one model on several pods together, and drop pods that are lost."""

import logging
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from ...annotations import Device, PyTree
from ...errors import CommunicationTimeout, ConfigError, PodUnavailable, TPUValidationError
from ...hardware import Figure
from ...hardware.figure import seconds_text
from ...parallel.rebalancing import move
from ...runtime.calls import either_way
from ...shown import Facts, Shown
from ...training.checkpoint import TPUCheckpointer
from ..causes import Cause
from ..failures import pod_errors, within
from .exchange import (
    REPLICATED,
    Common,
    Contributions,
    LocalSteps,
    PodExchange,
    Synchronous,
    place_gradients,
)
from .mesh import MeshMember, Watch, mesh_over
from .sums import AllReduceStrategy, PodTopology, neighbourly_order


@dataclass(frozen=True, kw_only=True)
class SynchronizedStep(Shown):
    """The result of one step of all pods.

    Attributes:
        step: Number of steps taken, including this one.
        pods: Names of the pods that took part.
        dropped: Pods lost since the previous step, with reasons.
        seconds: Measured time from the call until the last pod is done.
        parameters: Parameters that all pods share now.
        gradients: Mean gradients over pods; with local steps, each pod's own.
        sent: Bytes that one pod sent to others.
    """

    step: int
    pods: tuple[str, ...]
    dropped: dict[str, str]
    seconds: float
    gradient_norm: float
    sent: Figure
    parameters: PyTree = field(repr=False)
    gradients: PyTree = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without the arrays."""
        return {
            "step": self.step,
            "pods": list(self.pods),
            "dropped": dict(self.dropped),
            "seconds": {"value": self.seconds, "origin": "measured"},
            "gradient_norm": self.gradient_norm,
            "sent_bytes": self.sent.to_dict(),
        }

    def __rich__(self) -> str:
        lost = "".join(f", lost {name} ({why})" for name, why in self.dropped.items())
        return (
            f"step {self.step} on {len(self.pods)} pods in {seconds_text(self.seconds)}, gradient "
            f"norm {self.gradient_norm:.4g}, {self.sent.text} sent by each pod (model){lost}"
        )


DEFAULT_S = 300.0


class PendingStep:
    """A step that runs when its result is requested.

    ```python
    result = pods.step_synchronized(gradients).with_timeout(300)  # plain code
    result = await pods.step_synchronized(gradients).with_timeout(300)  # coroutine
    result = await pods.step_synchronized(gradients)  # within 300 s
    ```
    """

    def __init__(self, run: Callable[[float | timedelta], SynchronizedStep]) -> None:
        self._run = run

    @either_way
    def with_timeout(self, seconds: float | timedelta) -> SynchronizedStep:
        """Run the step with a time limit.

        Raises:
            CommunicationTimeout: The step did not end in time, and no pod is known to be lost.
            PodUnavailable: No pod is left, or this process lost a peer.
        """
        return self._run(seconds)

    def result(self) -> SynchronizedStep:
        """Run the step with the default time limit."""
        return self._run(DEFAULT_S)

    def __await__(self) -> Generator[Any, None, SynchronizedStep]:
        import asyncio

        return asyncio.to_thread(self._run, DEFAULT_S).__await__()


LEARNING_RATE = 1e-3


@dataclass(frozen=True, kw_only=True)
class ExchangeSettings(Facts):
    """Settings of a `MultiPod`, made by `MultiPodManager`.

    Attributes:
        compress: Whether sums between pods are rounded to int8, with error feedback.
        local_steps: Steps between two averages, for the strategy of that name.
        outer: Optimizer that applies an average; None for the DiLoCo paper's.
        checkpoint_dir: Folder for the shared state, so that the job can restart.
        save_every: Steps between two saves.
    """

    optimizer: optax.GradientTransformation
    topology: PodTopology = PodTopology.MESH
    strategy: AllReduceStrategy = AllReduceStrategy.HIERARCHICAL
    compress: bool = False
    local_steps: int = 50
    outer: optax.GradientTransformation | None = None
    checkpoint_dir: str | Path | None = None
    save_every: int = 1
    _facts = ("topology", "strategy", "compress", "local_steps")

    def __post_init__(self) -> None:
        unstaged = (AllReduceStrategy.FLAT, AllReduceStrategy.RING)
        if self.compress and self.strategy in unstaged:
            raise ConfigError(
                f"The strategy {self.strategy.value} has no stage between pods whose sums could "
                "be rounded; use hierarchical or local_steps, or no compression."
            )


logger = logging.getLogger(__name__)


class Stepper(Protocol):
    """Takes all pods from one step to the next."""

    exchange: PodExchange

    def begin(self, common: Common) -> None:
        """Start from the shared state."""
        ...

    def step(
        self, common: Common, given: Contributions, weights: jax.Array
    ) -> tuple[Common, PyTree, jax.Array]:
        """Return the new shared state, the gradient and its norm."""
        ...


class MultiPod(Shown):
    """Several pods that train one model; made by `MultiPodManager`.

    Attributes:
        members: The pods that take part, in the order of the mesh axis "dcn".
        step: Number of steps taken.
        dropped: Pods that were lost, with reasons.
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
        """Parameters that all pods share since the last step, or the last average."""
        return self._state().params

    @property
    def own_parameters(self) -> PyTree:
        """Each pod's own parameters for local steps, with a leading dimension over pods."""
        if isinstance(self._stepper, LocalSteps) and self._stepper.own is not None:
            return self._stepper.own.params
        pods = len(self.members)
        return jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (pods, *leaf.shape)), self.parameters
        )

    @either_way
    def distribute_model(self, parameters: PyTree) -> PyTree:
        """Copy the parameters to every device of every pod, and return the copy.

        If the checkpoint folder has an earlier step, training continues from it.
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
        """Add up gradients over all pods, and take one step with their mean.

        Args:
            gradients: A list with one tree per pod, a tree with a leading dimension over pods or
                devices, or this process's own gradients.
            weights: Weight of each pod, such as its number of examples.

        Returns:
            The step, which runs when its result is requested.
        """
        return PendingStep(lambda seconds: self._run(gradients, weights, seconds))

    def drop(self, name: str, reason: str) -> None:
        """Continue without a pod, from the last shared state.

        Raises:
            PodUnavailable: It is the last pod, or belongs to another process. The job then has to
                restart without it, from the newest checkpoint.
        """
        place = next((at for at, member in enumerate(self.members) if member.name == name), None)
        if place is None:
            return
        if len(self.members) == 1:
            raise PodUnavailable(
                f"{name} was the last pod ({reason}); allocate others.",
                cause=Cause.NODE_GONE.value,
            )
        if jax.process_count() > 1:
            raise PodUnavailable(
                f"{name} is lost ({reason}). A runtime of several processes cannot drop one. End "
                "this process and start the job again on the other pods; it continues from the "
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
        """Return plain data."""
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
            names = [member.name for member in self.members]
            if weights is not None and len(weights) != len(names):
                raise TPUValidationError(
                    f"{len(weights)} weights were given for {len(names)} pods: {', '.join(names)}."
                )
            lost = self._drop_lost()
            while True:
                try:
                    common, mean, norm = self._step(gradients, weights, names, seconds)
                    break
                except (CommunicationTimeout, PodUnavailable):
                    # Lost pods are dropped. If no pod is lost, the error is raised.
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
        names: Sequence[str],
        seconds: float | timedelta,
    ) -> tuple[Common, PyTree, jax.Array]:
        common, stepper = self._state(), self._stepper
        assert stepper is not None
        kept = [names.index(member.name) for member in self.members]
        counts = jnp.asarray([1.0 if weights is None else weights[at] for at in kept])
        given = _of_pods(gradients, kept, len(names), common.params)
        placed = place_gradients(given, common.params, self.mesh)

        def run() -> tuple[Common, PyTree, jax.Array]:
            with pod_errors(f"step {self.step + 1} of {len(self.members)} pods"):
                return stepper.step(common, placed, counts)

        return within(run, seconds, what=f"step {self.step + 1} of {len(self.members)} pods")

    def _drop_lost(self) -> dict[str, str]:
        reported: Mapping[str, str] = {} if self._watch is None else self._watch()
        here = {member.name for member in self.members}
        lost = {name: why for name, why in reported.items() if name in here}
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
        restored = keeper.restore(like={"params": common.params, "opt_state": common.opt_state})
        self._common, self.step = Common(restored.params, restored.opt_state), restored.step

    def close(self) -> None:
        """Finish the last save."""
        if self._keeper is not None:
            self._keeper.close()


def _of_pods(gradients: PyTree, kept: list[int], pods: int, like: PyTree) -> PyTree:
    """Return the gradients without those of pods that were dropped since."""
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
