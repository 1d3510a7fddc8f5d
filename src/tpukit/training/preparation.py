"""From what the user said to what a loop needs: devices, batch, data and workload, all checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from ..errors import ConfigError
from ..job.job import DEFAULT_SEQUENCE_LENGTH
from ..job.train import Optimization, TrainingSettings
from ..models.presets import get_preset
from ..models.transformer.config import TransformerConfig
from ..records.throughput import Throughput
from ..step.optimizer.optimizer import build_optimizer
from ..step.optimizer.schedule import LearningRate
from ..step.workload import Workload
from .batches import data_share, look_ahead
from .data import TokenData, open_data
from .data.opening import as_array
from .gpu import workload_options


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """The model, and how it is to be computed; a `Workload` is taken as it is.

    Attributes:
        compute_dtype: Of matrix products and activations; None leaves the model's own.
        options: Further arguments of `Workload`.
    """

    model: Any
    compute_dtype: str | None
    options: Mapping[str, Any]

    def workload(self, **shape: Any) -> Workload:
        """The workload for a batch of this shape; entries that are None are left open."""
        given = {name: value for name, value in shape.items() if value is not None}
        if isinstance(self.model, Workload):
            return self.model.replace(**{**self.options, **given})
        model, options = self.model, dict(self.options)
        if isinstance(model, str):
            model = get_preset(model)
        if self.compute_dtype is not None:
            if isinstance(model, TransformerConfig):
                model = model.replace(dtype=self.compute_dtype)
                options = {**workload_options(model.n_layers), **options}
            elif self.compute_dtype != "float32":
                options["compute_dtype"] = self.compute_dtype
        return Workload(model, **{**options, **given})

    @property
    def transformer(self) -> TransformerConfig | None:
        """The reference transformer it is; None for somebody's own model."""
        model = self.model.model if isinstance(self.model, Workload) else self.model
        if isinstance(model, str):
            model = get_preset(model)
        return model if isinstance(model, TransformerConfig) else None

    def usual_length(self) -> int | None:
        """Tokens in an example where nobody says; None where the workload says it."""
        if isinstance(self.model, Workload) or "batch" in self.options:
            return None
        config = self.transformer
        longest = DEFAULT_SEQUENCE_LENGTH if config is None else config.max_seq_len
        return min(DEFAULT_SEQUENCE_LENGTH, longest)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything that is decided before anything is written or compiled."""

    work: Workload
    mesh: Any
    data: TokenData
    eval_data: TokenData | None
    share: tuple[int, int]
    learning_rate: LearningRate | None
    throughput: Throughput

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
        return {
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


def prepare(
    choice: ModelChoice,
    settings: TrainingSettings,
    *,
    mesh: Any,
    train_data: Any,
    eval_data: Any,
    batch_size: int | None,
    sequence_length: int | None,
    optimizer: optax.GradientTransformation | None,
    total_steps: int,
) -> Prepared:
    """Check everything against everything else.

    Raises:
        ConfigError: Something is missing.
        TPUValidationError: The data are not for this model, or not there.
    """
    shapes, train_data = _batch_shapes(choice, as_array(train_data), batch_size)
    if sequence_length is None:
        sequence_length = choice.usual_length() if shapes is None else _length(shapes)
    rate = None
    own = choice.model.optimizer if isinstance(choice.model, Workload) else None
    transformation = optimizer or own
    if transformation is None:
        rate = settings.learning_rate_over(total_steps)
        transformation = build_optimizer(settings.optimizer_spec(), rate)
    transformer = choice.transformer
    work = choice.workload(
        batch_size=batch_size,
        sequence_length=sequence_length,
        batch=shapes,
        optimizer=transformation,
        seed=settings.seed,
        z_loss=settings.z_loss or None,
    )
    if settings.packing == "documents" and shapes is None:
        work = work.replace(batch=_with_segments(work.batch_shapes()))
    # Rows are loaded whole, also where a ring splits their sequences.
    rows = next(iter(work.shardings(mesh).batch.values())).spec[:1]
    share = data_share(NamedSharding(mesh, PartitionSpec(*rows)), work.examples)
    how: dict[str, Any] = {
        "sequence_length": work.sequence_length,
        "batch_size": work.examples,
        "vocab_size": None if transformer is None else transformer.vocab_size,
        "tokenizer": settings.tokenizer,
        "text_key": settings.text_key,
        "packing": settings.packing,
        "process_index": share[0],
        "process_count": share[1],
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
    return Prepared(
        work=work,
        mesh=mesh,
        data=data,
        eval_data=held_out,
        share=share,
        learning_rate=rate,
        throughput=Throughput.of(work, list(mesh.devices.flat), peak_tflops=settings.peak_tflops),
    )


def _batch_shapes(
    choice: ModelChoice, source: Any, batch_size: int | None
) -> tuple[dict[str, jax.ShapeDtypeStruct] | None, Any]:
    """Shapes where only the data tell them (iterables of batches), and the data unread."""
    if source is None:
        raise ConfigError(
            "there is no data to train on; give train_data (--data, or data in train:)."
        )
    if isinstance(source, str | Path | np.ndarray):
        return None, source
    given = (
        choice.model.batch if isinstance(choice.model, Workload) else choice.options.get("batch")
    )
    if given is not None:
        return None, source
    shapes, whole = look_ahead(source)
    if batch_size is not None:
        # Each process may give its own rows; the workload is about all of them.
        shapes = {
            name: jax.ShapeDtypeStruct((batch_size, *shape.shape[1:]), shape.dtype)
            for name, shape in shapes.items()
        }
    return shapes, whole


def _length(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> int | None:
    """Tokens in an example, where the inputs are rows of token numbers."""
    inputs = shapes.get("inputs")
    if inputs is None or inputs.ndim != 2 or not np.issubdtype(inputs.dtype, np.integer):
        return None
    return inputs.shape[1]


def _with_segments(
    shapes: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.ShapeDtypeStruct]:
    tokens = shapes["inputs"]
    return {**shapes, "segment_ids": tokens, "positions": tokens}
