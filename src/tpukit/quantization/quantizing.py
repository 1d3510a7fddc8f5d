"""`quantize_model`: calibrate, choose formats, quantize, and measure what was lost."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from rich.console import RenderableType

from ..annotations import PyTree
from ..errors import TargetNotReached, TPUValidationError
from ..hardware import get_chip
from ..kernels.ops.quantized_matmul.weight import array_bytes
from ..models.stored.running import Activations
from ..runtime.progress import Progress, watched
from ..shown import Shown
from .integers.qwix_matrices import Method
from .measures.chip_speed import estimated_speedup
from .measures.evaluation import QuantizationEvaluation
from .measures.generation_score import generation_score
from .measures.speed import measured_speedup
from .model import QuantizedModel, matrix_of, with_parts
from .plan import SKIP, QuantPlan, Rules, make_plan
from .report import MatrixRow, QuantReport
from .search.calibrated import Calibrated, RoundingMethod, Stored, rows_of
from .search.candidates import Chosen, make_candidates
from .search.search import CANDIDATES, Ladder
from .search.tuning import TuningReport, tune_parameters
from .subject import held_out, make_subject, read_batches

# The format of all matrices where nobody asks for a target, a size or a format.
DEFAULT_FORMAT = "int4"
# How often a search makes further upgrades where activations that are rounded lose more.
_RETRIES = 3


@dataclass(frozen=True)
class QuantizationResult(Shown):
    """A quantized model and what it lost."""

    model: QuantizedModel
    report: QuantReport

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return self.report.to_dict()

    def __rich__(self) -> RenderableType:
        return self.report.__rich__()


def quantize_model(
    model: object,
    calibration_data: Iterable[PyTree],
    *,
    params: PyTree = None,
    evaluation_data: Iterable[PyTree] | None = None,
    format: str | None = None,
    rules: Rules = (),
    plan: QuantPlan | None = None,
    target_accuracy_retention: float | None = None,
    bits: float | None = None,
    candidates: Iterable[str] = CANDIDATES,
    num_calibration_batches: int = 16,
    activations: Activations = "wide",
    integers: Method | None = None,
    sequential: int = 4,
    tune: int = 0,
    tune_codes: bool = True,
    seed: int = 0,
    codec: dict[str, Any] | None = None,
    chip: str | None = None,
    mesh: Mesh | None = None,
    progress: Progress = watched,
) -> QuantizationResult:
    """Quantize the matrices of anybody's model by what its outputs lose on data.

    Matrices are found by the products they are multiplied in, so the framework does not matter.
    Embeddings, norms, routers, the unembedding and, in models without those, the first and the
    last matrix are left as they are unless a rule names them.

    Args:
        model: An nnx or equinox module, a linen module, a pair (init, apply), a
            `TransformerConfig` or a preset's name.
        calibration_data: Batches: arrays, pairs (inputs, targets), or mappings of names to
            arrays (of plain functions: whatever they take).
        params: The parameters, where the model does not hold them.
        evaluation_data: Batches that losses are measured on; by default the last quarter of the
            calibration batches, which are then not calibrated with.
        format: Of every matrix that nothing else is said of: "vq2", "int4", …; "int4" by default.
        rules: (pattern, format) pairs; see `make_plan`.
        plan: All formats at once, in place of a format, rules or a search.
        target_accuracy_retention: Search for the smallest model whose retention surely reaches
            this: the lower end of its 95 % interval on held-out data.
        bits: Search for the best model of at most so many bits a weight, over the quantized
            matrices, scales and codebooks included.
        candidates: Formats that a search chooses from.
        num_calibration_batches: How many batches are read.
        activations: "int8" also rounds what multiplies a quantized matrix, as it comes.
        integers: How integers are rounded: "nearest", "gptq" or "awq"; see `round_matrix`.
        sequential: Blocks of consecutive matrices, in the order they are multiplied: the inputs of
            each are measured with all blocks before it quantized. 1 measures all at once.
        tune: Steps of training after all matrices are quantized: entries, scales and what was not
            quantized, to give the full model's outputs on the calibration data (see
            `tune_parameters`); bytes stay. A search for a target then tunes every plan that it
            measures.
        tune_codes: Whether vector codes change in a tuning, which takes memory for float32
            matrices and two moments of each; otherwise they stay.
        seed: Of codebooks, and of the order of batches in a tuning.
        codec: Further arguments of `quantize_matrix` ({"hadamard": True}).
        chip: A generation ("v6e") that the report's speedup is estimated for, by kernels compiled
            for it; by default it is measured on the accelerator that is here, if there is one.
        mesh: Devices that share the model and what is measured: weights are split along its `fsdp`
            and `tensor` axes, each batch along `data` and `fsdp`, and what devices see is added up.
            No device holds the whole model where the parameters are given on the host or on the
            mesh; matrices of one block and shape are fitted on one. The result is that of one
            device, and lies on the mesh.
        progress: Called with a line for each thing done.

    Raises:
        TargetNotReached: No plan reaches the target, or none that is as small as `bits` asks for;
            `best` is the `QuantizationResult` that comes nearest.
        TPUModelError: Nobody knows the model, or it multiplies nothing.
        TPUValidationError: An argument is not valid.
        MeshError: Nothing is split along an axis of the mesh.
    """
    started = time.perf_counter()
    _check(target_accuracy_retention, bits, plan, format, tune)
    if chip is not None:
        get_chip(chip)  # or hours later
    first, data = _peek(calibration_data)
    subject = make_subject(model, params, first)
    batches = read_batches(data, num_calibration_batches, subject.batch)
    if evaluation_data is None:
        batches, judged = held_out(batches)
    else:
        judged = read_batches(evaluation_data, num_calibration_batches, subject.batch)
    rounding = RoundingMethod(integers, seed, sequential, codec)
    calibrated = Calibrated.of(subject, batches, judged, rounding, progress, mesh)

    def build(made: Mapping[str, Stored]) -> _Built:
        return _built(calibrated, made, activations, tune, codes=tune_codes)

    def carry_out(plan: QuantPlan, made: Mapping[str, Stored]) -> QuantizationResult:
        target = target_accuracy_retention
        found = _reported(calibrated, plan, made, build(made), target=target, started=started)
        return found if chip is None else _with_speed_on(chip, found, progress)

    base = plan or make_plan(calibrated.matrices, format or DEFAULT_FORMAT, rules=rules)
    if target_accuracy_retention is None and bits is None:
        return carry_out(base, calibrated.quantize(base))
    found = make_candidates(calibrated, base, candidates)
    ladder = Ladder.of(found)

    def chosen(choices: Chosen) -> QuantizationResult:
        return carry_out(found.plan(choices), _stored(choices))

    most = None if bits is None else bits * found.weights / 8
    if target_accuracy_retention is None:
        assert most is not None
        return chosen(ladder.within(most))
    limit = len(ladder.upgrades) if most is None else ladder.steps_within(most)
    measure = (
        (lambda chosen: _evaluated(calibrated, build(_stored(chosen)).model)) if tune else None
    )
    enough = ladder.until(target_accuracy_retention, limit, measure)
    steps = limit if enough is None else enough
    result = chosen(ladder.choices(steps))
    # The search measures with activations as they are; rounded ones lose a little more.
    jump = max(1, limit // 8)
    for _ in range(_RETRIES):
        if result.report.reached or steps >= limit:
            break
        steps = min(limit, steps + jump)
        result = chosen(ladder.choices(steps))
    if not result.report.reached:
        raise _not_reached(result, target_accuracy_retention, bits)
    return result


def _check(
    target: float | None, bits: float | None, plan: Any, format: str | None, tune: int
) -> None:
    if tune < 0:
        raise TPUValidationError(f"tune={tune}; expected a number of steps, or 0 for none.")
    if target is not None and not 0 < target <= 1:
        raise TPUValidationError(
            f"target_accuracy_retention={target}; a share that is kept is above 0 and at most 1."
        )
    if bits is not None and not 1 <= bits <= 16:
        raise TPUValidationError(f"bits={bits}; a weight takes between 1 and 16 bits here.")
    searched = target is not None or bits is not None
    if searched and (plan is not None or format is not None):
        raise TPUValidationError(
            "a format or a plan leaves nothing to search for; give those, or a target or bits."
        )


def _peek(data: Any) -> tuple[Any, Any]:
    """The first batch, and all of them."""
    if hasattr(data, "shape") or hasattr(data, "keys"):
        return data, data
    batches = list(data) if isinstance(data, list | tuple) else iter(data)
    if isinstance(batches, list):
        return (batches[0] if batches else None), batches
    first = next(batches, None)
    return first, _chained(first, batches)


def _chained(first: Any, rest: Any) -> Iterable[Any]:
    yield first
    yield from rest


def _stored(choices: Chosen) -> dict[str, Stored]:
    return {name: one.stored for name, one in choices.items()}


class _Built(NamedTuple):
    """A quantized model, and what tuning it did; None where it was not."""

    model: QuantizedModel
    tuning: TuningReport | None


def _built(
    calibrated: Calibrated,
    made: Mapping[str, Stored],
    activations: Activations,
    tune: int,
    *,
    codes: bool,
) -> _Built:
    subject, tuning = calibrated.subject, None
    parts = {name: one.part for name, one in made.items()}
    params = with_parts(subject.params, calibrated.matrices, parts)
    if tune:
        params, tuning = tune_parameters(
            subject,
            params,
            calibrated.batches,
            steps=tune,
            codes=codes,
            seed=calibrated.rounding.seed,
            spread=calibrated.spread,
            progress=calibrated.progress,
        )
    return _Built(QuantizedModel(params, subject, activations), tuning)


def _reported(
    calibrated: Calibrated,
    plan: QuantPlan,
    made: Mapping[str, Stored],
    built: _Built,
    *,
    target: float | None,
    started: float,
) -> QuantizationResult:
    subject, matrices, quantized = calibrated.subject, calibrated.matrices, built.model
    evaluation = _evaluated(calibrated, quantized)
    written, why = generation_score(subject, quantized.params, calibrated.evaluation_batches)
    rows: list[MatrixRow] = []
    for one in matrices.found:
        kept = made.get(one.name)
        rows.append(
            MatrixRow(
                name=one.name,
                shape=one.shape,
                format=plan.formats.get(one.name, SKIP),
                nbytes=array_bytes(matrix_of(subject.params, one) if kept is None else kept.part),
                error=None if kept is None else kept.error,
                why=plan.reasons.get(one.name, ""),
            )
        )
    leaves: list[Any] = jax.tree.leaves(subject.params)
    report = QuantReport(
        plan=plan,
        matrices=tuple(rows),
        refused=matrices.refused,
        parameters=sum(leaf.size for leaf in leaves),
        stored_bytes=quantized.nbytes,
        evaluation=evaluation,
        generation=written,
        no_generation=why,
        speedup=measured_speedup(quantized, calibrated.evaluation_batches[0]),
        calibration_rows=rows_of(calibrated.batches),
        tuning=built.tuning,
        target=target,
        seconds=time.perf_counter() - started,
    )
    return QuantizationResult(quantized, report)


def _with_speed_on(chip: str, result: QuantizationResult, progress: Progress) -> QuantizationResult:
    """The result with the speedup that kernels compiled for a chip would have."""
    kept = "int8" if result.model.activations == "int8" else "bfloat16"
    matrices = [(row.shape, row.format) for row in result.report.matrices]
    speed = estimated_speedup(matrices, chip, activations=kept, progress=progress)
    return replace(result, report=replace(result.report, speedup=speed))


def _evaluated(calibrated: Calibrated, model: QuantizedModel) -> QuantizationEvaluation:
    """With activations as they are, decoded matrices give the same; rounded ones must be run."""
    if model.activations == "wide":
        return calibrated.evaluator(model.dequantized())
    return calibrated.evaluator(model.params, apply=model.apply)


def _not_reached(result: QuantizationResult, target: float, bits: float | None) -> TargetNotReached:
    report = result.report
    size = "" if bits is None else f" at {bits:g} bits a weight"
    found = report.evaluation.retention
    return TargetNotReached(
        f"a {report.evaluation.measure} retention of {target:g} is not reached{size}: the best "
        f"plan keeps {found.text()} at {report.bits_per_weight:.2f} bits. Allow more bits, a lower "
        "target, finer candidates, or measure on more held-out data; `best` holds the result.",
        best=result,
    )
