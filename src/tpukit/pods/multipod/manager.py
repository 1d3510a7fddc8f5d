"""`MultiPodManager`: several pods for one model, said step by step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import optax

from ...annotations import Device
from ...errors import ConfigError
from ...runtime.calls import either_way
from ...runtime.ranges import COUNT
from ..config import PodConfig
from .member import MeshMember, PodKeeper, Watch, watch_pods
from .mesh import devices_by_pod
from .settings import LEARNING_RATE, ExchangeSettings
from .strategy import AllReduceStrategy, PodTopology
from .training import MultiPod


@dataclass(frozen=True, kw_only=True)
class MultiPodManager:
    """Brings pods together, in keywords or step by step.

    ```python
    pods = (
        MultiPodManager()
        .with_topology(PodTopology.Ring)
        .with_allreduce_strategy(AllReduceStrategy.HierarchicalAllReduce)
        .with_pods([config.in_zone("us-central1-a"), config.in_zone("us-central1-b")])
        .build()
    )
    pods.distribute_model(parameters)
    result = pods.step_synchronized(gradients).with_timeout(300)
    ```

    Without a manager, the devices that this job has are divided among the pods: slices of the
    job on TPU, otherwise its processes, or the devices of a single process.

    Attributes:
        topology: How pods are linked.
        strategy: How gradients are added up.
        pods: What is asked for, one for each pod.
        optimizer: Takes the step with the mean gradient; Adam at 0.001 by default.
        manager: Asks for the pods, and knows which are lost.
        watch: Instead of a manager: which pods are lost, by name, each with why.
    """

    topology: PodTopology = PodTopology.MESH
    strategy: AllReduceStrategy = AllReduceStrategy.HIERARCHICAL
    pods: tuple[PodConfig, ...] = ()
    optimizer: optax.GradientTransformation | None = None
    compress: bool = False
    local_steps: int = 50
    outer: optax.GradientTransformation | None = None
    checkpoint_dir: str | Path | None = None
    save_every: int = 1
    manager: PodKeeper | None = None
    watch: Watch | None = None
    devices: tuple[Device, ...] | None = None

    def with_topology(self, topology: PodTopology | str) -> Self:
        """Link pods like this."""
        return replace(self, topology=PodTopology(topology))

    def with_allreduce_strategy(self, strategy: AllReduceStrategy | str) -> Self:
        """Add up gradients like this."""
        return replace(self, strategy=AllReduceStrategy(strategy))

    def with_pods(self, pods: Sequence[PodConfig]) -> Self:
        """Use these pods, each in its own zone."""
        return replace(self, pods=tuple(pods))

    def with_optimizer(self, optimizer: optax.GradientTransformation) -> Self:
        """Take steps with this optimizer."""
        return replace(self, optimizer=optimizer)

    def with_compression(self, compress: bool = True) -> Self:
        """Round sums between pods to eight bits, with error feedback."""
        return replace(self, compress=compress)

    def with_local_steps(
        self, every: int, *, outer: optax.GradientTransformation | None = None
    ) -> Self:
        """Let pods train alone and meet after so many steps (DiLoCo).

        Args:
            every: Steps between two meetings.
            outer: Takes the step of a meeting, with the mean of how far pods have moved as its
                gradient: `optax.sgd(1.0)` takes the mean itself. By default Nesterov's momentum
                as in the paper, which is made for runs of many meetings.
        """
        every = COUNT.check_whole("local_steps", every)
        strategy = AllReduceStrategy.LOCAL_STEPS
        return replace(self, strategy=strategy, local_steps=every, outer=outer)

    def with_checkpoints(self, folder: str | Path, *, every: int = 1) -> Self:
        """Keep the last common step in a folder, for a job that starts again with fewer pods."""
        every = COUNT.check_whole("every", every)
        return replace(self, checkpoint_dir=folder, save_every=every)

    def with_manager(self, manager: PodKeeper) -> Self:
        """Ask for the pods through this one, and drop those that it says are lost."""
        return replace(self, manager=manager)

    def with_watch(self, watch: Watch) -> Self:
        """Drop pods that this says are lost."""
        return replace(self, watch=watch)

    @either_way
    def build(self) -> MultiPod:
        """Get the pods, and bring their devices together.

        Raises:
            ConfigError: No pods were named, they differ in size, or settings exclude each other.
            MeshError: The devices of this job do not divide into as many pods.
            PodUnavailable: A pod cannot be had; those that were given are given back.
        """
        if not self.pods:
            raise ConfigError("Say which pods: with_pods([config.in_zone('us-central1-a'), …]).")
        sizes = {str(config.slice) for config in self.pods}
        if len(sizes) > 1:
            raise ConfigError(
                f"The pods are {', '.join(sorted(sizes))}; zones may differ, but a step together "
                "needs the same slice in each of them."
            )
        settings = ExchangeSettings(
            optimizer=self.optimizer or optax.adam(LEARNING_RATE),
            topology=self.topology,
            strategy=self.strategy,
            compress=self.compress,
            local_steps=self.local_steps,
            outer=self.outer,
            checkpoint_dir=self.checkpoint_dir,
            save_every=self.save_every,
        )
        devices = devices_by_pod(len(self.pods), self.devices)
        members = self._members()
        watch = self.watch
        if watch is None and self.manager is not None:
            watch = watch_pods(self.manager, members)
        return MultiPod(members, devices, settings, watch=watch)

    def _members(self) -> list[MeshMember]:
        if self.manager is None:
            return [
                MeshMember("-".join(filter(None, (f"pod{number}", *config.zones[:1]))), config)
                for number, config in enumerate(self.pods)
            ]
        given: list[MeshMember] = []
        try:
            for config in self.pods:
                pod = self.manager.allocate_pod(config)
                given.append(MeshMember(pod.name, config, pod))
        except BaseException:
            for member in given:
                assert member.pod is not None
                self.manager.release(member.pod)
            raise
        return given
