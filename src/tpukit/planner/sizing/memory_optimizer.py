"""`MemoryOptimizer`: trade recomputation for memory on a model, and say what a step will take."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from rich.table import Table

from ...errors import ConfigError, TPUModelError, did_you_mean
from ...runtime.mapped_result import MappedResult
from ...step.optimizer.spec import (
    MomentDtype,
    OptimizerName,
    OptimizerSpec,
    state_bytes_per_parameter,
)
from ..cost.memory_model import MemorySplit, MeshRoles, estimate_memory_bytes
from ..cost.model_shape import ModelShape, shape_of

if TYPE_CHECKING:
    from ...models.transformer.config import TransformerConfig

Strategy = Literal["none", "normal", "aggressive"]
GIGABYTE = 1e9

Model = TypeVar("Model")


@dataclass(frozen=True)
class MemoryEstimate(MappedResult):
    """Memory of one chip by purpose, in GB (10⁹ bytes); also a mapping. Origin: model.

    Example:
        >>> estimate["total_gb"], estimate.split.activations
    """

    split: MemorySplit
    chips: int
    remat: str

    def to_dict(self) -> dict[str, Any]:
        """GB by purpose and in total, and what they are about."""
        amounts = {f"{name}_gb": float(v) / GIGABYTE for name, v in self.split.to_dict().items()}
        return {**amounts, "chips": self.chips, "remat": self.remat, "origin": "model"}

    def __rich__(self) -> Table:
        table = Table("on one chip", "GB", title="estimated memory (model)")
        for name, amount in self.split.to_dict().items():
            table.add_row(name, f"{float(amount) / GIGABYTE:.2f}")
        return table


class MemoryOptimizer:
    """Chooses what the backward pass keeps.

    Args:
        strategy: "none" keeps everything unless a switch below says otherwise, "normal" keeps
            the products with weights, "aggressive" only the inputs of layers.
        enable_rematerialization: With "none": keep the products with weights only.
        gradient_checkpointing: Keep only the inputs of layers, whatever the strategy.
        activation_checkpointing_layers: Keep the input of every so many layers.

    Example:
        >>> optimizer = MemoryOptimizer(strategy="aggressive", activation_checkpointing_layers=2)
        >>> optimizer.estimate_memory("llama3.1-8b", batch_size=8, sequence_length=2048)["total_gb"]
    """

    def __init__(
        self,
        strategy: Strategy = "normal",
        enable_rematerialization: bool = False,
        gradient_checkpointing: bool = False,
        activation_checkpointing_layers: int = 1,
    ) -> None:
        if strategy not in get_args(Strategy):
            raise ConfigError(
                f"strategy '{strategy}' is not one of {', '.join(get_args(Strategy))}."
                + did_you_mean(str(strategy), get_args(Strategy))
            )
        if activation_checkpointing_layers < 1:
            raise ConfigError(
                f"activation_checkpointing_layers={activation_checkpointing_layers}; a segment "
                "has at least 1 layer."
            )
        self.strategy: Strategy = strategy
        self.every = activation_checkpointing_layers
        whole = gradient_checkpointing or strategy == "aggressive"
        products = enable_rematerialization or strategy == "normal"
        self.policy = "full" if whole else "minimal" if products else "none"

    @property
    def remat(self) -> str:
        """The remat policy as `Workload` and job files spell it."""
        segments = self.policy != "none" and self.every > 1
        return f"{self.policy} every={self.every}" if segments else self.policy

    def optimize(self, model: Model) -> Model:
        """The same model, or workload, with this remat.

        Args:
            model: A `Workload`, or whatever `enable_gradient_checkpointing` takes; values and
                gradients stay as they are.

        Raises:
            TPUModelError: It is a name or a configuration, which does not run by itself.
        """
        from ...models.remat.gradient_checkpointing import checkpoint_layers
        from ...models.remat.policy import RematPolicy
        from ...step.workload import Workload

        if isinstance(model, Workload):
            return cast("Model", model.replace(remat=self.remat))
        return checkpoint_layers(model, RematPolicy.parse(self.remat))

    def estimate_memory(
        self,
        model: object,
        batch_size: int,
        sequence_length: int,
        *,
        chips: int = 1,
        optimizer: OptimizerName = "adamw",
        moment_dtype: MomentDtype = "float32",
    ) -> MemoryEstimate:
        """What a training step takes on one chip, in milliseconds and without compiling.

        Args:
            model: A preset's name, a `TransformerConfig`, a `Transformer` or a `Workload` of one.
            batch_size: Examples in a step over all chips.
            sequence_length: Tokens in an example.
            chips: Over which parameters and batch are split (fsdp).
            optimizer: "adamw", "lion", "adafactor" or "sgd".
            moment_dtype: Of its moments: "float32", "bfloat16", or with adamw "int8".

        Raises:
            ConfigError: There is no such optimizer, or it has no moments of that format.
            TPUModelError: It is a user's own model, whose activations no formula knows.
        """
        shape = transformer_shape(model)
        spec = OptimizerSpec(name=optimizer, moment_dtype=moment_dtype)
        split = estimate_memory_bytes(
            shape,
            MeshRoles(fsdp=chips),
            per_device_batch=batch_size / chips,
            sequence_length=sequence_length,
            remat=self.policy,
            remat_every=self.every,
            optimizer_bytes=state_bytes_per_parameter(spec, shape.parameter_shapes),
        )
        return MemoryEstimate(split, chips, self.remat)


def transformer_shape(model: object) -> ModelShape:
    """The shape of a reference transformer, however it is named.

    Raises:
        TPUModelError: It is not one.
    """
    return shape_of(transformer_config(model))


def transformer_config(model: object) -> "TransformerConfig":
    """A reference transformer, however it is named.

    Raises:
        TPUModelError: It is not one.
    """
    from ...job.model_source import load_model
    from ...models.transformer.config import TransformerConfig

    config = load_model(model, {}) if isinstance(model, str) else getattr(model, "config", model)
    config = getattr(config, "config", config)  # a builder may return a workload
    if not isinstance(config, TransformerConfig):
        raise TPUModelError(
            f"a {type(model).__name__} is no reference transformer, and its activations cannot be "
            "counted by a formula; compile it (compile_for, tpukit check) for the exact figure."
        )
    return config
