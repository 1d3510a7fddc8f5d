"""`TPUOptimizer`: a module made faster for TPUs at one of three levels, checked by numbers."""

import copy
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import TPUOptimizationError, TPUValidationError
from ...hardware.figure import Figure
from ...models.adapters.torch_module.environment import torch_trees
from ...models.remat.policy import NO_REMAT, RematPolicy
from ...shown import Shown
from ..annotations import TorchInputs
from ..config import tpu_settings
from ..prepared import link_of, prepare
from ..validation import check_is_module
from .casting import narrow_everything, narrow_linear_layers
from .fusing import fuse
from .levels import Level, LevelName, find_level
from .measuring import (
    ask_compiler,
    forward_time,
    gradient_program,
    largest_difference,
    parameter_bytes,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OptimizationResult(Shown):
    """An optimised module, and what is known about it.

    Attributes:
        optimized_model: A prepared copy; the original is as it was.
        level: The level, "none" where nothing could be optimised.
        changes: What was changed, each a sentence.
        optimization_time: Seconds that it took, measuring included.
        performance_metrics: Figures by name, before and after; each says where it comes from.
        numerical_error: The largest difference to the original's outputs on the sample, relative
            to the largest number of each; None where nothing was optimised.
        tolerance: How large that may be at this level.
    """

    optimized_model: "torch.nn.Module"
    level: LevelName | str
    changes: list[str]
    optimization_time: float
    performance_metrics: dict[str, Figure] = field(default_factory=dict[str, Figure])
    numerical_error: float | None = None
    tolerance: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all but the module as plain data."""
        return {
            "level": self.level,
            "changes": self.changes,
            "optimization_time": self.optimization_time,
            "performance_metrics": {
                n: one.to_dict() for n, one in self.performance_metrics.items()
            },
            "numerical_error": self.numerical_error,
            "tolerance": self.tolerance,
        }


class TPUOptimizer:
    """Optimises modules at a level: conservative, balanced or aggressive.

    | level | computes in bfloat16 | backward pass | attention, norms by hand | inputs |
    |---|---|---|---|---|
    | conservative | products of `nn.Linear` | as it is | as they are | kept |
    | balanced | products of `nn.Linear` | layers computed again | our kernels | kept |
    | aggressive | everything | layers computed again | our kernels | may be reused |

    Weights stay float32 at every level.

    Args:
        config: A `KernelPyTorchConfig`, its `hardware.tpu`, or a `TPUConfig`. Where it names a
            slice, the TPU compiler is asked for memory and time before and after.

    Example:
        >>> result = TPUOptimizer(config).optimize(model, torch.randn(32, 512))
        >>> result.numerical_error, result.changes
    """

    def __init__(self, config: object = None) -> None:
        self.settings = tpu_settings(config)

    def optimize_for_inference(
        self, model: "torch.nn.Module", sample_inputs: TorchInputs
    ) -> OptimizationResult:
        """Optimise at the level that changes least."""
        return self.optimize(model, sample_inputs, optimization_level="conservative")

    def optimize_for_training(
        self, model: "torch.nn.Module", sample_inputs: TorchInputs
    ) -> OptimizationResult:
        """Optimise at the level that changes most."""
        return self.optimize(model, sample_inputs, optimization_level="aggressive")

    def optimize(
        self,
        model: "torch.nn.Module",
        sample_inputs: TorchInputs,
        optimization_level: LevelName | str = "balanced",
    ) -> OptimizationResult:
        """Return an optimised copy of a module, compared with the original on a sample.

        Args:
            model: An `nn.Module`.
            sample_inputs: A tensor, a tuple of positional arguments, or a dict of keywords.
            optimization_level: "conservative", "balanced" or "aggressive".

        Raises:
            TPUValidationError: There is no such level; it is no module; or validation is strict
                and the module cannot be called on the sample or cannot be compiled.
            TPUOptimizationError: Validation is strict, and the numbers differ by too much.
        """
        level = find_level(optimization_level)
        check_is_module(model, what="optimize")
        start = time.perf_counter()
        settings = self.settings
        strict = settings.enable_strict_validation
        original = copy.deepcopy(model).eval()
        try:
            sample = _SampleCall.of(sample_inputs)
            expected = sample.run(original)
        except TPUValidationError as error:
            return self._left_alone(model, str(error), start)
        except Exception as error:  # noqa: BLE001  whatever a forward raises on a wrong sample
            said = f"{type(model).__name__} cannot be called on sample_inputs: {error}"
            return self._left_alone(model, said, start)
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
            found = sample.run(changed)
        except Exception as error:  # noqa: BLE001  where torch itself refuses the changed module
            return self._left_alone(model, f"its optimised form does not run: {error}", start)
        link = link_of(changed)
        if link is not None and link.stays_eager:
            return self._left_alone(model, link.stays_eager, start)
        error = largest_difference(found, expected)
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
        self, model: Any, level: Level, sample: "_SampleCall"
    ) -> tuple[Any, list[str], RematPolicy]:
        changed = copy.deepcopy(model).eval()
        said = fuse(changed, sample.run) if level.fuses else []
        if not self.settings.use_mixed_precision:
            said.append("Everything computes in float32: mixed_precision is off.")
        elif level.narrow == "all":
            narrow_everything(changed)
            said.append("Everything computes in bfloat16; weights and buffers stay float32.")
        else:
            names = narrow_linear_layers(changed)
            said.append(
                f"The products of {len(names)} Linear layers compute in bfloat16; weights stay "
                "float32."
            )
        remat = RematPolicy.parse("full") if level.checkpoints else NO_REMAT
        if level.checkpoints:
            said.append("The backward pass computes layers again instead of keeping them.")
        if level.donates:
            said.append("A call without gradients may reuse the memory of its inputs' copies.")
        return changed, said, remat

    def _measured(
        self, original: Any, changed: Any, sample: "_SampleCall", remat: RematPolicy
    ) -> dict[str, Figure]:
        metrics = {
            "parameter_bytes_before": parameter_bytes(original),
            "parameter_bytes_after": parameter_bytes(changed),
            "forward_time_before": forward_time(lambda: sample.run(original), of="eager torch"),
            "forward_time_after": forward_time(lambda: sample.run(changed), of="optimised"),
        }
        on = self.settings.slice
        if on is None:
            return metrics
        for when, module, policy in (("before", original, NO_REMAT), ("after", changed, remat)):
            program, shapes = gradient_program(module, sample.call, sample.tensors, policy)
            figures = ask_compiler(on, program, shapes)
            metrics |= {f"{name}_{when}": one for name, one in figures.items()}
        return metrics

    def _differs(self, name: str, error: float, level: Level) -> None:
        said = (
            f"{name} optimised at level '{level.name}' differs from the original by {error:.1%} on "
            f"the sample, more than {level.tolerance:.0%}; use a lower level."
        )
        if self.settings.enable_strict_validation:
            raise TPUOptimizationError(said)
        logger.warning("%s", said)

    def _left_alone(self, model: Any, why: str, start: float) -> OptimizationResult:
        """Return a module as it is, and say why.

        Raises:
            TPUValidationError: Validation is strict.
        """
        if self.settings.enable_strict_validation:
            raise TPUValidationError(why)
        logger.warning("%s Nothing was optimised.", why)
        return OptimizationResult(
            model, "none", [f"Nothing was optimised: {why}"], time.perf_counter() - start
        )


@dataclass(frozen=True)
class _SampleCall:
    """How a module is called on the sample."""

    tensors: list[Any]
    call: Callable[[Any, list[Any]], Any]

    @classmethod
    def of(cls, inputs: Any) -> "_SampleCall":
        import torch

        trees = torch_trees()
        leaves, tree = trees.tree_flatten(inputs)
        tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
        if not tensors:
            raise TPUValidationError(
                f"sample_inputs holds no tensor, it is {type(inputs).__name__}; give a tensor, a "
                "tuple of positional arguments, or a dict of keywords."
            )

        def call(module: Any, given: list[Any]) -> Any:
            left = iter(given)
            filled = [next(left) if isinstance(one, torch.Tensor) else one for one in leaves]
            whole = trees.tree_unflatten(filled, tree)
            if isinstance(whole, Mapping):
                return module(**whole)
            return module(*whole) if isinstance(whole, tuple | list) else module(whole)

        return cls(tensors, call)

    def run(self, module: Any) -> Any:
        """Call a module without gradients."""
        import torch

        with torch.no_grad():
            return self.call(module, self.tensors)
