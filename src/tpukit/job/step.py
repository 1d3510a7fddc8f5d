"""`build_step`: the training step of a job, the same for `check` and `train`."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ..errors import ConfigError
from ..models.presets import get_preset
from ..models.remat.policy import FULL
from ..models.transformer.config import TransformerConfig
from ..parallel.sharding.strategy import strategy_for
from ..step.optimizer import build_optimizer
from ..step.optimizer_spec import LearningRate
from ..step.workload import Workload
from .job import Job
from .model_source import MEAN_LOSS, mean_of_first_output
from .precision import InPrecision, in_precision
from .train import OPTIMIZER_FIELDS

# Keys of a job that are arguments of `Workload` under the same name.
_SAME_NAME = ("microbatches", "attention", "pipeline_schedule", "loss_chunks", "sequence_length")
REMAT_BY_DEFAULT = FULL  # for reference transformers: only the inputs of layers are kept


@dataclass(frozen=True, kw_only=True)
class JobStep:
    """The training step of a job.

    Attributes:
        work: Model, loss, optimizer and batch as pure functions.
        learning_rate: Its schedule; None if the model brings its own optimizer.
        notes: Notes for the user: emulated formats, settings without effect.
    """

    work: Workload
    learning_rate: LearningRate | None
    notes: tuple[str, ...]


def build_step(job: Job, *, values: bool = True) -> JobStep:
    """Build the training step that a job describes.

    A `Workload` that a builder returned keeps its own values, except for those the job states.

    Args:
        job: The job.
        values: Whether the step will run; to compile it, the shapes of a PyTorch model are enough.

    Raises:
        TPUModelError: The model cannot be trained with these settings.
        ConfigError: Settings of the job contradict each other.
    """
    model = job.load_model(values=values)
    model = get_preset(model) if isinstance(model, str) else model
    formats = in_precision(model, job.train.precision, job.train.param_dtype)
    if job.train.lora is not None:
        formats = _frozen(formats, job.train.param_dtype)
    notes = [] if formats.note is None else [formats.note]
    built = formats.model if isinstance(formats.model, Workload) else None
    transformation, rate, note = _optimizer(job, built)
    notes += [] if note is None else [note]
    arguments: dict[str, Any] = {
        **formats.options,
        **_stated(job, built),
        **job.parts,
        "optimizer": transformation,
        "seed": job.train.seed,
    }
    if job.train.lora is not None:
        arguments["lora"] = job.train.lora.spec()
    if job.train.z_loss or "z_loss" in job.train.model_fields_set:
        arguments["z_loss"] = job.train.z_loss
    if built is not None:
        work = _resized(built, job).replace(**arguments)
    else:
        work = Workload(formats.model, **{**_shape(job), **arguments})
    if job.train.packing == "documents" and "segment_ids" not in work.batch_shapes():
        work = work.replace(batch=_with_segments(work.batch_shapes()))
    if work.lora is not None:
        work = work.replace(frozen=_frozen_base(job, work))
    if work.loss is mean_of_first_output:
        notes.append(MEAN_LOSS)
    return JobStep(work=work, learning_rate=rate, notes=tuple(notes))


def _frozen(formats: InPrecision, param_dtype: str | None) -> InPrecision:
    """Return the model with parameters in the compute format, unless the job sets another.

    Frozen parameters get no updates, so a wider format would only take memory.
    """
    model = formats.model
    if param_dtype is not None or not isinstance(model, TransformerConfig):
        return formats
    return dataclasses.replace(formats, model=model.replace(param_dtype=model.dtype))


def _frozen_base(job: Job, work: Workload) -> Callable[[Any], Any] | None:
    """Return the function that quantizes the frozen parameters under LoRA; None to keep them."""
    from ..quantization.files.model_files import is_quantized_folder
    from ..quantization.uniform import rounded_base, saved_base

    source, base = job.train.init_from, None if work.lora is None else work.lora.base
    quantized = source is not None and is_quantized_folder(Path(source).expanduser())
    if quantized and base is not None:
        raise ConfigError(
            f"init_from '{source}' is quantized already, but lora.base: {base} would quantize it "
            "again; leave base out."
        )
    if quantized:
        return saved_base(str(source))
    return None if base is None else rounded_base(work.model, base, work.batch_shapes())


def _stated(job: Job, built: Workload | None) -> dict[str, Any]:
    """Return the arguments of `Workload` from the job; for a built one only what the job states."""
    stated = job.model_fields_set
    arguments: dict[str, Any] = {
        name: getattr(job, name)
        for name in _SAME_NAME
        if (built is None or name in stated) and getattr(job, name) is not None
    }
    if job.strategy is not None:
        arguments["strategy"] = job.strategy
    elif built is None or "mesh" in stated:
        arguments["strategy"] = strategy_for(job.mesh)
    if job.remat is not None or built is None:
        arguments["remat"] = job.remat or _usual_remat(job)
    if "loss" in job.parts:
        arguments.pop("loss_chunks", None)
    return arguments


def _usual_remat(job: Job) -> str | None:
    return REMAT_BY_DEFAULT if job.model_flops is not None else None


def _shape(job: Job) -> dict[str, Any]:
    """Return batch size and sequence length, unless the job gives shapes of a batch."""
    if "batch" in job.parts:
        return {}
    return {"batch_size": job.examples, "sequence_length": job.tokens_per_example}


def _resized(built: Workload, job: Job) -> Workload:
    """Return a built workload with the batch size of the job."""
    if job.batch_size is None or job.batch_size == built.examples:
        return built
    if built.batch is None:
        return built.replace(batch_size=job.batch_size)
    shapes = {
        name: jax.ShapeDtypeStruct((job.batch_size, *shape.shape[1:]), shape.dtype)
        for name, shape in built.batch.items()
    }
    return built.replace(batch=shapes)


def _optimizer(job: Job, built: Workload | None) -> tuple[Any, LearningRate | None, str | None]:
    """Return the transformation, its schedule, and a note on settings without effect.

    An optimizer given in Python comes first, then the one that the job names, then the workload's.
    """
    stated = [name for name in OPTIMIZER_FIELDS if name in job.train.model_fields_set]
    given = job.parts.get("optimizer")
    if given is None and "optimizer" not in stated and built is not None:
        given = built.optimizer
    if given is not None:
        note = f"{', '.join(stated)}: no effect, because the model brings its own optimizer"
        return given, None, note if stated else None
    rate = job.train.learning_rate_schedule()
    return build_optimizer(job.train.optimizer_spec(), rate), rate, None


def _with_segments(
    shapes: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes with the document of each token and its position added."""
    tokens = shapes["inputs"]
    return {**shapes, "segment_ids": tokens, "positions": tokens}
