"""Everything that a run decides before it writes or compiles anything.

The job is resolved for the devices here, its step is built, its data are opened and checked. The
prediction of an earlier `tpukit check` of the same job is looked up; nothing is compiled.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import dtypes
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..checker.compiling import known_compile
from ..errors import ConfigError, TPUError
from ..hardware import Figure
from ..job.job import Job
from ..job.model_source import is_own_model
from ..job.step import build_step
from ..job.train import Optimization, TrainingSettings
from ..parallel.mesh.axes import count_batch_ways
from ..parallel.mesh.mesh import axis_sizes
from ..step.optimizer_spec import LearningRate
from ..step.workload import Workload
from .batches import data_share, look_ahead
from .data import TokenData, open_data
from .data.opening import DataSource, as_array
from .data.sources import batch_size_parameter, named_data
from .data.tables import ArrayTable, ExampleShape, ImageTable
from .data.tokenizer import tokenizer_of
from .throughput import Throughput


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run before its first write: the one object that session and loop work from.

    Attributes:
        job: The job on the devices here, with its batch stated.
        share: Index of this process's share of a batch, and the number of shares.
        learning_rate: The schedule; None where the model brings its own optimizer.
        tokenizer: The tokenizer of the data, if known.
        source: The model's name in its job, such as "net.py:build"; None for an object.
    """

    job: Job
    work: Workload
    mesh: Mesh
    data: TokenData
    eval_data: TokenData | None
    share: tuple[int, int]
    learning_rate: LearningRate | None
    throughput: Throughput
    notes: tuple[str, ...]
    tokenizer: str | None
    source: str | None

    @property
    def settings(self) -> TrainingSettings:
        """The job's `train:` section."""
        return self.job.train

    @property
    def total_steps(self) -> int:
        """Steps of the run, those of earlier attempts included."""
        assert self.settings.steps is not None  # the trainer refuses a job without steps
        return self.settings.steps

    @property
    def headline(self) -> str:
        """One line on what is about to be trained."""
        about, work, length = self.throughput, self.work, self.work.sequence_length
        size = (
            f"{work.examples} examples" if length is None else f"{work.examples} x {length} tokens"
        )
        devices = f"{about.devices} {about.device_kind}" + ("s" if about.devices > 1 else "")
        model = work.to_dict()
        return (
            f"training {model['model']} ({model['parameters']:,} parameters) on {devices}: "
            f"{self.total_steps:,} steps of {size}"
        )

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The values that make a run this run; continuing with others is refused."""
        settings, config, model = self.settings, self.work.config, self.work.to_dict()
        data, spec, lora = self.data.describe(), settings.optimizer_spec(), self.work.lora
        own_optimizer = self.learning_rate is None
        tuning: dict[str, Any] = {} if lora is None else {"lora": lora.to_dict()}
        if settings.init_from is not None:
            tuning["init_from"] = settings.init_from
        return {
            **tuning,
            "model": model["model"] if config is None else config.to_dict(),
            "parameters": model["parameters"],
            "batch_size": self.work.examples,
            "sequence_length": self.work.sequence_length,
            "seed": settings.seed,
            "data": data.fingerprint or data.kind,
            "packing": settings.packing,
            "optimizer": "given as an optax transformation" if own_optimizer else spec.name,
            "moment_dtype": None if own_optimizer else spec.moment_dtype,
        }

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The settings that may change when a run continues; each change is reported."""
        fixed = ("optimizer", "moment_dtype", "precision")  # they are part of the identity
        names = [name for name in Optimization.model_fields if name not in fixed]
        values = self.settings.model_dump(mode="json", include=set(names))
        if self.learning_rate is None:
            values = {"z_loss": values["z_loss"]}
        return {
            **values,
            "on_bad_loss": self.settings.on_bad_loss,
            "microbatches": self.work.microbatches,
        }


