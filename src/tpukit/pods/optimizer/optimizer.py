"""`TpuOptimizer`: an optax optimizer on the devices of a pod."""

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from ...annotations import Device, PyTree
from ...errors import ConfigError, PodUnavailable
from ...hardware import Slice
from ...hardware.missing import Missing
from ...observe.stragglers import Stragglers, find_stragglers
from ...runtime.calls import either_way
from ...runtime.ranges import COUNT
from ..causes import Cause
from ..config import PodConfig
from ..failures import pod_errors, within
from ..multipod.member import Watch
from ..pod import Pod
from ..scaling.decision import ScalingDecision
from ..scaling.metrics import RECENT, WorkloadMetrics, measure
from ..xla.compiler import OptimizedGraph, OptimizerConfig
from ..xla.flags import OptimizationFlags
from .gradients import DatasetGradients, mean_gradients
from .metrics import StepMetrics
from .placement import devices_here, divided
from .probe import probe_hosts
from .program import LossFunction, OptimizerProgram, Stepped
from .running import Runner, shape_of
from .settings import LEARNING_RATE, OptimizerSettings
from .tensor import DistributedTensor, store_values, values_of

_GRADIENTS_GIVEN = Missing("gradients were given, so no loss was computed")


class TpuOptimizer:
    """Steps parameters that lie on the devices of a pod.

    ```python
    optimizer = TpuOptimizer(pod).with_optimizer(optax.adam(1e-3)).build()
    params = optimizer.create_distributed_tensor([8192, 4096])
    gradients = optimizer.load_gradients_from_dataset(data)
    metrics = optimizer.step_distributed(params, gradients)
    ```

    On a pod of provider "local" the devices of this machine stand for those of the slice.

    Attributes:
        pod: The pod; its slice changes with `scale_to_config`.
        step: Steps taken.
        batch_size: Most examples of a dataset in one step; None: as the data come.
        checkpointing: Whether the backward pass computes activations again.
        graph: What `load_xla_graph` was given.
    """

    def __init__(self, pod: Pod, *, settings: OptimizerSettings | None = None) -> None:
        self.pod = pod
        self.settings = settings or OptimizerSettings(optimizer=optax.adam(LEARNING_RATE))
        self.step = 0
        self.batch_size: int | None = None
        self.checkpointing = False
        self.graph: OptimizedGraph | None = None
        self._times: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._began: float | None = None
        self._config = PodConfig(tpu_type=str(pod.slice), zones=(pod.zone,), tier=pod.tier)
        self._made: Runner | None = None

    def with_optimizer(self, optimizer: optax.GradientTransformation) -> "TpuOptimizer":
        """Step with this optimizer."""
        return self._with(optimizer=optimizer)

    def with_loss(self, loss: LossFunction) -> "TpuOptimizer":
        """Compute gradients of a dataset with this loss: (parameters, batch) -> loss."""
        return self._with(loss=loss)

    def with_xla_optimization(self, enabled: bool = True, *, level: int = 1) -> "TpuOptimizer":
        """Compile each step as a whole, on TPU with the flags of a level; or run op by op."""
        return self._with(xla_level=level if enabled else None)

    def with_timeout(self, seconds: float | timedelta) -> "TpuOptimizer":
        """Give up on a step after some time."""
        return self._with(timeout=seconds)

    def with_watch(self, watch: Watch) -> "TpuOptimizer":
        """Ask this, before each step, whether the pod is lost."""
        return self._with(watch=watch)

    def on_devices(self, devices: Sequence[Device]) -> "TpuOptimizer":
        """Use these devices instead of all that the job has."""
        return self._with(devices=tuple(devices))

    def build(self) -> "TpuOptimizer":
        """Find the pod's devices, and return the optimizer ready to step.

        Raises:
            PodUnavailable: The pod is not ready, or this process does not run on it.
        """
        if not self.pod.is_ready:
            why = f" ({self.pod.reason})" if self.pod.reason else ""
            raise PodUnavailable(
                f"{self.pod.name} is {self.pod.state.value}{why}; wait for it, or ask for another "
                "with request_alternate_pod().",
                cause=Cause.NODE_GONE.value,
            )
        self._made = Runner(self._devices(self.pod.slice))
        return self

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices in use."""
        return self._runner.mesh

    def create_distributed_tensor(
        self,
        shape: Sequence[int],
        dtype: DTypeLike = jnp.float32,
        *,
        init: jax.nn.initializers.Initializer = jax.nn.initializers.zeros,
        seed: int = 0,
    ) -> DistributedTensor:
        """Make a parameter, each device its own part.

        Args:
            shape: Its dimensions; the largest that the devices divide is divided.
            dtype: Its number format.
            init: One of `jax.nn.initializers`.
            seed: Of random numbers that `init` draws.
        """
        size = tuple(COUNT.check_whole("a dimension", one) for one in shape)
        sharding = divided(size, self.mesh)
        made = jax.jit(lambda: init(jax.random.key(seed), size, dtype), out_shardings=sharding)()
        return DistributedTensor(made)

    @either_way
    def load_gradients_from_dataset(
        self, data: PyTree | Iterable[PyTree]
    ) -> PyTree | DatasetGradients:
        """Return gradients for `step_distributed`.

        Args:
            data: With a loss: arrays over examples, or an iterable of batches; gradients are then
                computed in the step, with its parameters. Without one: gradients that were
                computed elsewhere, a tree like the parameters or several of them to average.
        """
        if self.settings.loss is not None:
            return DatasetGradients(data)
        return data

    @either_way
    def step_distributed(self, params: PyTree, gradients: PyTree | DatasetGradients) -> StepMetrics:
        """Take one step on all devices.

        Distributed tensors of `params` are changed in place; the new parameters are in the result
        as well.

        Raises:
            PodUnavailable: The pod, or a process of it, is lost.
            CommunicationTimeout: The step was not completed in time.
            OutOfMemory: It does not fit; `enable_gradient_checkpointing()` or
                `reduce_batch_size()` may help.
            TPUValidationError: The gradients are not those of the parameters.
        """
        self._refuse_lost()
        began = time.perf_counter()
        self._began = self._began or began
        values = values_of(params)
        given, examples, stalled_s = self._given(values, gradients)
        what = f"step {self.step + 1} on {self.pod.name}"

        def run() -> Stepped:
            with pod_errors(what):
                return jax.block_until_ready(self._run(values, given, examples is not None))

        done = within(run, self.settings.timeout, what=what)
        self._runner.opt_state, self.step = done.opt_state, self.step + 1
        store_values(params, done.params)
        seconds = time.perf_counter() - began
        self._times.append((seconds, stalled_s))
        loss = float(done.loss)
        return StepMetrics(
            step=self.step,
            loss=_GRADIENTS_GIVEN if examples is None and math.isnan(loss) else loss,
            gradient_norm=float(done.gradient_norm),
            seconds=seconds,
            examples=examples,
            program=None if self.graph is None else self.graph.fingerprint,
            params=done.params,
        )

    @either_way
    def scale_to_config(self, config: PodConfig | ScalingDecision) -> PodConfig:
        """Go on with another number of devices; nothing of the state is lost.

        Only devices of this job can be used. Where the new pod is another one, the job is saved,
        ended and started there by its supervisor (`tpukit launch`), and goes on from its
        checkpoint.

        Raises:
            PodUnavailable: The job has not as many devices.
            ConfigError: A decision that nothing is to be done was given.
        """
        wanted = config.config if isinstance(config, ScalingDecision) else config
        if wanted is None:
            raise ConfigError("The decision is to change nothing; ask `if decision:` first.")
        self._runner.move_to(self._devices(wanted.slice))
        self._config = wanted
        self.pod = replace(self.pod, slice=wanted.slice)
        self.graph = None  # it was compiled for the slice before
        self._times.clear()
        self._began = None
        return wanted

    @either_way
    def reduce_batch_size(self, factor: int = 2) -> int:
        """Take a smaller part of each batch from the next step on; return its size.

        A loaded graph, which was compiled for the size before, is left.

        Raises:
            ConfigError: No dataset was stepped yet, or there is one example left.
        """
        factor = COUNT.check_whole("factor", factor)
        if self.batch_size is None or self.batch_size < factor:
            raise ConfigError(
                f"The batch has {self.batch_size or 'no'} examples and cannot be divided by "
                f"{factor}; step gradients of a dataset first, or ask for a larger slice."
            )
        self.batch_size //= factor
        self.graph = None
        return self.batch_size

    @either_way
    def enable_gradient_checkpointing(self) -> None:
        """Compute activations again in the backward pass from the next step on: less memory.

        A loaded graph, which was compiled without it, is left.

        Raises:
            ConfigError: Gradients are given, so there is no backward pass here.
        """
        if self.settings.loss is None:
            raise ConfigError(
                "Gradients are given to this optimizer, so there is no backward pass to change; "
                "use with_loss() to have them computed here."
            )
        self.checkpointing = True
        self.graph = None

    def load_xla_graph(self, graph: OptimizedGraph | None) -> None:
        """Run a compiled graph from the next step on; None: the optimizer's own step again.

        On TPU it runs with the options it was compiled with; other platforms know none of them
        and run the same program.
        """
        self.graph = graph

    def config_for(self, params: PyTree, gradients: PyTree | DatasetGradients) -> OptimizerConfig:
        """Return what `XlaCompiler` needs to compile a step with these arguments."""
        values = values_of(params)
        dataset = isinstance(gradients, DatasetGradients)
        batch = gradients.peek(self.batch_size) if dataset else None
        return OptimizerConfig(
            optimizer=self.settings.optimizer,
            parameters=jax.tree.map(shape_of, values),
            on=self.pod.slice,
            loss=self.settings.loss if dataset else None,
            batch=None if batch is None else jax.tree.map(shape_of, batch),
            checkpointing=self.checkpointing,
        )

    def workload_metrics(self) -> WorkloadMetrics:
        """Return what was measured of the last steps; the first, which compiles, is left out."""
        timed = [*self._times][1:] or [*self._times]
        wall_s = 0.0 if self._began is None else time.perf_counter() - self._began
        return measure(
            self._config,
            step_times_s=[seconds for seconds, _ in timed],
            stalled_s=[stalled for _, stalled in timed],
            wall_s=wall_s,
            steps=len(self._times),
            source=f"{self.pod.name}, {self.mesh.size} devices",
        )

    @either_way
    def find_stragglers(self) -> Stragglers:
        """Time the same small work on each host of the pod, and return those that are slow.

        Steps end together, however slow one host is, so each is timed by itself.
        """
        return find_stragglers(probe_hosts(self.mesh))

    def _with(self, **changes: Any) -> "TpuOptimizer":
        return TpuOptimizer(self.pod, settings=replace(self.settings, **changes))

    @property
    def _runner(self) -> Runner:
        if self._made is None:
            raise ConfigError("This optimizer was not built; call build() on it first.")
        return self._made

    def _devices(self, on: Slice) -> list[Device]:
        return devices_here(on, self.pod.provider, self.settings.devices)

    def _given(self, values: PyTree, gradients: Any) -> tuple[PyTree, int | None, float]:
        """Return the batch or the gradients of a step, divided, and the wait for them."""
        if not isinstance(gradients, DatasetGradients):
            found = mean_gradients(values_of(gradients), values)
            return self._runner.divide(found), None, 0.0
        began = time.perf_counter()
        if self.batch_size is None:
            self.batch_size = gradients.examples
        batch = gradients.take(self.batch_size)
        waited = time.perf_counter() - began
        return self._runner.divide_batch(batch), jax.tree.leaves(batch)[0].shape[0], waited

    def _run(self, values: PyTree, given: PyTree, from_dataset: bool) -> Stepped:
        if self.graph is not None:
            self.graph.check_fits(values, given)
            program, options = self.graph.config.program, self.graph.options
        else:
            loss = self.settings.loss if from_dataset else None
            program = OptimizerProgram(self.settings.optimizer, loss, self.checkpointing)
            options = self._level_options()
        whole = self.graph is not None or self.settings.xla_level is not None
        return self._runner.run(program, values, given, options=options, whole=whole)

    def _level_options(self) -> dict[str, Any]:
        level = self.settings.xla_level
        if not level or jax.default_backend() != "tpu":
            return {}
        return OptimizationFlags().compiler_options(level, generation=self.pod.slice.chip.name)

    def _refuse_lost(self) -> None:
        lost = {} if self.settings.watch is None else self.settings.watch()
        if self.pod.name in lost:
            raise PodUnavailable(
                f"{self.pod.name} is lost ({lost[self.pod.name]}); ask for another with "
                "request_alternate_pod().",
                cause=Cause.NODE_GONE.value,
            )
