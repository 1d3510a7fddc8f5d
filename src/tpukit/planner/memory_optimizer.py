"""`MemoryOptimizer`: choose remat policies, and estimate the memory of a step."""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from rich.table import Table

from ..errors import ConfigError, TPUModelError, did_you_mean
from ..hardware import Slice
from ..hardware.catalog import CHIP_FOR_ESTIMATES
from ..hardware.prices import PriceBook
from ..hardware.tables import SliceListing
from ..job.job import Job
from ..models.defaults import TRAINING_SEQUENCE_LENGTH
from ..models.presets import get_preset, list_presets
from ..models.remat.policy import FULL, MINIMAL, NONE
from ..plain_data import JsonObject
from ..shown import MappedResult
from ..step.optimizer_spec import (
    MomentDtype,
    OptimizerName,
    OptimizerSpec,
    state_bytes_per_parameter,
)
from .batch_size import rising_memory
from .cost.memory_model import MemorySplit, MeshRoles, estimate_memory_bytes, rounds_first, split_of
from .cost.model_shape import ModelShape, shape_of

if TYPE_CHECKING:
    from ..models.transformer.config import TransformerConfig


Strategy = Literal["none", "normal", "aggressive"]
GIGABYTE = 1e9

Model = TypeVar("Model")


@dataclass(frozen=True)
class MemoryEstimate(MappedResult):
    """Memory of one chip by purpose, in GB (10⁹ bytes); also a mapping.

    Attributes:
        origin: "model" for a reference transformer, and for interpolation between two compiled
            batches of another model; "compiler" for a compiled batch.

    Example:
        >>> estimate["total_gb"], estimate.split.activations
    """

    split: MemorySplit
    chips: int
    remat: str
    origin: str = "model"

    def to_dict(self) -> JsonObject:
        """Return GB by purpose and in total, with their context."""
        amounts = {f"{name}_gb": float(v) / GIGABYTE for name, v in self.split.to_dict().items()}
        return {**amounts, "chips": self.chips, "remat": self.remat, "origin": self.origin}

    def __rich__(self) -> Table:
        table = Table("on one chip", "GB", title=f"estimated memory ({self.origin})")
        for name, amount in self.split.to_dict().items():
            table.add_row(name, f"{float(amount) / GIGABYTE:.2f}")
        return table


class MemoryOptimizer:
    """Chooses the remat policy of a model.

    Args:
        strategy: "none" keeps everything unless a switch below is set, "normal" keeps matmul
            results, "aggressive" keeps only layer inputs.
        enable_rematerialization: With "none", keep only matmul results.
        gradient_checkpointing: Keep only layer inputs, whatever the strategy.
        activation_checkpointing_layers: Layers per segment of which only the input is kept.

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
        self.policy = FULL if whole else MINIMAL if products else NONE

    @property
    def remat(self) -> str:
        """The remat policy, as in `Workload` and job files."""
        segments = self.policy != NONE and self.every > 1
        return f"{self.policy} every={self.every}" if segments else self.policy

    def optimize(self, model: Model) -> Model:
        """Return the model or workload with this remat policy.

        Args:
            model: A `Workload`, or any model that `enable_gradient_checkpointing` takes; values and
                gradients do not change.

        Raises:
            TPUModelError: It is a name or a configuration, which cannot run.
        """
        from ..models.remat.gradient_checkpointing import checkpoint_layers
        from ..models.remat.policy import RematPolicy
        from ..step.workload import Workload

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
        generation: str = CHIP_FOR_ESTIMATES,
        timeout_s: float = 1800.0,
        **workload: Any,
    ) -> MemoryEstimate:
        """Estimate the memory of a training step on one chip.

        For a reference transformer a formula gives the answer in milliseconds. Any other model is
        compiled, which takes seconds, also with a smaller batch. A larger batch never gets a
        smaller estimate: a power of two of examples per chip gets the largest compiled memory up to
        it, and sizes between two powers are interpolated (origin "model").

        Args:
            model: A preset, a `TransformerConfig`, a `Transformer`, a `Workload`, or any model that
                it takes.
            batch_size: Examples in a step over all chips.
            sequence_length: Tokens in an example.
            chips: Chips over which parameters and batch are sharded (fsdp).
            optimizer: "adamw", "lion", "adafactor" or "sgd".
            moment_dtype: Format of its moments: "float32", "bfloat16", or with adamw "int8".
            generation: Chip that the step of another model is compiled for.
            timeout_s: Time limit of that compile.
            **workload: Further keys of a `Job`, or arguments of `Workload` (loss, inputs, …), for
                that compile.

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
    """Return the compiler's memory of a job's step on one device."""
    from ..checker.compiling import lower_job
    from ..compiler.aot import run_request

    request = lower_job(job, remember=False)
    return split_of(run_request(request, until="memory", timeout_s=timeout_s).memory)


def find_transformer_config(model: object) -> "TransformerConfig | None":
    """Return the `TransformerConfig` of a name, a module or a workload; None if it has none."""
    from ..job.model_source import load_model
    from ..models.transformer.config import TransformerConfig

    config = load_model(model, {}) if isinstance(model, str) else getattr(model, "config", model)
    config = getattr(config, "config", config)  # a builder may return a workload
    return config if isinstance(config, TransformerConfig) else None


def transformer_config(model: object) -> "TransformerConfig":
    """Return the `TransformerConfig` of a reference transformer, however it is given.

    Raises:
        TPUModelError: It is not a reference transformer.
    """
    config = find_transformer_config(model)
    if config is None:
        raise TPUModelError(
            f"a {type(model).__name__} is no reference transformer, and its activations cannot be "
            "counted by a formula; compile it (compile_for, tpukit check) for the exact figure."
        )
    return config


ASSUMED = f"one sequence of {TRAINING_SEQUENCE_LENGTH:,} tokens a device, adamw, fsdp, full remat"


def largest_trained(where: Slice) -> str | None:
    """Return the preset with the most parameters whose training fits; None if none fits.

    `ASSUMED` describes the training settings; the memory is modelled, not compiled.
    """
    usable = where.chip.per_device(where.chip.hbm_usable_bytes).value
    if usable is None:
        return None
    for shape in _largest_first():
        length = min(TRAINING_SEQUENCE_LENGTH, shape.max_seq_len)
        needed = estimate_memory_bytes(
            shape,
            MeshRoles(fsdp=where.devices),
            per_device_batch=1,
            sequence_length=length,
            whole_copy=rounds_first(where.chip.name),
        )
        if needed.total <= usable:
            return shape.name
    return None


def list_slices(generation: str, book: PriceBook) -> SliceListing:
    """Return the slices of a generation with their prices and the largest preset each can train."""
    return SliceListing.of(generation, book, largest=largest_trained, assumed=ASSUMED)


@cache
def _largest_first() -> tuple[ModelShape, ...]:
    shapes = [shape_of(get_preset(name)) for name in list_presets()]
    return tuple(sorted(shapes, key=lambda shape: -shape.parameters))
