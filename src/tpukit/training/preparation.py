"""From what the user said to what a loop needs: devices, batch, data and workload, all checked.

What an earlier `tpukit check` of the same job predicted is looked up; nothing is compiled.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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
from ..job.model_source import is_own_model, load_model
from ..job.step import build_step
from ..job.train import Optimization, TrainingSettings
from ..parallel.mesh.axes import count_batch_ways
from ..parallel.mesh.mesh import axis_sizes
from ..records.throughput import Throughput
from ..step.optimizer.spec import LearningRate
from ..step.workload import Workload
from .batches import data_share, look_ahead
from .data import TokenData, open_data
from .data.opening import as_array
from .data.sources import batch_size_parameter, named_data
from .data.tables import ArrayTable, ExampleShape, ImageTable
from .data.tokenizer_files import tokenizer_of


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """Everything that is decided before anything is written or compiled.

    Attributes:
        tokenizer: What the data were made into tokens with, where that is known.
        source: The name of the model in its job, such as "net.py:build"; None for an object.
    """

    work: Workload
    mesh: Any
    data: TokenData
    eval_data: TokenData | None
    share: tuple[int, int]
    learning_rate: LearningRate | None
    throughput: Throughput
    notes: tuple[str, ...]
    tokenizer: str | None = None
    source: str | None = None

    def headline(self, total_steps: int) -> str:
        """What is about to be trained, in one line."""
        about, work, length = self.throughput, self.work, self.work.sequence_length
        size = (
            f"{work.examples} examples" if length is None else f"{work.examples} x {length} tokens"
        )
        devices = f"{about.devices} {about.device_kind}" + ("s" if about.devices > 1 else "")
        own = work.to_dict()
        return (
            f"training {own['model']} ({own['parameters']:,} parameters) on {devices}: "
            f"{total_steps:,} steps of {size}"
        )

    def identity(self, settings: TrainingSettings) -> dict[str, Any]:
        """What makes a run this run and no other: going on with something else is refused."""
        about = self.data.describe()
        config = self.work.config
        own = self.work.to_dict()
        spec = settings.optimizer_spec()
        given = self.learning_rate is None
        lora = self.work.lora
        tuning: dict[str, Any] = {} if lora is None else {"lora": lora.to_dict()}
        if settings.init_from is not None:
            tuning["init_from"] = settings.init_from
        return {
            **tuning,
            "model": own["model"] if config is None else config.to_dict(),
            "parameters": own["parameters"],
            "batch_size": self.work.examples,
            "sequence_length": self.work.sequence_length,
            "seed": settings.seed,
            "data": about.fingerprint or about.kind,
            "packing": settings.packing,
            "optimizer": "given as an optax transformation" if given else spec.name,
            "moment_dtype": None if given else spec.moment_dtype,
        }

    def recipe(self, settings: TrainingSettings) -> dict[str, Any]:
        """How it is learnt: what a person may change when a run goes on, and is told about."""
        fixed = ("optimizer", "moment_dtype", "precision")  # they are part of the identity
        names = [name for name in Optimization.model_fields if name not in fixed]
        values = settings.model_dump(mode="json", include=set(names))
        if self.learning_rate is None:
            values = {"z_loss": values["z_loss"]}
        return {
            **values,
            "on_bad_loss": settings.on_bad_loss,
            "microbatches": self.work.microbatches,
        }


def prepare(job: Job, *, mesh: Mesh, train_data: Any, eval_data: Any) -> PreparedRun:
    """Build the step of a job on a mesh, open its data, and check each against the other.

    Raises:
        ConfigError: Something is missing.
        TPUValidationError: The data are not for this model, or not there.
    """
    if train_data is None:
        raise ConfigError(
            "there is no data to train on; give train_data (--data, or data in train:)."
        )
    settings = job.train
    named, train_data = _named(job, train_data, axis_sizes(mesh))
    sized, train_data = _with_batch(named, train_data, axis_sizes(mesh))
    step = build_step(sized)
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
        "shapes": {
            name: ExampleShape(one.shape[1:], np.dtype(one.dtype))
            for name, one in work.batch_shapes().items()
        },
    }
    data = open_data(
        train_data,
        seed=settings.seed,
        shuffle=settings.shuffle,
        num_epochs=settings.epochs,
        **how,
    )
    held_out = None
    if eval_data is not None:
        held_out = open_data(eval_data, seed=settings.seed, shuffle=False, num_epochs=1, **how)
    return PreparedRun(
        work=work,
        mesh=mesh,
        data=data,
        eval_data=held_out,
        share=share,
        learning_rate=step.learning_rate,
        throughput=Throughput.of(work, list(mesh.devices.flat), peak_tflops=settings.peak_tflops),
        notes=step.notes,
        tokenizer=settings.tokenizer or tokenizer_of(train_data, settings.init_from),
        source=job.model if isinstance(job.model, str) else None,
    )


def _named(job: Job, source: Any, mesh: Mapping[str, int]) -> tuple[Job, Any]:
    """Return the data that a name stands for, and the job.

    Its own model is built where the batch that it reads decides how data are read.
    """
    parameter = batch_size_parameter(source)
    if parameter is not None:
        job = _built(job)
    size = job.batch_size or (job.model.examples if isinstance(job.model, Workload) else None)
    if parameter is not None and parameter.default is parameter.empty and size is None:
        size = count_batch_ways(mesh) * job.microbatches
        job = job.replace(batch_size=size)
    found = as_array(
        named_data(
            source,
            batch_size=size,
            seed=job.train.seed,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
    )
    if isinstance(found, ArrayTable | ImageTable):
        job = _built(job)
        if not (isinstance(job.model, Workload) and job.model.batch is not None):
            size = job.batch_size or count_batch_ways(mesh) * job.microbatches
            shapes = {
                name: jax.ShapeDtypeStruct((size, *one.shape), dtypes.canonicalize_dtype(one.dtype))
                for name, one in found.shapes.items()
            }
            length = job.sequence_length or _length(shapes)
            job = job.replace(sequence_length=length, parts={**job.parts, "batch": shapes})
    return job, found


def _built(job: Job) -> Job:
    """Return the job with the model that its builder makes; others stay as they are named."""
    if not isinstance(job.model, str) or not is_own_model(job.model):
        return job
    return job.replace(model=load_model(job.model, job.model_changes))


def _with_batch(job: Job, source: Any, mesh: Mapping[str, int]) -> tuple[Job, Any]:
    """Return the job with the size of its batch stated, and the data unread.

    Iterables of batches tell their shapes themselves. Else, where nobody says how large a batch
    is, each device that shares it gets one example for every micro-batch.
    """
    built = isinstance(job.model, Workload)
    shaped = "batch" in job.parts or (built and job.model.batch is not None)
    if shaped or isinstance(source, str | Path | np.ndarray | ArrayTable | ImageTable | None):
        if shaped or built or job.batch_size is not None:
            return job, source
        return job.replace(batch_size=count_batch_ways(mesh) * job.microbatches), source
    shapes, whole = look_ahead(source)
    if job.batch_size is not None:
        # Each process may give its own rows; the workload is about all of them.
        shapes = {
            name: jax.ShapeDtypeStruct((job.batch_size, *shape.shape[1:]), shape.dtype)
            for name, shape in shapes.items()
        }
    length = job.sequence_length or _length(shapes)
    return job.replace(sequence_length=length, parts={**job.parts, "batch": shapes}), whole


def _length(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> int | None:
    """Return the tokens in an example, where the inputs are rows of token numbers."""
    inputs = shapes.get("inputs")
    if inputs is None or inputs.ndim != 2 or not np.issubdtype(inputs.dtype, np.integer):
        return None
    return inputs.shape[1]


def predicted_step(job: Job) -> Figure:
    """Return the seconds of a step by the last check of the same job, or why there are none."""
    if job.on is None:
        return Figure.missing("s", "the job names no slice")
    if not isinstance(job.model, str) or job.parts:
        return Figure.missing("s", "the model was given in Python, so no check can be found again")
    compiled = known_compile(job)
    if compiled is None:
        return Figure.missing("s", f"not checked yet: tpukit check … --on {job.on}")
    if not compiled.fits:
        return Figure.missing("s", f"the check says that it does not fit on {job.on}")
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
