"""`TPUOptimizer`: modules made faster for TPUs at one of three levels, and measured."""

import copy
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp

from ..annotations import PyTree
from ..checker.check import check_request
from ..compiler.program.request import make_request
from ..errors import TPUOptimizationError, TPUValidationError, did_you_mean
from ..hardware import Slice
from ..hardware.figure import Figure
from ..models.adapters.protocol import Variables
from ..models.adapters.torch_module.adapter import TorchModel, run_module
from ..models.adapters.torch_module.arrays import shape_of
from ..models.adapters.torch_module.environment import torch_trees
from ..models.adapters.torch_module.state import ModuleState
from ..models.remat.policy import FULL, NO_REMAT, RematPolicy
from ..shown import Shown
from .batches import TorchInputs
from .config import tpu_settings
from .module_changes import (
    fuse,
    largest_difference,
    narrow_everything,
    narrow_linear_layers,
)
from .prepared import link_of, prepare
from .validation import check_is_module

if TYPE_CHECKING:
    import torch

LevelName = Literal["conservative", "balanced", "aggressive"]
Scope = Literal["linear", "all"]


@dataclass(frozen=True)
class Level:
    """The changes of one optimization level.

    Attributes:
        name: Its name in document 002.
        narrow: What computes in bfloat16: `nn.Linear` layers, or everything.
        checkpoints: Whether the backward pass recomputes layers instead of storing them.
        fuses: Whether hand-written attention and norms are replaced by fused kernels.
        donates: Whether a call without gradients may reuse the memory of its inputs.
        tolerance: The largest relative difference of outputs from the original's.
    """

    name: LevelName
    narrow: Scope
    checkpoints: bool
    fuses: bool
    donates: bool
    tolerance: float


# bfloat16 has 8 bits: one rounding is 0.4 %, and the errors of layers add up.
LEVELS: dict[str, Level] = {
    level.name: level
    for level in (
        Level("conservative", "linear", False, False, False, tolerance=0.02),
        Level("balanced", "linear", True, True, False, tolerance=0.02),
        Level("aggressive", "all", True, True, True, tolerance=0.05),
    )
}


def find_level(name: str) -> Level:
    """Return a level by its name.

    Raises:
        TPUValidationError: There is no level of that name.
    """
    if name not in LEVELS:
        raise TPUValidationError(
            f"optimization_level={name!r} is not one of {', '.join(get_args(LevelName))}."
            + did_you_mean(str(name), LEVELS)
        )
    return LEVELS[name]


_CALLS = 5


