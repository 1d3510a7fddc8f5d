"""The model of a plan, from a name, a configuration or a workload."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import TPUModelError
from ...frameworks import is_instance_of
from ...hardware.formats import BFLOAT16
from ...job.job import Job
from ...job.train import LoraSettings
from ...models.defaults import PLANNED_SEQUENCE_LENGTH, TRAINING_SEQUENCE_LENGTH
from ...models.lora.spec import lora_multiply_adds
from ...models.presets import list_presets, presets
from ...models.remat.policy import FULL, NONE
from ...models.transformer.accounting import count_flops_per_token
from ...models.transformer.config import OPERANDS, TransformerConfig
from ...plain_data import JsonObject
from ...runtime.ranges import Range
from ..cost.model_shape import ModelShape, shape_of

_ANY_PRESET = "tiny"
QUANTIZED_ARRAYS = "quantized.safetensors"  # quantization/files/model_files.py, which imports jax


@dataclass(frozen=True)
class PlannedModel:
    """The model that is trained.

    Attributes:
        name: Name for reports.
        job: A job of the model alone; every job of a plan is made from it, so that a builder runs
            once.
        known: The configuration of a reference transformer; None for any other model, which must be
            compiled.
        sequence_length: Tokens per example; 1 if examples do not consist of tokens.
        fixed_examples: Examples per step of a workload that has its batch already; otherwise None.
        remat: The remat policy of its builder.
        lora: LoRA settings; None if all parameters are trained.
        weights: Folder with its weights, if the name is one.
    """

    name: str
    job: Job = field(repr=False)
    known: TransformerConfig | None = field(repr=False)
    sequence_length: int
    fixed_examples: int | None = None
    remat: str = FULL
    lora: LoraSettings | None = None
    weights: Path | None = None

    @property
    def config(self) -> TransformerConfig:
        """The configuration of the model."""
        if self.known is None:
            raise TPUModelError(f"{self.name} says no dimensions; only the compiler can judge it.")
        return self.known

    @property
    def precision(self) -> str:
        """Number format of its matmuls."""
        matmul = "dtype" if self.known is None else self.known.matmul
        return str(OPERANDS.get(matmul, BFLOAT16).peak)

    @cached_property
    def shape(self) -> ModelShape:
        """The model's dimensions as numbers."""
        if self.lora is None:
            return shape_of(self.config)
        return shape_of(self.config, self.lora.spec(), stored_bytes=self.stored_bytes)

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of its weights in a quantized folder; None without one."""
        quantized = None if self.weights is None else self.weights / QUANTIZED_ARRAYS
        return quantized.stat().st_size if quantized is not None and quantized.is_file() else None

    @property
    def fine_tuning(self) -> JsonObject:
        """The `train:` settings of fine-tuning; empty if all parameters are trained."""
        if self.lora is None:
            return {}
        source = {} if self.weights is None else {"init_from": str(self.weights)}
        return {**source, "lora": self.lora.model_dump(exclude_unset=True)}

    @property
    def flops_per_token(self) -> float:
        """FLOPs of a training step per token, without recomputation."""
        thin = None if self.lora is None else lora_multiply_adds(self.lora.spec(), self.config)
        length = self.sequence_length
        return count_flops_per_token(self.config, length, lora_multiply_adds=thin).total


def read_subject(
    model: Any, *, sequence_length: int | None, lora: LoraSettings | None = None
) -> PlannedModel:
    """Return the model of a plan from a name, a `TransformerConfig`, a `Workload` or any model.

    Args:
        model: The model.
        sequence_length: Tokens in an example.
        lora: LoRA settings.

    Raises:
        TPUModelError: It is not a supported model.
        ConfigError: The sequence is longer than the model's maximum.
    """
    name: str | None = model if isinstance(model, str) else None
    job = Job(model=model)
    found = job.load_model()
    config = found if isinstance(found, TransformerConfig) else getattr(found, "config", None)
    if not isinstance(config, TransformerConfig):
        return replace(_own_model(name, job, sequence_length), lora=lora)
    fixed: int | None = None
    if not isinstance(found, TransformerConfig):  # a workload has chosen both already
        sequence_length = sequence_length if sequence_length is not None else found.sequence_length
        fixed = int(found.examples)
    if sequence_length is None:
        sequence_length = min(PLANNED_SEQUENCE_LENGTH, config.max_seq_len)
    unit = f"tokens, which is what {config.name} reads (max_seq_len)"
    length = Range(1, config.max_seq_len).check_whole("sequence", sequence_length, unit=unit)
    weights = _folder_of(name)
    if name is None:
        name, changes = _as_preset(config)
        job = Job(model=name, model_changes=changes)
    return PlannedModel(name, job, config, length, fixed, lora=lora, weights=weights)


def _folder_of(name: str | None) -> Path | None:
    """Return the folder of a name if it contains weights."""
    folder = None if name is None else Path(name).expanduser()
    if folder is None or not folder.is_dir():
        return None
    return folder if any(folder.glob("*.safetensors")) else None


def _own_model(name: str | None, job: Job, sequence_length: int | None) -> PlannedModel:
    """Return a user's model that must be compiled: a workload or a bare model."""
    from ...models.adapters.registry import kind_of  # imports jax, which arithmetic does without

    found = job.load_model()
    shown = name or getattr(found, "__name__", type(found).__name__)
    if not hasattr(found, "jit_train_step"):
        kind_of(found)  # refuses what is no model
        length = sequence_length or TRAINING_SEQUENCE_LENGTH
        remat = FULL if is_instance_of(found, "torch.nn") else NONE
        return PlannedModel(shown, job, None, length, remat=remat)
    return PlannedModel(
        shown,
        job,
        None,
        found.sequence_length or 1,
        fixed_examples=int(found.examples),
        remat=str(found.remat),
    )


def _as_preset(config: TransformerConfig) -> tuple[str, JsonObject]:
    """Return a preset and the fields to change in it to get `config`."""
    name = config.name if config.name in list_presets() else _ANY_PRESET
    usual = presets()[name].config.to_dict()
    wanted = config.to_dict()
    changed = {key: value for key, value in wanted.items() if value != usual[key]}
    changed.pop("name", None)  # a label, and not one of the dimensions
    return name, changed
