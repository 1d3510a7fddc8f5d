"""`XlaCompiler`: an optimizer's step through the real TPU compiler, before there is a TPU."""

from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import optax
from rich.console import Group, RenderableType
from rich.text import Text

from ...annotations import PyTree
from ...compiler import CompiledStep, Program, lower_program
from ...compiler.aot import DEFAULT_TIMEOUT_S, compile_for
from ...errors import ConfigError, TPUOutOfMemoryError, TPUValidationError
from ...hardware import Slice
from ...hardware.target import target_chip
from ...runtime.calls import either_way
from ...runtime.ranges import SECONDS
from ...shown import Shown
from ..optimizer.placement import mesh_without_devices
from ..optimizer.program import LossFunction, OptimizerProgram
from .flags import OFF, OptimizationFlags

HIGHEST_LEVEL = 3


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """What is stepped: an optimizer, parameters, and where gradients come from.

    `TpuOptimizer.config_for(params, gradients)` makes the one of a step that runs.

    Attributes:
        parameters: A tree of arrays or shapes.
        on: The slice.
        loss: (parameters, batch) -> loss; None: gradients are given to the step.
        batch: A tree of arrays or shapes, for the loss.
        checkpointing: Whether the backward pass computes activations again.
    """

    optimizer: optax.GradientTransformation
    parameters: PyTree
    on: Slice | str
    loss: LossFunction | None = None
    batch: PyTree = None
    checkpointing: bool = False

    @property
    def slice(self) -> Slice:
        """The slice, parsed."""
        return Slice.parse(self.on) if isinstance(self.on, str) else self.on

    @property
    def program(self) -> OptimizerProgram:
        """The step as a pure function."""
        return OptimizerProgram(self.optimizer, self.loss, self.checkpointing)

    def arguments(self) -> tuple[Any, Any, Any]:
        """Return the step's arguments as shapes on the slice's mesh.

        Raises:
            ConfigError: There is a loss and no batch to say the shapes of its examples.
        """
        if self.loss is not None and self.batch is None:
            raise ConfigError("A loss needs a batch: OptimizerConfig(…, loss=…, batch=shapes).")
        given = self.parameters if self.loss is None else self.batch
        return self.program.arguments(self.parameters, given, mesh_without_devices(self.slice))


@dataclass(frozen=True)
class OptimizedGraph(Shown):
    """A step that the TPU compiler has accepted, ready for `TpuOptimizer.load_xla_graph`.

    Attributes:
        options: Of the compiler, for TPUs; other platforms know none of them.
        compiled: What the compiler made of it for the slice.
        program: What it was given.
    """

    config: OptimizerConfig = field(repr=False)
    flags: OptimizationFlags
    options: dict[str, Any]
    compiled: CompiledStep
    program: Program = field(repr=False)

    @property
    def fingerprint(self) -> str:
        """Of what the compiler was given: the same step has the same."""
        return self.program.fingerprint

    def check_fits(self, params: PyTree, given: PyTree) -> None:
        """Compare the arguments of a step with those it was compiled for.

        Raises:
            TPUValidationError: They differ.
        """
        expected = self.config.parameters if self.config.loss is None else self.config.batch
        for what, seen, wanted in (
            ("parameters", params, self.config.parameters),
            ("gradients" if self.config.loss is None else "batch", given, expected),
        ):
            if _shapes(seen) != _shapes(wanted):
                raise TPUValidationError(
                    f"The loaded graph was compiled for {what} {_text(wanted)}, and this step has "
                    f"{_text(seen)}; compile it for these, or load_xla_graph(None)."
                )

    def effects(self) -> dict[str, bool]:
        """Say of each switch whether the program differs with it the other way (compiles each)."""
        mine = _instructions(self.compiled)
        found: dict[str, bool] = {}
        for switch in OFF:
            other = replace(self.flags, **{switch: not getattr(self.flags, switch)})
            generation = self.compiled.slice.chip.name
            options = {**self.options}
            for name in OFF[switch]:
                options.pop(name, None)
            options |= {
                name: value
                for name, value in other.compiler_options(0, generation=generation).items()
                if name in OFF[switch]
            }
            compiled = compile_for(
                self.program, self.compiled.slice, options=options, until="schedule"
            )
            found[switch] = _instructions(compiled) != mine
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "fingerprint": self.fingerprint,
            "options": dict(self.options),
            **self.compiled.to_dict(),
        }

    def __rich__(self) -> RenderableType:
        set_here = ", ".join(f"{name}={value}" for name, value in self.options.items()) or "none"
        return Group(self.compiled, Text(f"options: {set_here}", style="dim"))


@dataclass(frozen=True, kw_only=True)
class XlaCompiler:
    """Compiles optimizer steps for slices that are not here, in keywords or step by step.

    ```python
    compiler = XlaCompiler().with_optimization_level(3).with_flags(OptimizationFlags()).build()
    graph = compiler.compile_optimization_pipeline(optimizer.config_for(params, gradients))
    optimizer.load_xla_graph(graph)  # the next step runs it
    ```

    Attributes:
        level: 0 to 3: none, suggested, published and experimental flags.
        flags: What the compiler may do.
        timeout_s: A compile is killed after this long.
    """

    level: int = 0
    flags: OptimizationFlags = field(default_factory=OptimizationFlags)
    timeout_s: float = DEFAULT_TIMEOUT_S

    def __post_init__(self) -> None:
        if self.level not in range(HIGHEST_LEVEL + 1):
            raise ConfigError(f"level {self.level!r} is no optimization level; use 0, 1, 2 or 3.")
        SECONDS.check("timeout_s", self.timeout_s, unit="seconds")

    def with_optimization_level(self, level: int) -> Self:
        """Set the flags of this level."""
        return replace(self, level=level)

    def with_flags(self, flags: OptimizationFlags) -> Self:
        """Allow the compiler these optimizations."""
        return replace(self, flags=flags)

    def with_timeout(self, seconds: float) -> Self:
        """Give a compile this long."""
        return replace(self, timeout_s=seconds)

    def build(self) -> Self:
        """Return it; everything was checked as it was given."""
        return self

    @either_way
    def compile_optimization_pipeline(self, config: OptimizerConfig) -> OptimizedGraph:
        """Compile a whole step: loss and gradients where there is a loss, and the update.

        Raises:
            TPUOutOfMemoryError: It does not fit on the slice.
            XLACompilationError: The compiler refused it, or ran out of time.
            ConfigError: The configuration lacks something.
        """
        on = config.slice
        options = self.flags.compiler_options(self.level, generation=on.chip.name)
        with target_chip(on.chip.name):
            program = lower_program(config.program, *config.arguments())
        compiled = compile_for(
            program, on, options=options, until="schedule", timeout_s=self.timeout_s
        )
        if not compiled.fits:
            raise TPUOutOfMemoryError(compiled.memory.refusal)
        return OptimizedGraph(config, self.flags, options, compiled, program)


def _shapes(tree: PyTree) -> Any:
    return jax.tree.map(lambda leaf: (tuple(leaf.shape), str(leaf.dtype)), tree)


def _text(tree: PyTree) -> str:
    shown = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(tree)]
    return ", ".join(shown[:3]) + (", …" if len(shown) > 3 else "")


def _instructions(compiled: CompiledStep) -> list[str]:
    """The program without what only says where it came from."""
    return [
        f"{one.opcode} {one.shapes}"
        for computation in compiled.module.computations.values()
        for one in computation
    ]
