"""What a program really does, where that is not what its author meant: each with evidence and cost.

A finding is read from the compiled program and its predicted step, or from what the capture saw.
Nothing is guessed from names of models: a finding names the operation, its size and its time.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..capturing.captured import Captured, CapturedProgram
from ..compiler.hlo import HloModule
from ..hardware.figure import bytes_text

if TYPE_CHECKING:
    from ..compiler.compiled import CompiledStep
    from ..compiler.timeline import StepPrediction

_LEAST_SHARE = 0.01
_SQUARE_LEAST = 1024


@dataclass(frozen=True)
class ProgramFinding:
    """One thing that a program does.

    Attributes:
        kind: "kernel", "float32 matmul", "attention scores", "host callback", "value read", …
        evidence: What was seen, with its place in the user's program.
        seconds: Predicted time per step; None where no time belongs to it.
        advice: The way out; empty where nothing is wrong.
    """

    kind: str
    evidence: str
    seconds: float | None = None
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        seconds = {"value": self.seconds, "origin": "model"}
        return {**vars(self), "seconds": None if self.seconds is None else seconds}

    @property
    def text(self) -> str:
        """One line for a person."""
        cost = "" if self.seconds is None else f" ({self.seconds * 1e3:.3g} ms per step, model)"
        return f"{self.kind}: {self.evidence}{cost}" + (f"; {self.advice}" if self.advice else "")


def find_in_program(
    captured: Captured,
    program: CapturedProgram,
    compiled: "CompiledStep",
    prediction: "StepPrediction | None",
) -> tuple[ProgramFinding, ...]:
    """Return what a captured program does, the most expensive first."""
    found = [
        *_kernels(program, prediction),
        *_float32(compiled, prediction),
        *_scores(program, compiled),
        *_capture(captured, program),
    ]
    return tuple(sorted(found, key=lambda one: -(one.seconds or 0.0)))


def _kernels(
    program: CapturedProgram, prediction: "StepPrediction | None"
) -> Iterable[ProgramFinding]:
    """Yield each Pallas kernel with its share of the step."""
    if prediction is None:
        for name, count in program.about.kernels.items():
            yield ProgramFinding("kernel", f"{name}, {count} calls")
        return
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in prediction.spans:
        if span.track == "core" and span.cause == "kernel":
            # XLA names a call after its kernel, and numbers the calls.
            seconds[span.name.rstrip("0123456789").rstrip(".")] += span.duration_s * span.times
    for name, spent in seconds.items():
        share = spent / prediction.step_time_s
        yield ProgramFinding("kernel", f"{name}, {share:.0%} of the step", spent)


def _float32(
    compiled: "CompiledStep", prediction: "StepPrediction | None"
) -> Iterable[ProgramFinding]:
    """Yield matmuls in float32, which a matrix unit runs in several passes."""
    if prediction is None:
        return
    wide = _float32_products(compiled.module)
    spent, heaviest, most = 0.0, 0.0, ""
    for span in prediction.spans:
        if span.track == "core" and span.name in wide:
            cost = span.duration_s * span.times
            spent += cost
            if cost > heaviest:
                heaviest, most = cost, _place(span.op_name) or span.name
    if spent > _LEAST_SHARE * prediction.step_time_s:
        yield ProgramFinding(
            "float32 matmul",
            f"the largest is {most}",
            spent,
            "cast both operands to bfloat16, or set preferred_element_type for the result alone",
        )


def _float32_products(module: HloModule) -> set[str]:
    """Return the instructions that multiply float32 by float32, alone or within a fusion."""
    products: set[str] = set()
    for computation in module.computations.values():
        for one in computation:
            operands = [computation.by_name.get(name) for name in one.operands[:2]]
            if one.opcode in ("dot", "convolution") and all(
                found is not None and found.shapes[0].dtype == "f32" for found in operands
            ):
                products.add(one.name)
    wide = set(products)
    for computation in module.computations.values():
        for one in computation:
            if one.opcode == "fusion" and any(
                inner.name in products for inner in module.nested(one)
            ):
                wide.add(one.name)
    return wide


def _scores(program: CapturedProgram, compiled: "CompiledStep") -> Iterable[ProgramFinding]:
    """Yield attention scores that are written to HBM: a fused kernel keeps them in VMEM."""
    largest: tuple[int, str, str] | None = None
    for computation in compiled.module.computations.values():
        for one in computation:
            if (
                one.opcode not in ("fusion", "dot", "convolution")
                or "dot_general" not in one.op_name
            ):
                continue
            for shape in one.shapes:
                dims = [size for size in shape.dims if size >= _SQUARE_LEAST]
                if len(shape.dims) >= 3 and len(dims) >= 2 and len(set(dims)) == 1:
                    size = shape.bytes
                    if largest is None or size > largest[0]:
                        largest = (size, str(shape), one.op_name)
    if largest is not None and not program.about.kernels:
        size, shape, op_name = largest
        yield ProgramFinding(
            "attention scores",
            f"{shape} is computed by {_place(op_name)} without a kernel ({bytes_text(size)})",
            None,
            "an attention kernel for TPUs (splash attention, or tpukit.kernels) keeps them in VMEM",
        )


def _place(op_name: str) -> str:
    """Return where in the user's program an operation comes from, without the export around it."""
    return op_name.removeprefix("jit(call)/call_exported/")


def _capture(captured: Captured, program: CapturedProgram) -> Iterable[ProgramFinding]:
    if program.devices < captured.slice.devices:
        yield ProgramFinding(
            "idle devices",
            f"the program runs on {program.devices} of {captured.slice.devices} devices",
            None,
            "build the mesh from all of jax.devices() and shard its arguments",
        )
    if program.about.callbacks:
        yield ProgramFinding(
            "host callback",
            f"{program.about.callbacks} calls into Python per step",
            None,
            "each one waits for the host; return the value and log it outside of jit",
        )
    if program.open_loops:
        yield ProgramFinding(
            "open loop",
            f"{program.open_loops} loops have no constant length; each is counted once",
            None,
            "use lax.scan or fori_loop with constant bounds where the length is known",
        )
    for read in captured.reads:
        if read["how"] == "decided":
            yield ProgramFinding(
                "value decided",
                f"{read['line']} branches on a value that was not computed; it was taken as zero",
                None,
                "the other branch was not captured; judge it with a run that takes it",
            )
