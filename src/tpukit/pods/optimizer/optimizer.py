"""`TpuOptimizer`: an optax optimizer on the devices of a pod."""

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ...annotations import Device, PyTree
from ...errors import ConfigError, PodUnavailable, TPUValidationError
from ...hardware import Slice
from ...hardware.missing import Measured, Missing, plain
from ...observe.stragglers import Stragglers, find_stragglers
from ...parallel.rebalancing import move
from ...runtime.calls import either_way
from ...runtime.ranges import COUNT
from ...shown import Shown
from ..causes import Cause
from ..config import PodConfig
from ..failures import pod_errors, within
from ..multipod.mesh import Watch
from ..pod import Pod
from ..scaling.autoscaler import ScalingDecision
from ..scaling.metrics import RECENT, WorkloadMetrics, measure
from ..xla import OptimizationFlags, OptimizedGraph, OptimizerConfig
from .hosts import probe_hosts
from .program import (
    DatasetGradients,
    LossFunction,
    OptimizerProgram,
    Stepped,
    by_example,
    devices_here,
    divided,
    mean_gradients,
    mesh_of,
)

LEARNING_RATE = 1e-3


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Settings of a `TpuOptimizer`.

    Attributes:
        optimizer: Any optax transformation; Adam at 0.001 by default, as in document 004.
        loss: Function (parameters, batch) -> loss, for gradients of a dataset.
        xla_level: Level of compiler flags, 0 to 3; None runs operation by operation.
        timeout: Time limit of a step.
        watch: Returns the names of lost pods with reasons.
        devices: Devices to use; by default all that the job has.
    """

    optimizer: optax.GradientTransformation
    loss: LossFunction | None = None
    xla_level: int | None = 1
    timeout: float | timedelta | None = None
    watch: Watch | None = None
    devices: tuple[Device, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class StepMetrics(Shown):
    """Measurements of one step.

    Attributes:
        loss: Loss of the batch before the step; missing if gradients were given.
        seconds: Measured time from the call until all devices are done.
        examples: Number of examples in the batch; None if gradients were given.
        program: Fingerprint of the loaded graph that ran, if any.
        params: The new parameters, also for trees that cannot change in place.
    """

    step: int
    loss: Measured
    gradient_norm: float
    seconds: float
    examples: int | None = None
    program: str | None = None
    params: PyTree = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without the parameters."""
        return {
            "step": self.step,
            "loss": plain(self.loss),
            "gradient_norm": self.gradient_norm,
            "seconds": {"value": self.seconds, "origin": "measured"},
            "examples": self.examples,
            "program": self.program,
        }


