"""`MemoryOptimizer`: trade recomputation for memory on a model, and say what a step will take."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from rich.table import Table

from ...errors import ConfigError, TPUModelError, did_you_mean
from ...hardware import Slice
from ...job.job import Job
from ...runtime.mapped_result import MappedResult
from ...step.optimizer.spec import (
    MomentDtype,
    OptimizerName,
    OptimizerSpec,
    state_bytes_per_parameter,
)
from ..cost.compiled_memory import split_of
from ..cost.memory_model import MemorySplit, MeshRoles, estimate_memory_bytes
from ..cost.model_shape import shape_of
from .rising_memory import rising_memory

if TYPE_CHECKING:
    from ...models.transformer.config import TransformerConfig

Strategy = Literal["none", "normal", "aggressive"]
GIGABYTE = 1e9

Model = TypeVar("Model")


@dataclass(frozen=True)
class MemoryEstimate(MappedResult):
    """Memory of one chip by purpose, in GB (10⁹ bytes); also a mapping.

    Attributes:
        origin: "model" of a reference transformer, whose buffers a formula knows, and between two
            compiled batches of another model; "compiler" of a compiled batch.

    Example:
        >>> estimate["total_gb"], estimate.split.activations
    """

    split: MemorySplit
    chips: int
    remat: str
    origin: str = "model"

    def to_dict(self) -> dict[str, Any]:
        """GB by purpose and in total, and what they are about."""
        amounts = {f"{name}_gb": float(v) / GIGABYTE for name, v in self.split.to_dict().items()}
        return {**amounts, "chips": self.chips, "remat": self.remat, "origin": self.origin}

    def __rich__(self) -> Table:
        table = Table("on one chip", "GB", title=f"estimated memory ({self.origin})")
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
        generation: str = "v6e",
        timeout_s: float = 1800.0,
        **workload: Any,
    ) -> MemoryEstimate:
        """What a training step takes on one chip.

        Of a reference transformer a formula says it in milliseconds. No formula knows the
        activations of any other model, so its step is compiled, which takes seconds, with a
        smaller batch too. A larger batch never gets a smaller estimate: a power of two of examples
        per chip gets the largest of the compiler's figures up to it, and a size between two powers
        lies on the line between them (origin "model").

        Args:
            model: A preset's name, a `TransformerConfig`, a `Transformer`, or any model that
                `Workload` takes, and a `Workload`.
            batch_size: Examples in a step over all chips.
            sequence_length: Tokens in an example.
            chips: Over which parameters and batch are split (fsdp).
            optimizer: "adamw", "lion", "adafactor" or "sgd".
            moment_dtype: Of its moments: "float32", "bfloat16", or with adamw "int8".
            generation: The chips that another model's step is compiled for.
            timeout_s: Of that compile.
            **workload: Of that step: further keys of a `Job` or arguments of `Workload`
                (loss, inputs, …).

        Raises:
            ConfigError: There is no such optimizer, or it has no moments of that format.
            XLACompilationError: The compiler refused the step.
        """
        spec = OptimizerSpec(name=optimizer, moment_dtype=moment_dtype)
        config = find_transformer_config(model)
        if config is None:
            where = Slice.of(generation, chips=chips)
            moments = {"optimizer": optimizer, "moment_dtype": moment_dtype}

            def compile_batch(examples: int) -> MemorySplit:
                shape = {"batch_size": examples, "sequence_length": sequence_length}
                job = Job.of(
                    model,
                    on=str(where),
                    mesh={"fsdp": -1},
                    remat=self.remat,
                    train=moments,
                    **{**shape, **workload},
                )
                return _compiled_split(job, timeout_s)

            if batch_size < chips or batch_size % chips:
                split, is_compiled = compile_batch(batch_size), True
            else:
                split, is_compiled = rising_memory(
                    lambda size: compile_batch(size * chips), batch_size // chips
                )
            origin = "compiler" if is_compiled else "model"
            return MemoryEstimate(split, chips, self.remat, origin)
        shape = shape_of(config)
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


def _compiled_split(job: Job, timeout_s: float) -> MemorySplit:
    """What the compiler plans for a job's step on one device."""
    from ...checker.compiling import lower_job
    from ...compiler.aot import run_request

    request = lower_job(job, remember=False)
    return split_of(run_request(request, until="memory", timeout_s=timeout_s).memory)


def find_transformer_config(model: object) -> "TransformerConfig | None":
    """Return the reference transformer that a name, a module or a workload is, or None."""
    from ...job.model_source import load_model
    from ...models.transformer.config import TransformerConfig

    config = load_model(model, {}) if isinstance(model, str) else getattr(model, "config", model)
    config = getattr(config, "config", config)  # a builder may return a workload
    return config if isinstance(config, TransformerConfig) else None


def transformer_config(model: object) -> "TransformerConfig":
    """A reference transformer, however it is named.

    Raises:
        TPUModelError: It is not one.
    """
    config = find_transformer_config(model)
    if config is None:
        raise TPUModelError(
            f"a {type(model).__name__} is no reference transformer, and its activations cannot be "
            "counted by a formula; compile it (compile_for, tpukit check) for the exact figure."
        )
    return config
