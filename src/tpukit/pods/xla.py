"""Compile optimizer steps for slices that this machine does not have (document 004).

libtpu enables all three of the document's optimizations by default. Switching one on therefore adds
nothing to the flags of the level, and switching it off disables flags that were found by compiling.
The flags below change programs (see `tests/pods/test_xla.py`), while dozens of others with similar
names do not.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import optax
from rich.console import Group, RenderableType
from rich.text import Text

from ..annotations import PyTree
from ..compiler import CompiledStep, Program, lower_program
from ..compiler.aot import DEFAULT_TIMEOUT_S, compile_for
from ..errors import ConfigError, TPUOutOfMemoryError, TPUValidationError
from ..hardware import Slice
from ..hardware.target import target_chip
from ..job.compiler_flags import flags_of
from ..job.sections import CompileSettings
from ..runtime.calls import either_way
from ..runtime.flags import FlagRegistry, as_compiler_options
from ..runtime.ranges import SECONDS
from ..shown import Shown
from .optimizer.program import LossFunction, OptimizerProgram, mesh_without_devices

OFF: dict[str, dict[str, bool | str]] = {
    # Disables fusions with several outputs and fusions into matmuls.
    "enable_fusion": {
        "xla_jf_enable_multi_output_fusion": False,
        "xla_jf_enable_producer_consumer_multi_output_fusion": False,
        "xla_jf_enable_final_priority_fusion": False,
        "xla_jf_conv_input_fusion": False,
        "xla_jf_conv_output_fusion": False,
    },
    # Keeps matmul operands in their written order, whatever their layouts. This changes programs
    # whose matmul operands have several layouts, such as attention. The elementwise update of an
    # optimizer has one layout and stays the same program.
    "enable_layout_optimization": {
        "xla_tpu_order_dot_after_layout": False,
        "xla_tpu_enable_aggressive_loop_fusion_layout_opt": False,
    },
    # Keeps no array in VMEM from one operation to the next.
    "enable_memory_optimization": {"xla_msa_enable": "false"},
}


@dataclass(frozen=True, kw_only=True)
class OptimizationFlags:
    """Optimizations that the compiler may apply.

    Attributes:
        enable_fusion: Fuse operations, so that intermediate results stay out of memory.
        enable_layout_optimization: Choose array layouts by how the arrays are used.
        enable_memory_optimization: Keep arrays in VMEM between operations, and prefetch them.
    """

    enable_fusion: bool = True
    enable_layout_optimization: bool = True
    enable_memory_optimization: bool = True

    def compiler_options(self, level: int, *, generation: str) -> dict[str, Any]:
        """Return compiler options for an optimization level and a chip generation.

        Raises:
            FlagError: The installed libtpu lacks one of the flags.
        """
        registry = FlagRegistry.installed()
        settings = CompileSettings(
            xla_optimization_level=level, enable_xla_fusion=self.enable_fusion
        )
        requested = flags_of(settings, generation=generation)
        flags: dict[str, Any] = {
            name: value for name, value in requested.items() if registry.find(name).compile_option
        }
        for switch, off in OFF.items():
            if not getattr(self, switch):
                flags |= off
        return dict(as_compiler_options(flags, registry=registry))


HIGHEST_LEVEL = 3


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optimizer step to compile: the optimizer, its parameters and the source of gradients.

    `TpuOptimizer.config_for(params, gradients)` returns the configuration of a running step.

    Attributes:
        parameters: A tree of arrays or shapes.
        on: The slice.
        loss: Function (parameters, batch) -> loss; None if the step is given gradients.
        batch: A tree of arrays or shapes that the loss gets.
        checkpointing: Whether the backward pass recomputes activations.
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
        """Return the step's arguments as shapes with shardings on the slice's mesh.

        Raises:
            ConfigError: There is a loss, but no batch that gives the shapes of its examples.
        """
        if self.loss is not None and self.batch is None:
            raise ConfigError("A loss needs a batch: OptimizerConfig(…, loss=…, batch=shapes).")
        given = self.parameters if self.loss is None else self.batch
        return self.program.arguments(self.parameters, given, mesh_without_devices(self.slice))


@dataclass(frozen=True)
class OptimizedGraph(Shown):
    """A step that the TPU compiler has accepted, ready for `TpuOptimizer.load_xla_graph`.

    Attributes:
        options: Compiler options for TPUs; other platforms accept none of them.
        compiled: The compiled program for the slice, with its memory report.
        program: The program that was compiled.
    """

    config: OptimizerConfig = field(repr=False)
    flags: OptimizationFlags
    options: dict[str, Any]
    compiled: CompiledStep
    program: Program = field(repr=False)

    @property
    def fingerprint(self) -> str:
        """A hash of the program and its arguments' shapes."""
        return self.program.fingerprint

    def check_fits(self, params: PyTree, given: PyTree) -> None:
        """Compare the arguments of a step with those that the graph was compiled for.

        Raises:
            TPUValidationError: The shapes or formats differ.
        """
        expected = self.config.parameters if self.config.loss is None else self.config.batch
        for what, seen, wanted in (
            ("parameters", params, self.config.parameters),
            ("gradients" if self.config.loss is None else "batch", given, expected),
        ):
            if _shapes(seen) != _shapes(wanted):
                raise TPUValidationError(
                    f"The loaded graph was compiled for {what} {_text(wanted)}, but this step has "
                    f"{_text(seen)}; compile it for these, or call load_xla_graph(None)."
                )

    def effects(self) -> dict[str, bool]:
        """Compile with each switch inverted, and return which of them change the program."""
        mine = _instructions(self.compiled)
        changes: dict[str, bool] = {}
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
            changes[switch] = _instructions(compiled) != mine
        return changes

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
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
    """Compiles optimizer steps; set up with keyword arguments or step by step.

    ```python
    compiler = XlaCompiler().with_optimization_level(3).with_flags(OptimizationFlags()).build()
    graph = compiler.compile_optimization_pipeline(optimizer.config_for(params, gradients))
    optimizer.load_xla_graph(graph)  # the next step runs it
    ```

    Attributes:
        level: Optimization level: 0 no flags, 1 suggested, 2 published, 3 experimental ones.
        flags: Optimizations that the compiler may apply.
        timeout_s: Time limit of a compile in seconds.
    """

    level: int = 0
    flags: OptimizationFlags = field(default_factory=OptimizationFlags)
    timeout_s: float = DEFAULT_TIMEOUT_S

    def __post_init__(self) -> None:
        if self.level not in range(HIGHEST_LEVEL + 1):
            raise ConfigError(
                f"level {self.level!r} is not an optimization level; use 0, 1, 2 or 3."
            )
        SECONDS.check("timeout_s", self.timeout_s, unit="seconds")

    def with_optimization_level(self, level: int) -> Self:
        """Use the flags of this level."""
        return replace(self, level=level)

    def with_flags(self, flags: OptimizationFlags) -> Self:
        """Set the optimizations that the compiler may apply."""
        return replace(self, flags=flags)

    def with_timeout(self, seconds: float) -> Self:
        """Set the time limit of a compile."""
        return replace(self, timeout_s=seconds)

    def build(self) -> Self:
        """Return the compiler; all values were checked when they were set."""
        return self

    @either_way
    def compile_optimization_pipeline(self, config: OptimizerConfig) -> OptimizedGraph:
        """Compile a whole step: the loss and its gradients, if there is a loss, and the update.

        Raises:
            TPUOutOfMemoryError: The step does not fit on the slice.
            XLACompilationError: The compiler refused the step, or ran out of time.
            ConfigError: The configuration is incomplete.
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
    """Return the program's instructions without their metadata."""
    return [
        f"{instruction.opcode} {instruction.shapes}"
        for computation in compiled.module.computations.values()
        for instruction in computation
    ]