class DistributedTensor:
    """Refers to the newest value of a parameter; jax and numpy accept it as an array.

    Document 004 steps parameters in place, but jax arrays are immutable.

    Attributes:
        value: The array after the last step.
    """

    def __init__(self, value: jax.Array) -> None:
        self.value = value

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self.value.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype."""
        return self.value.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.value.ndim

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """The sharding."""
        return self.value.sharding

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.value, dtype=dtype)

    def __repr__(self) -> str:
        return f"DistributedTensor({self.dtype}{list(self.shape)} on {self.sharding.num_devices})"


def values_of(tree: PyTree) -> PyTree:
    """Return the tree with distributed tensors replaced by their arrays."""
    return jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, DistributedTensor) else leaf, tree
    )


def store_values(tree: PyTree, values: PyTree) -> None:
    """Store new values in the distributed tensors of a tree."""
    for leaf, value in zip(jax.tree.leaves(tree), jax.tree.leaves(values), strict=True):
        if isinstance(leaf, DistributedTensor):
            leaf.value = value


class Runner:
    """Runs step programs on a mesh.

    Attributes:
        opt_state: Optimizer state after the last step; None before the first.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.mesh: Mesh = mesh_of(devices)
        self.opt_state: PyTree = None
        self._like: PyTree = None
        self._compiled: dict[OptimizerProgram, Any] = {}

    def move_to(self, devices: Sequence[Device]) -> None:
        """Move the state to other devices."""
        self.mesh = mesh_of(devices)
        self._compiled.clear()
        if self.opt_state is not None:
            self.opt_state = self.divide(self.opt_state)

    def divide(self, tree: PyTree) -> PyTree:
        """Return parameters, or a tree like them, sharded over the devices."""
        return jax.tree.map(lambda leaf: move(leaf, divided(leaf.shape, self.mesh)), tree)

    def divide_batch(self, batch: PyTree) -> PyTree:
        """Return a batch sharded by examples."""
        return jax.tree.map(
            lambda leaf: move(jnp.asarray(leaf), by_example(leaf.shape, self.mesh)), batch
        )

    def run(
        self,
        program: OptimizerProgram,
        values: PyTree,
        given: PyTree,
        *,
        options: Mapping[str, Any],
        whole: bool,
    ) -> Stepped:
        """Take a step; the caller stores the new state.

        Args:
            program: The step.
            values: Parameters, on any devices.
            given: A sharded batch or gradients.
            options: Compiler options for TPUs.
            whole: Whether to compile the step, or run it operation by operation.
        """
        values = self.divide(values)
        self._prepare_state(program, values)
        if not whole:
            return program(values, self.opt_state, given)
        if program not in self._compiled:
            on_tpu = jax.default_backend() == "tpu"
            whole_copy = NamedSharding(self.mesh, PartitionSpec())
            params, state = jax.tree.map(lambda leaf: leaf.sharding, (values, self.opt_state))
            self._compiled[program] = jax.jit(
                program,
                # Outputs keep the inputs' sharding, so that the next step moves nothing.
                out_shardings=Stepped._make((params, state, whole_copy, whole_copy)),
                compiler_options=dict(options) if on_tpu else None,
            )
        return self._compiled[program](values, self.opt_state, given)

    def _prepare_state(self, program: OptimizerProgram, values: PyTree) -> None:
        shapes = jax.tree.map(shape_of, values)
        if self.opt_state is None:
            self._like = shapes
            self.opt_state = self.divide(program.optimizer.init(values))
        elif shapes != self._like:
            raise TPUValidationError(
                "These parameters differ from those of earlier steps, to which the optimizer "
                "state belongs; use another TpuOptimizer for them."
            )


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array."""
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))


_GRADIENTS_GIVEN = Missing("gradients were given, so no loss was computed")


class TpuOptimizer:
    """Steps parameters on the devices of a pod with an optax optimizer.

    ```python
    optimizer = TpuOptimizer(pod).with_optimizer(optax.adam(1e-3)).build()
    params = optimizer.create_distributed_tensor([8192, 4096])
    gradients = optimizer.load_gradients_from_dataset(data)
    metrics = optimizer.step_distributed(params, gradients)
    ```

    For a pod of provider "local", this machine's devices stand in for the slice's.

    Attributes:
        pod: The pod; its slice changes with `scale_to_config`.
        step: Number of steps taken.
        batch_size: Largest number of examples per step; None takes batches as they come.
        checkpointing: Whether the backward pass recomputes activations.
        graph: The graph of `load_xla_graph`, if any.
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
        """Set the optimizer."""
        return self._with(optimizer=optimizer)

    def with_loss(self, loss: LossFunction) -> "TpuOptimizer":
        """Compute gradients of a dataset with this loss: (parameters, batch) -> loss."""
        return self._with(loss=loss)

    def with_xla_optimization(self, enabled: bool = True, *, level: int = 1) -> "TpuOptimizer":
        """Compile each step, on TPU with the flags of a level; or run it operation by operation."""
        return self._with(xla_level=level if enabled else None)

    def with_timeout(self, seconds: float | timedelta) -> "TpuOptimizer":
        """Set the time limit of a step."""
        return self._with(timeout=seconds)

    def with_watch(self, watch: Watch) -> "TpuOptimizer":
        """Call this before each step to find out whether the pod is lost."""
        return self._with(watch=watch)

    def on_devices(self, devices: Sequence[Device]) -> "TpuOptimizer":
        """Use these devices instead of all that the job has."""
        return self._with(devices=tuple(devices))

    def build(self) -> "TpuOptimizer":
        """Find the pod's devices, and return the optimizer.

        Raises:
            PodUnavailable: The pod is not ready, or this process does not run on it.
        """
        if not self.pod.is_ready:
            why = f" ({self.pod.reason})" if self.pod.reason else ""
            raise PodUnavailable(
                f"{self.pod.name} is {self.pod.state.value}{why}; wait for it, or get another "
                "with request_alternate_pod().",
                cause=Cause.NODE_GONE.value,
            )
        self._made = Runner(self._devices(self.pod.slice))
        return self

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh over the devices in use."""
        return self._runner.mesh

    def create_distributed_tensor(
        self,
        shape: Sequence[int],
        dtype: DTypeLike = jnp.float32,
        *,
        init: jax.nn.initializers.Initializer = jax.nn.initializers.zeros,
        seed: int = 0,
    ) -> DistributedTensor:
        """Make a parameter that is sharded over the devices.

        Args:
            shape: Its shape. The largest dimension that the number of devices divides is sharded.
            dtype: Its dtype.
            init: One of `jax.nn.initializers`.
            seed: Seed of the random numbers for `init`.
        """
        size = tuple(COUNT.check_whole("a dimension", length) for length in shape)
        sharding = divided(size, self.mesh)
        array = jax.jit(lambda: init(jax.random.key(seed), size, dtype), out_shardings=sharding)()
        return DistributedTensor(array)

    @either_way
    def load_gradients_from_dataset(
        self, data: PyTree | Iterable[PyTree]
    ) -> PyTree | DatasetGradients:
        """Return gradients, or their source, for `step_distributed`.

        Args:
            data: With a loss, arrays over examples or an iterable of batches, from which each step
                computes gradients. Without one, gradients computed elsewhere: a tree like the
                parameters, or several trees to average.
        """
        if self.settings.loss is not None:
            return DatasetGradients(data)
        return data

    @either_way
    def step_distributed(self, params: PyTree, gradients: PyTree | DatasetGradients) -> StepMetrics:
        """Take one step on all devices.

        Distributed tensors in `params` change in place. The result has the new parameters as well.

        Raises:
            PodUnavailable: The pod, or one of its processes, is lost.
            CommunicationTimeout: The step did not end in time.
            OutOfMemory: The step does not fit; `enable_gradient_checkpointing()` or
                `reduce_batch_size()` may help.
            TPUValidationError: The gradients do not match the parameters.
        """
        self._refuse_lost()
        began = time.perf_counter()
        self._began = self._began or began
        values = values_of(params)
        given, examples, stalled_s = self._step_input(values, gradients)
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
        """Continue on another number of devices with the same state.

        Only devices of this job can be used. To change the pod, a supervisor (`tpukit launch`)
        saves and ends the job, and starts it there from its checkpoint.

        Raises:
            PodUnavailable: The job has fewer devices.
            ConfigError: The decision is to change nothing.
        """
        wanted = config.config if isinstance(config, ScalingDecision) else config
        if wanted is None:
            raise ConfigError("The decision is to change nothing; test `if decision:` first.")
        self._runner.move_to(self._devices(wanted.slice))
        self._config = wanted
        self.pod = replace(self.pod, slice=wanted.slice)
        self.graph = None  # compiled for the earlier slice
        self._times.clear()
        self._began = None
        return wanted

    @either_way
    def reduce_batch_size(self, factor: int = 2) -> int:
        """Use smaller batches from the next step on; return their size.

        A loaded graph is dropped, because it was compiled for the earlier size.

        Raises:
            ConfigError: No dataset was used yet, or the batch has only one example.
        """
        factor = COUNT.check_whole("factor", factor)
        if self.batch_size is None or self.batch_size < factor:
            raise ConfigError(
                f"The batch has {self.batch_size or 'no'} examples and cannot be divided by "
                f"{factor}; step with gradients of a dataset first, or use a larger slice."
            )
        self.batch_size //= factor
        self.graph = None
        return self.batch_size

    @either_way
    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in the backward pass from the next step on, to save memory.

        A loaded graph is dropped, because it was compiled without recomputation.

        Raises:
            ConfigError: Gradients are given, so there is no backward pass.
        """
        if self.settings.loss is None:
            raise ConfigError(
                "Gradients are given to this optimizer, so there is no backward pass to change; "
                "set a loss with with_loss()."
            )
        self.checkpointing = True
        self.graph = None

    def load_xla_graph(self, graph: OptimizedGraph | None) -> None:
        """Run a compiled graph from the next step on; None restores the optimizer's own step.

        On TPU the graph runs with its compiler options. Other platforms have no such options and
        run the same program without them.
        """
        self.graph = graph

    def config_for(self, params: PyTree, gradients: PyTree | DatasetGradients) -> OptimizerConfig:
        """Return the configuration with which `XlaCompiler` compiles such a step."""
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
        """Return measurements of the last steps, without the first, which compiles."""
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
        """Time the same small work on each host of the pod, and return the slow hosts.

        Hosts are timed separately, because a step takes as long on every host as on the slowest.
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

    def _step_input(self, values: PyTree, gradients: Any) -> tuple[PyTree, int | None, float]:
        """Return the sharded batch or gradients, the number of examples, and the wait for data."""
        if not isinstance(gradients, DatasetGradients):
            mean = mean_gradients(values_of(gradients), values)
            return self._runner.divide(mean), None, 0.0
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
        is_compiled = self.graph is not None or self.settings.xla_level is not None
        return self._runner.run(program, values, given, options=options, whole=is_compiled)

    def _level_options(self) -> dict[str, Any]:
        level = self.settings.xla_level
        if not level or jax.default_backend() != "tpu":
            return {}
        return OptimizationFlags().compiler_options(level, generation=self.pod.slice.chip.name)

    def _refuse_lost(self) -> None:
        lost = {} if self.settings.watch is None else self.settings.watch()
        if self.pod.name in lost:
            raise PodUnavailable(
                f"{self.pod.name} is lost ({lost[self.pod.name]}); get another with "
                "request_alternate_pod().",
                cause=Cause.NODE_GONE.value,
            )
