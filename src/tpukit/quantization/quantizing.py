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
from ..plain_data import JsonObject
from ..runtime.progress import Progress, watched
from ..shown import Shown
from .integers import Method
from .measures.evaluation import QuantizationEvaluation, generation_score
from .measures.speed import estimated_speedup, measured_speedup
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
    """A quantized model and its report."""

    model: QuantizedModel
    report: QuantReport

    def to_dict(self) -> JsonObject:
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
    """Quantize the matrices of a model of any framework, with calibration and measured loss.

    Matrices are found by tracing the model's matmuls, so the framework does not matter.
    Embeddings, norms, routers and the unembedding are not quantized unless a rule names them, and
    in models without those neither are the first and the last matrix.

    Args:
        model: An nnx or equinox module, a linen module, a pair (init, apply), a
            `TransformerConfig` or a preset's name.
        calibration_data: Batches: arrays, pairs (inputs, targets), or mappings of names to
            arrays; for plain functions, their argument.
        params: The parameters, if the model does not contain them.
        evaluation_data: Batches to measure on; by default the last quarter of the calibration
            batches, which is then not used for calibration.
        format: Format of all matrices that no rule names, such as "vq2"; "int4" by default.
        rules: (pattern, format) pairs; see `make_plan`.
        plan: Formats of all matrices, instead of a format, rules or a search.
        target_accuracy_retention: Search for the smallest model whose retention reaches this with
            the lower end of its 95 % interval on held-out data.
        bits: Search for the best model of at most so many bits per weight of the quantized
            matrices, with scales and codebooks.
        candidates: Formats that a search chooses from.
        num_calibration_batches: Number of batches to read.
        activations: "int8" also rounds activations at run time.
        integers: How integers are rounded: "nearest", "gptq" or "awq"; see `round_matrix`.
        sequential: Number of blocks of consecutive matrices. Inputs of a block are measured with
            all earlier blocks quantized; 1 measures all inputs on the full model.
        tune: Training steps after quantization: codebook entries, scales and parameters that are
            not quantized are trained towards the full model's outputs on the calibration data
            (see `tune_parameters`). A search for a target tunes every plan that it measures.
        tune_codes: Whether tuning changes vector codes, which takes memory for float32 matrices
            and two moments of each.
        seed: Seed of codebooks and of the order of batches in tuning.
        codec: Further arguments of `quantize_matrix` ({"hadamard": True}).
        chip: A generation ("v6e") to estimate the report's speedup for, by compiled kernels; by
            default it is measured on this machine's accelerator, if there is one.
        mesh: Devices that share the work: weights are sharded along its `fsdp` and `tensor` axes,
            each batch along `data` and `fsdp`. With parameters on the host or on the mesh no
            device holds the whole model; matrices of one block and shape are fitted on one
            device. The result equals that of one device, and is sharded over the mesh.
        progress: Called with one line per step of the work.

    Raises:
        TargetNotReached: No plan reaches the target, or none within `bits`; `best` is the nearest
            `QuantizationResult`.
        TPUModelError: The kind of model is unknown, or it has no matmul with a parameter.
        TPUValidationError: An argument is not valid.
        MeshError: Nothing is sharded along an axis of the mesh.
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
        result = _reported(calibrated, plan, made, build(made), target=target, started=started)
        return result if chip is None else _with_speed_on(chip, result, progress)

    base = plan or make_plan(calibrated.matrices, format or DEFAULT_FORMAT, rules=rules)
    if target_accuracy_retention is None and bits is None:
        return carry_out(base, calibrated.quantize(base))
    made_candidates = make_candidates(calibrated, base, candidates)
    ladder = Ladder.of(made_candidates)

    def chosen(choices: Chosen) -> QuantizationResult:
        return carry_out(made_candidates.plan(choices), _stored(choices))

    most = None if bits is None else bits * made_candidates.weights / 8
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
            f"target_accuracy_retention={target}; expected a share above 0 and at most 1."
        )
    if bits is not None and not 1 <= bits <= 16:
        raise TPUValidationError(f"bits={bits}; expected 1 to 16 bits per weight.")
    searched = target is not None or bits is not None
    if searched and (plan is not None or format is not None):
        raise TPUValidationError(
            "a search chooses formats itself; expected either a format or plan, or a target or "
            "bits."
        )


def _peek(data: Any) -> tuple[Any, Any]:
    """Return the first batch, and an iterator over all batches."""
    if hasattr(data, "shape") or hasattr(data, "keys"):
        return data, data
    batches = list(data) if isinstance(data, list | tuple) else iter(data)
    if isinstance(batches, list):
        return (batches[0] if batches else None), batches
    first = next(batches, None)
    return first, _chained(first, batches)


def _chained(first: Any, rest: Any) -> Iterable[PyTree]:
    yield first
    yield from rest


def _stored(choices: Chosen) -> dict[str, Stored]:
    return {name: choice.stored for name, choice in choices.items()}


class _Built(NamedTuple):
    """A quantized model, and the report of its tuning, if any."""

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
    parts = {name: stored.part for name, stored in made.items()}
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
    for matrix in matrices.found:
        kept = made.get(matrix.name)
        rows.append(
            MatrixRow(
                name=matrix.name,
                shape=matrix.shape,
                format=plan.formats.get(matrix.name, SKIP),
                nbytes=array_bytes(
                    matrix_of(subject.params, matrix) if kept is None else kept.part
                ),
                error=None if kept is None else kept.error,
                why=plan.reasons.get(matrix.name, ""),
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
    """Return the result with a speedup estimated by kernels compiled for a chip."""
    kept = "int8" if result.model.activations == "int8" else "bfloat16"
    matrices = [(row.shape, row.format) for row in result.report.matrices]
    speed = estimated_speedup(matrices, chip, activations=kept, progress=progress)
    return replace(result, report=replace(result.report, speedup=speed))


def _evaluated(calibrated: Calibrated, model: QuantizedModel) -> QuantizationEvaluation:
    """Evaluate dequantized matrices, or the quantized model itself if it rounds activations."""
    if model.activations == "wide":
        return calibrated.evaluator(model.dequantized())
    return calibrated.evaluator(model.params, apply=model.apply)


def _not_reached(result: QuantizationResult, target: float, bits: float | None) -> TargetNotReached:
    report = result.report
    size = "" if bits is None else f" at {bits:g} bits per weight"
    retention = report.evaluation.retention
    return TargetNotReached(
        f"a {report.evaluation.measure} retention of {target:g} is not reached{size}: the best "
        f"plan has {retention.text()} at {report.bits_per_weight:.2f} bits. Allow more "
        "bits, a lower target, finer candidates, or measure on more held-out data; `best` holds "
        "the result.",
        best=result,
    )