def forward_time(run: Callable[[], Any], *, label: str) -> Figure:
    """Return the median time of several calls, after one warm-up call."""
    run()
    seconds: list[float] = []
    for _ in range(_CALLS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    source = f"{label}, median of {_CALLS} calls on {jax.default_backend()}"
    return Figure(statistics.median(seconds), "s", "measured", source, date.today().isoformat())


def parameter_bytes(module: "torch.nn.Module") -> Figure:
    """Return the size of a module's parameters."""
    size = sum(param.numel() * param.element_size() for param in module.parameters())
    return Figure(size, "B", "measured", "the module's tensors", date.today().isoformat())


def gradient_program(
    module: "torch.nn.Module",
    call: Callable[[Any, list[Any]], Any],
    tensors: list[Any],
    remat: RematPolicy,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a module's forward and backward as one function, and its argument shapes.

    Args:
        module: An `nn.Module`.
        call: (module, tensors) -> outputs.
        tensors: The tensors of the sample.
        remat: Rematerialization policy.
    """
    state = ModuleState.of(module)
    trained, carried = state.shapes()

    def program(params: PyTree, rest: PyTree, inputs: list[PyTree]) -> PyTree:
        def loss(params: PyTree) -> PyTree:
            outputs, changed = run_module(
                TorchModel(module, lambda part, batch: call(part, batch["tensors"])),
                state,
                Variables(params, rest),
                {"tensors": inputs},
                rng=jax.random.key(0),
                remat=remat,
            )
            leaves = torch_trees().tree_leaves(outputs)
            floats = [
                leaf
                for leaf in leaves
                if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
            ]
            return sum(jnp.mean(leaf.astype(jnp.float32) ** 2) for leaf in floats), changed

        return jax.grad(loss, has_aux=True)(params)

    return program, (trained, carried, [shape_of(tensor) for tensor in tensors])


def ask_compiler(
    on: Slice, program: Callable[..., Any], shapes: tuple[Any, ...]
) -> dict[str, Figure]:
    """Return the TPU compiler's memory and the predicted time on one chip of a slice."""
    result = check_request(make_request(program, on, *shapes))
    today, source = date.today().isoformat(), f"forward and backward on one chip of {on}"
    memory = Figure(result.memory.total_bytes, "B", "compiler", source, today)
    if result.prediction is None:
        return {"memory": memory, "step_time": Figure.missing("s", result.no_prediction or "none")}
    seconds = Figure(result.prediction.step_time_s, "s", "model", source, today)
    return {"memory": memory, "step_time": seconds}


if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OptimizationResult(Shown):
    """An optimized module and its measurements.

    Attributes:
        optimized_model: A prepared copy; the original is unchanged.
        level: The level; "none" if nothing could be optimized.
        changes: The changes, each a sentence.
        optimization_time: Seconds of optimizing and measuring.
        performance_metrics: Figures by name, before and after, each with its origin.
        numerical_error: The largest difference from the original's outputs on the sample, relative
            to each tensor's largest number; None if nothing was optimized.
        tolerance: The largest allowed error at this level.
    """

    optimized_model: "torch.nn.Module"
    level: LevelName | str
    changes: list[str]
    optimization_time: float
    performance_metrics: dict[str, Figure] = field(default_factory=dict[str, Figure])
    numerical_error: float | None = None
    tolerance: float | None = None
    _facts = "level changes optimization_time performance_metrics numerical_error tolerance"


class TPUOptimizer:
    """Optimizes modules at a level: conservative, balanced or aggressive.

    | level | computes in bfloat16 | backward pass | hand-written attention, norms | inputs |
    |---|---|---|---|---|
    | conservative | `nn.Linear` | unchanged | unchanged | kept |
    | balanced | `nn.Linear` | recomputes layers | fused kernels | kept |
    | aggressive | everything | recomputes layers | fused kernels | may be reused |

    Weights stay float32 at every level.

    Args:
        config: A `KernelPyTorchConfig`, its `hardware.tpu`, or a `TPUConfig`. If it names a slice,
            the TPU compiler gives memory and time before and after.

    Example:
        >>> result = TPUOptimizer(config).optimize(model, torch.randn(32, 512))
        >>> result.numerical_error, result.changes
    """

    def __init__(self, config: object = None) -> None:
        self.settings = tpu_settings(config)

    def optimize_for_inference(
        self, model: "torch.nn.Module", sample_inputs: TorchInputs
    ) -> OptimizationResult:
        """Optimize at the level with the fewest changes."""
        return self.optimize(model, sample_inputs, optimization_level="conservative")

    def optimize_for_training(
        self, model: "torch.nn.Module", sample_inputs: TorchInputs
    ) -> OptimizationResult:
        """Optimize at the level with the most changes."""
        return self.optimize(model, sample_inputs, optimization_level="aggressive")

    def optimize(
        self,
        model: "torch.nn.Module",
        sample_inputs: TorchInputs,
        optimization_level: LevelName | str = "balanced",
    ) -> OptimizationResult:
        """Return an optimized copy of a module, compared with the original on a sample.

        Args:
            model: An `nn.Module`.
            sample_inputs: A tensor, a tuple of positional arguments, or a dict of keywords.
            optimization_level: "conservative", "balanced" or "aggressive".

        Raises:
            TPUValidationError: There is no such level; it is not a module; or validation is strict
                and the module cannot be called on the sample or cannot be compiled.
            TPUOptimizationError: Validation is strict, and the outputs differ by too much.
        """
        level = find_level(optimization_level)
        check_is_module(model, what="optimize")
        start = time.perf_counter()
        settings = self.settings
        strict = settings.enable_strict_validation
        original = copy.deepcopy(model).eval()
        try:
            sample = _SampleCall.from_inputs(sample_inputs)
            expected = sample.run(original)
        except TPUValidationError as error:
            return self._unchanged(model, str(error), start)
        except Exception as error:  # noqa: BLE001  a forward may raise anything
            reason = f"{type(model).__name__} cannot be called on sample_inputs: {error}"
            return self._unchanged(model, reason, start)
        changed, changes, remat = self._changed(model, level, sample)
        prepare(
            changed,
            remat=remat,
            programs=lambda: settings.cache_max_size,
            strict=strict,
            donate=level.donates,
        )
        training, changed = model.training, changed.eval()
        try:
            outputs = sample.run(changed)
        except Exception as error:  # noqa: BLE001  a forward may raise anything
            return self._unchanged(model, f"the optimized module does not run: {error}", start)
        link = link_of(changed)
        if link is not None and link.stays_eager:
            return self._unchanged(model, link.stays_eager, start)
        error = largest_difference(outputs, expected)
        if error > level.tolerance:
            self._differs(type(model).__name__, error, level)
        metrics = self._measured(original, changed, sample, remat)
        logger.info(
            "optimize model=%s level=%s error=%.2e", type(model).__name__, level.name, error
        )
        return OptimizationResult(
            optimized_model=changed.train(training),
            level=level.name,
            changes=changes,
            optimization_time=time.perf_counter() - start,
            performance_metrics=metrics,
            numerical_error=error,
            tolerance=level.tolerance,
        )

    def _changed(
        self, model: "torch.nn.Module", level: Level, sample: "_SampleCall"
    ) -> tuple[Any, list[str], RematPolicy]:
        changed = copy.deepcopy(model).eval()
        changes = fuse(changed, sample.run) if level.fuses else []
        if not self.settings.use_mixed_precision:
            changes.append("Everything computes in float32: mixed_precision is off.")
        elif level.narrow == "all":
            narrow_everything(changed)
            changes.append("Everything computes in bfloat16; weights and buffers stay float32.")
        else:
            names = narrow_linear_layers(changed)
            changes.append(f"{len(names)} Linear layers compute in bfloat16; weights stay float32.")
        remat = RematPolicy.parse(FULL) if level.checkpoints else NO_REMAT
        if level.checkpoints:
            changes.append("The backward pass recomputes layers instead of storing them.")
        if level.donates:
            changes.append("A call without gradients may reuse the memory of its inputs' copies.")
        return changed, changes, remat

    def _measured(
        self, original: Any, changed: Any, sample: "_SampleCall", remat: RematPolicy
    ) -> dict[str, Figure]:
        metrics = {
            "parameter_bytes_before": parameter_bytes(original),
            "parameter_bytes_after": parameter_bytes(changed),
            "forward_time_before": forward_time(lambda: sample.run(original), label="eager torch"),
            "forward_time_after": forward_time(lambda: sample.run(changed), label="optimized"),
        }
        on = self.settings.slice
        if on is None:
            return metrics
        for when, module, policy in (("before", original, NO_REMAT), ("after", changed, remat)):
            program, shapes = gradient_program(module, sample.call, sample.tensors, policy)
            figures = ask_compiler(on, program, shapes)
            metrics |= {f"{name}_{when}": figure for name, figure in figures.items()}
        return metrics

    def _differs(self, name: str, error: float, level: Level) -> None:
        message = (
            f"{name} optimized at level '{level.name}' differs from the original by {error:.1%} on "
            f"the sample, more than {level.tolerance:.0%}; use a lower level."
        )
        if self.settings.enable_strict_validation:
            raise TPUOptimizationError(message)
        logger.warning("%s", message)

    def _unchanged(self, model: "torch.nn.Module", why: str, start: float) -> OptimizationResult:
        """Return the module unchanged, with the reason.

        Raises:
            TPUValidationError: Validation is strict.
        """
        if self.settings.enable_strict_validation:
            raise TPUValidationError(why)
        logger.warning("%s Nothing was optimized.", why)
        return OptimizationResult(
            model, "none", [f"Nothing was optimized: {why}"], time.perf_counter() - start
        )


@dataclass(frozen=True)
class _SampleCall:
    """A module's call on the sample."""

    tensors: list[Any]
    call: Callable[[Any, list[Any]], Any]

    @classmethod
    def from_inputs(cls, inputs: PyTree) -> "_SampleCall":
        import torch

        trees = torch_trees()
        leaves, tree = trees.tree_flatten(inputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise TPUValidationError(
                f"sample_inputs has no tensor, it is {type(inputs).__name__}; give a tensor, a "
                "tuple of positional arguments, or a dict of keywords."
            )

        def call(module: "torch.nn.Module", given: list[PyTree]) -> PyTree:
            left = iter(given)
            filled = [next(left) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            arguments = trees.tree_unflatten(filled, tree)
            if isinstance(arguments, Mapping):
                return module(**arguments)
            if isinstance(arguments, tuple | list):
                return module(*arguments)
            return module(arguments)

        return cls(tensors, call)

    def run(self, module: "torch.nn.Module") -> PyTree:
        """Call a module without gradients."""
        import torch

        with torch.no_grad():
            return self.call(module, self.tensors)
