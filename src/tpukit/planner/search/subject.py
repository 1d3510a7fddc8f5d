"""The model a plan is made for: by name, as a configuration, or as a workload."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import TPUModelError
from ...frameworks import is_instance_of
from ...hardware.formats import BFLOAT16
from ...job.job import DEFAULT_SEQUENCE_LENGTH
from ...job.model_source import load_model
from ...job.train import LoraSettings
from ...models.lora.targets import thin_products
from ...models.presets import list_presets, presets
from ...models.transformer.accounting import count_flops_per_token
from ...models.transformer.config import OPERANDS, TransformerConfig
from ...runtime.ranges import Range
from ..cost.model_shape import ModelShape, shape_of

# As most published runs have it, where the model can read that much.
USUAL_SEQUENCE_LENGTH = 8192
_ANY_PRESET = "tiny"
QUANTIZED_ARRAYS = "quantized.safetensors"  # quantization/files/model_files.py, which imports jax


@dataclass(frozen=True)
class PlannedModel:
    """What is trained.

    Attributes:
        name: As `Job.model` wants it; `changes` are its `model_changes`.
        known: Its dimensions; None for a user's own model, which only the compiler can judge.
        sequence_length: Tokens in an example; 1 where examples are not made of tokens.
        fixed_examples: Examples of a step, where the workload has its batch already.
        remat: As its builder chose it, where a builder did.
        given: The model itself, where Python gave one that has no name.
        lora: What alone is trained beside it; None where all of it is.
        weights: The folder that holds its weights, where a name led to one.
    """

    name: str
    changes: dict[str, Any]
    known: TransformerConfig | None = field(repr=False)
    sequence_length: int
    fixed_examples: int | None = None
    remat: str = "full"
    given: object = field(default=None, repr=False)
    lora: LoraSettings | None = None
    weights: Path | None = None

    @property
    def config(self) -> TransformerConfig:
        """The model's dimensions, where they are needed."""
        if self.known is None:
            raise TPUModelError(f"{self.name} says no dimensions; only the compiler can judge it.")
        return self.known

    @property
    def precision(self) -> str:
        """The format of its products, as its builder chose it."""
        matmul = "dtype" if self.known is None else self.known.matmul
        return str(OPERANDS.get(matmul, BFLOAT16).peak)

    @property
    def shape(self) -> ModelShape:
        """The model's dimensions as numbers."""
        if self.lora is None:
            return shape_of(self.config)
        return shape_of(self.config, self.lora.spec(), stored_bytes=self.stored_bytes)

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of its weights in a quantized folder; None where they lie in none."""
        quantized = None if self.weights is None else self.weights / QUANTIZED_ARRAYS
        return quantized.stat().st_size if quantized is not None and quantized.is_file() else None

    @property
    def fine_tuning(self) -> dict[str, Any]:
        """Keys of a job's `train:` section that ask for it; none where all is trained."""
        if self.lora is None:
            return {}
        source = {} if self.weights is None else {"init_from": str(self.weights)}
        return {**source, "lora": self.lora.model_dump(exclude_unset=True)}

    @property
    def flops_per_token(self) -> float:
        """FLOPs of a training step per token, nothing recomputed."""
        thin = None if self.lora is None else thin_products(self.lora.spec(), self.config)
        length = self.sequence_length
        return count_flops_per_token(self.config, length, thin_products=thin).total


def read_subject(
    model: Any, *, sequence_length: int | None, lora: LoraSettings | None = None
) -> PlannedModel:
    """The subject that a name, a `TransformerConfig`, a `Workload` or any model stands for.

    Args:
        model: The model.
        sequence_length: Tokens in an example.
        lora: What alone is trained beside it.

    Raises:
        TPUModelError: It is no model of a known kind.
        ConfigError: The sequence is longer than the model reads.
    """
    name: str | None = model if isinstance(model, str) else None
    found: Any = model if name is None else load_model(name, {}, values=False)
    config = found if isinstance(found, TransformerConfig) else getattr(found, "config", None)
    if not isinstance(config, TransformerConfig):
        return replace(_own_model(name, found, sequence_length), lora=lora)
    fixed: int | None = None
    if not isinstance(found, TransformerConfig):  # a workload has chosen both already
        sequence_length = sequence_length if sequence_length is not None else found.sequence_length
        fixed = int(found.examples)
    if sequence_length is None:
        sequence_length = min(USUAL_SEQUENCE_LENGTH, config.max_seq_len)
    unit = f"tokens, which is what {config.name} reads (max_seq_len)"
    length = Range(1, config.max_seq_len).check_whole("sequence", sequence_length, unit=unit)
    changes: dict[str, Any] = {}
    weights = _folder_of(name)
    if name is None:
        name, changes = _as_preset(config)
    return PlannedModel(name, changes, config, length, fixed, lora=lora, weights=weights)


def _folder_of(name: str | None) -> Path | None:
    """The folder that a name is of, where weights lie in it."""
    folder = None if name is None else Path(name).expanduser()
    if folder is None or not folder.is_dir():
        return None
    return folder if any(folder.glob("*.safetensors")) else None


def _own_model(name: str | None, found: Any, sequence_length: int | None) -> PlannedModel:
    """A user's own model, about which the compiler is asked: a workload, or a bare model."""
    from ...models.adapters.registry import kind_of  # imports jax, which arithmetic does without

    given = found if name is None else None
    shown = name or getattr(found, "__name__", type(found).__name__)
    if not hasattr(found, "jit_train_step"):
        kind_of(found)  # refuses what is no model
        length = sequence_length or DEFAULT_SEQUENCE_LENGTH
        remat = "full" if is_instance_of(found, "torch.nn") else "none"
        return PlannedModel(shown, {}, None, length, remat=remat, given=given)
    return PlannedModel(
        shown,
        {},
        None,
        found.sequence_length or 1,
        fixed_examples=int(found.examples),
        remat=str(found.remat),
        given=given,
    )


def _as_preset(config: TransformerConfig) -> tuple[str, dict[str, Any]]:
    """A preset's name and the fields to change in it, which together are `config`."""
    name = config.name if config.name in list_presets() else _ANY_PRESET
    usual = presets()[name].config.to_dict()
    wanted = config.to_dict()
    changed = {key: value for key, value in wanted.items() if value != usual[key]}
    changed.pop("name", None)  # a label, and not one of the dimensions
    return name, changed