def prepare(
    job: Job, *, mesh: Mesh, train_data: DataSource | None, eval_data: DataSource | None
) -> PreparedRun:
    """Build a job's step on a mesh, open its data, and check one against the other.

    Raises:
        ConfigError: A setting is missing.
        TPUValidationError: The data are missing, or do not fit the model.
    """
    if train_data is None:
        raise ConfigError(
            "there is no data to train on; give train_data (--data, or data in train:)."
        )
    here, data_source = _resolve(job, train_data, axis_sizes(mesh))
    settings = here.train
    step = build_step(here)
    work, config = step.work, step.work.config
    # Rows are loaded whole, also where a ring splits their sequences.
    rows = next(iter(work.shardings(mesh).batch.values())).spec[:1]
    share = data_share(NamedSharding(mesh, PartitionSpec(*rows)), work.examples)
    how: dict[str, Any] = {
        "sequence_length": work.sequence_length,
        "batch_size": work.examples,
        "vocab_size": None if config is None else config.vocab_size,
        "tokenizer": settings.tokenizer,
        "text_key": settings.text_key,
        "packing": settings.packing,
        "process_index": share[0],
        "process_count": share[1],
        "num_workers": settings.num_workers,
        "prefetch": settings.prefetch,
        "seed": settings.seed,
        "shapes": {
            name: ExampleShape(entry.shape[1:], np.dtype(entry.dtype))
            for name, entry in work.batch_shapes().items()
        },
    }
    data = open_data(data_source, shuffle=settings.shuffle, num_epochs=settings.epochs, **how)
    held_out = None
    if eval_data is not None:
        held_out = open_data(eval_data, shuffle=False, num_epochs=1, **how)
    return PreparedRun(
        job=here,
        work=work,
        mesh=mesh,
        data=data,
        eval_data=held_out,
        share=share,
        learning_rate=step.learning_rate,
        throughput=Throughput.of(work, list(mesh.devices.flat), peak_tflops=settings.peak_tflops),
        notes=step.notes,
        tokenizer=settings.tokenizer or tokenizer_of(data_source, settings.init_from),
        source=job.model if isinstance(job.model, str) else None,
    )


def _resolve(job: Job, source: Any, mesh: Mapping[str, int]) -> tuple[Job, Any]:
    """Return the job on the devices here, and the data that a name stands for, unread.

    The user's model is built, so that its builder runs once. The batch size comes from the job, a
    workload or the batches themselves; otherwise each device that shares a batch gets one example
    per micro-batch.
    """
    model, parts = job.model, dict(job.parts)
    if isinstance(model, str) and is_own_model(model):
        model = job.load_model(values=True)
    workload = model if isinstance(model, Workload) else None
    has_shapes = "batch" in parts or (workload is not None and workload.batch is not None)
    least = count_batch_ways(mesh) * job.microbatches
    batch_size = job.batch_size
    if batch_size is None and job.on is not None:  # the batch of the planned mesh
        batch_size = job.batch_ways * job.microbatches if workload is None else workload.examples
    parameter = batch_size_parameter(source)
    stated = batch_size or (None if workload is None else workload.examples)
    if parameter is not None and parameter.default is parameter.empty and stated is None:
        stated = batch_size = least
    data = as_array(
        named_data(
            source,
            batch_size=stated,
            seed=job.train.seed,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
    )
    shapes: dict[str, jax.ShapeDtypeStruct] | None = None
    if isinstance(data, ArrayTable | ImageTable):
        if workload is None or workload.batch is None:
            size = batch_size or least
            shapes = {
                name: jax.ShapeDtypeStruct((size, *row.shape), dtypes.canonicalize_dtype(row.dtype))
                for name, row in data.shapes.items()
            }
    elif not has_shapes and not isinstance(data, str | Path | np.ndarray):
        shapes, data = look_ahead(data)
        if batch_size is not None:
            # Each process may give its own rows; the workload is about all of them.
            shapes = {
                name: jax.ShapeDtypeStruct((batch_size, *shape.shape[1:]), shape.dtype)
                for name, shape in shapes.items()
            }
    elif not has_shapes and workload is None and batch_size is None:
        batch_size = least
    changes: dict[str, Any] = {"model": model} if model is not job.model else {}
    if shapes is not None:
        parts["batch"] = shapes
        changes["sequence_length"] = job.sequence_length or _sequence_length(shapes)
    return job.replace(changes, on=None, mesh=mesh, batch_size=batch_size, parts=parts), data


def _sequence_length(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> int | None:
    """Return the tokens per example, where the inputs are rows of token numbers."""
    inputs = shapes.get("inputs")
    if inputs is None or inputs.ndim != 2 or not np.issubdtype(inputs.dtype, np.integer):
        return None
    return inputs.shape[1]


def predicted_step(job: Job) -> Figure:
    """Return the step time that the last check of the same job predicted, or a missing figure."""
    if job.on is None:
        return Figure.missing("s", "the job names no slice")
    if not isinstance(job.model, str) or job.parts:
        return Figure.missing("s", "the model was given in Python, so no check can be found again")
    compiled = known_compile(job)
    if compiled is None:
        return Figure.missing("s", f"not checked yet: tpukit check … --on {job.on}")
    if not compiled.fits:
        return Figure.missing("s", f"by the last check, the job does not fit on {job.on}")
    try:
        prediction = compiled.predict(
            tokens_per_step=job.tokens_per_step,
            model_flops=job.model_flops,
            compile_kernels=False,  # the check did; training does not wait for a compiler
        )
    except TPUError as error:
        return Figure.missing("s", str(error))
    source = f"timeline of an offline compile for {job.on}"
    return Figure(prediction.step_time_s, "s", "model", source)
