"""`MultiPodManager`: set up several pods that train one model."""

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
from .mesh import MeshMember, PodKeeper, Watch, devices_by_pod, watch_pods
from .sums import AllReduceStrategy, PodTopology
from .training import LEARNING_RATE, ExchangeSettings, MultiPod


@dataclass(frozen=True, kw_only=True)
class MultiPodManager:
    """Connects several pods; set up with keyword arguments or step by step.

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

    Without a manager, the job's own devices are divided among the pods: by slice on TPU, elsewhere
    by process, or by device in a single process.

    Attributes:
        topology: Pattern in which pods exchange data.
        strategy: How gradients are added up.
        pods: One request per pod.
        optimizer: Applies the mean gradient; by default Adam with rate 0.001.
        manager: Allocates the pods, and reports lost ones.
        watch: Reports lost pods if there is no manager: returns their names with reasons.
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
        """Set the pattern in which pods exchange data."""
        return replace(self, topology=PodTopology(topology))

    def with_allreduce_strategy(self, strategy: AllReduceStrategy | str) -> Self:
        """Set how gradients are added up."""
        return replace(self, strategy=AllReduceStrategy(strategy))

    def with_pods(self, pods: Sequence[PodConfig]) -> Self:
        """Set the requests, one per pod, each with its zone."""
        return replace(self, pods=tuple(pods))

    def with_optimizer(self, optimizer: optax.GradientTransformation) -> Self:
        """Set the optimizer."""
        return replace(self, optimizer=optimizer)

    def with_compression(self, compress: bool = True) -> Self:
        """Round sums between pods to int8, with error feedback."""
        return replace(self, compress=compress)

    def with_local_steps(
        self, every: int, *, outer: optax.GradientTransformation | None = None
    ) -> Self:
        """Let pods train separately, and average them after this many steps (DiLoCo).

        Args:
            every: Steps between two averages.
            outer: Optimizer that applies the pods' mean movement as a gradient; `optax.sgd(1.0)`
                takes the mean itself. By default the paper's Nesterov momentum, which suits runs
                with many averages.
        """
        every = COUNT.check_whole("local_steps", every)
        strategy = AllReduceStrategy.LOCAL_STEPS
        return replace(self, strategy=strategy, local_steps=every, outer=outer)

    def with_checkpoints(self, folder: str | Path, *, every: int = 1) -> Self:
        """Save the shared state in a folder, for a job that restarts with fewer pods."""
        every = COUNT.check_whole("every", every)
        return replace(self, checkpoint_dir=folder, save_every=every)

    def with_manager(self, manager: PodKeeper) -> Self:
        """Allocate the pods with this manager, and drop the pods it reports as lost."""
        return replace(self, manager=manager)

    def with_watch(self, watch: Watch) -> Self:
        """Drop the pods that this function reports as lost."""
        return replace(self, watch=watch)

    @either_way
    def build(self) -> MultiPod:
        """Allocate the pods, and build the mesh over their devices.

        Raises:
            ConfigError: There are no pods, their sizes differ, or settings contradict each other.
            MeshError: The job's devices cannot be divided into that many pods.
            PodUnavailable: A pod cannot be allocated; the pods allocated so far are released.
        """
        if not self.pods:
            raise ConfigError(
                "No pods are set; set them with with_pods([config.in_zone('us-central1-a'), …])."
            )
        sizes = {str(config.slice) for config in self.pods}
        if len(sizes) > 1:
            raise ConfigError(
                f"The pods are {', '.join(sorted(sizes))}; zones may differ, but all pods need "
                "the same slice."
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
