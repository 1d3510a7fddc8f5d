"""The one place where a job becomes a training step: what is checked is what is trained."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ..errors import ConfigError
from ..models.presets import get_preset
from ..models.transformer.config import TransformerConfig
from ..parallel.sharding.strategy import strategy_for
from ..step.optimizer.optimizer import build_optimizer
from ..step.optimizer.spec import LearningRate
from ..step.workload import Workload
from .job import Job
from .model_source import load_model
from .precision import InPrecision, in_precision
from .torch_source import MEAN_LOSS, mean_of_first_output
from .train import OPTIMIZER_FIELDS

# Keys of a job that are arguments of `Workload` under the same name.
_SAME_NAME = ("microbatches", "attention", "pipeline_schedule", "loss_chunks", "sequence_length")
REMAT_BY_DEFAULT = "full"  # of a reference transformer: the layers' inputs are kept, no more


@dataclass(frozen=True, kw_only=True)
class JobStep:
    """The training step of a job.

    Attributes:
        work: Model, loss, optimizer and batch as pure functions.
        learning_rate: Its schedule; None where the model brings an optimizer of its own.
        notes: What a person should know: formats that are imitated here, settings without effect.
    """

    work: Workload
    learning_rate: LearningRate | None
    notes: tuple[str, ...]


def build_step(job: Job, *, values: bool = True) -> JobStep:
    """Build the training step that a job describes.

    A `Workload` that a builder returned keeps what it says, unless the job states otherwise.

    Args:
        job: What to build.
        values: Whether it will run; to compile it, the shapes of a PyTorch model are enough.

    Raises:
        TPUModelError: Nothing trains with these settings.
        ConfigError: The job leaves open what only it can say.
    """
    model: Any = job.model
    if isinstance(model, str):
        model = load_model(model, job.model_changes, values=values)
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
        work = work.replace(frozen=_kept_base(job, work))
    if work.loss is mean_of_first_output:
        notes.append(MEAN_LOSS)
    return JobStep(work=work, learning_rate=rate, notes=tuple(notes))


def _frozen(formats: InPrecision, param_dtype: str | None) -> InPrecision:
    """Return the model with its parameters in the format they are used in, unless told otherwise.

    Nothing is added to them, so that wider ones would hold bytes that are never read.
    """
    model = formats.model
    if param_dtype is not None or not isinstance(model, TransformerConfig):
        return formats
    return dataclasses.replace(formats, model=model.replace(param_dtype=model.dtype))


def _kept_base(job: Job, work: Workload) -> Callable[[Any], Any] | None:
    """Return what the model's own parameters are kept as beside thin ones; None for as they are."""
    from ..quantization.files.model_files import is_quantized_folder
    from ..quantization.frozen import rounded_base, saved_base

    source, base = job.train.init_from, None if work.lora is None else work.lora.base
    quantized = source is not None and is_quantized_folder(Path(source).expanduser())
    if quantized and base is not None:
        raise ConfigError(
            f"init_from '{source}' is quantized already, and lora.base: {base} would round it "
            "again; leave base out."
        )
    if quantized:
        return saved_base(str(source))
    return None if base is None else rounded_base(work.model, base, work.batch_shapes())


def _stated(job: Job, built: Workload | None) -> dict[str, Any]:
    """Return how the step is written and placed: of a workload only what the job itself says."""
    said = job.model_fields_set
    arguments: dict[str, Any] = {
        name: getattr(job, name)
        for name in _SAME_NAME
        if (built is None or name in said) and getattr(job, name) is not None
    }
    if job.strategy is not None:
        arguments["strategy"] = job.strategy
    elif built is None or "mesh" in said:
        arguments["strategy"] = strategy_for(job.mesh)
    if job.remat is not None or built is None:
        arguments["remat"] = job.remat or _usual_remat(job)
    if "loss" in job.parts:
        arguments.pop("loss_chunks", None)
    return arguments


def _usual_remat(job: Job) -> str | None:
    return REMAT_BY_DEFAULT if job.model_flops is not None else None


def _shape(job: Job) -> dict[str, Any]:
    """Return batch and sequence, where no shapes of a batch say them."""
    if "batch" in job.parts:
        return {}
    return {"batch_size": job.examples, "sequence_length": job.tokens_per_example}


def _resized(built: Workload, job: Job) -> Workload:
    """Return a builder's workload with the batch that the job states."""
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
    """Return the transformation, its schedule, and a note on settings that it leaves no room for.

    One given in Python goes first, then one that the job names, then the workload's own.
    """
    said = [name for name in OPTIMIZER_FIELDS if name in job.train.model_fields_set]
    given = job.parts.get("optimizer")
    if given is None and "optimizer" not in said and built is not None:
        given = built.optimizer
    if given is not None:
        note = f"{', '.join(said)}: no effect, the model brings an optimizer of its own"
        return given, None, note if said else None
    rate = job.train.learning_rate_schedule()
    return build_optimizer(job.train.optimizer_spec(), rate), rate, None


def _with_segments(
    shapes: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes with which document each token belongs to, and where in it."""
    tokens = shapes["inputs"]
    return {**shapes, "segment_ids": tokens, "positions": tokens}
