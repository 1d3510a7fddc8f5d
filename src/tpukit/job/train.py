"""`TrainingSettings`: the `train:` section of a job file, and the same as Python arguments."""

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from ..models.lora.spec import DEFAULT_TARGETS, LoraSpec
from ..runtime.object_store import check_address
from ..step.optimizer_spec import (
    DEFAULT_LEARNING_RATE,
    NO_DECAY,
    LearningRate,
    MomentDtype,
    OptimizerName,
    OptimizerSpec,
    ScheduleName,
)
from .precision import ParamDtype, Precision
from .sections import (
    Count,
    Index,
    Part,
    Scale,
    Seconds,
    Section,
    Seed,
    Share,
    Weight,
    any_spelling,
)
from .settings import Settings


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Words = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]


# The second slash is missing where the address went through a `Path`.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def _path_or_address(value: Any) -> Any:
    return check_address(value) if isinstance(value, str) else value


def _path_or_bucket(value: Any) -> Any:
    if isinstance(value, str) and _ADDRESS.match(value) and not value.startswith("gs://"):
        raise ValueError("expected a local path or a gs:// address")
    return value


PathOrAddress = Annotated[str, BeforeValidator(_path_or_address)]
PathOrBucket = Annotated[str, BeforeValidator(_path_or_bucket)]


class DataFields(Section):
    """The training data."""

    data: str | None = Field(
        default=None, description="tokens, text, .npz, images, file.py:function, or gs://…"
    )
    eval_data: str | None = Field(default=None, description="the same, for the evaluation loss")
    tokenizer: str | None = Field(default=None, description="for text: a tokenizer.json")
    text_key: str = Field(default="text", description="the field of a JSON line that is read")
    packing: Literal["concat", "documents"] = Field(
        default="concat",
        description="one stream of tokens, or documents separated by attention masks",
    )
    shuffle: bool = Field(default=True, description="a new order in each epoch, from the seed")
    epochs: Count | None = Field(default=None, description="stop after this many; None: never")
    num_workers: Count = Field(default=4, description="threads that read tokens")
    prefetch: Count = Field(default=6, description="reads of tokens ahead of the step")


class LoraSettings(Section):
    """LoRA: low-rank matrices that are trained while the model's own stay frozen."""

    rank: Count = Field(default=16, description="columns of the first low-rank matrix")
    alpha: Scale = Field(default=32.0, description="the low-rank product is scaled by alpha / rank")
    targets: Words = Field(
        default=DEFAULT_TARGETS, description="patterns of the paths of matrices to adapt"
    )
    base: Literal["int8", "int4", "fp8"] | None = Field(
        default=None, description="int8, int4 or fp8: format of the frozen matrices"
    )

    def spec(self) -> LoraSpec:
        """Return the settings as the `LoraSpec` of a `Workload`."""
        return LoraSpec(rank=self.rank, alpha=self.alpha, targets=self.targets, base=self.base)


class FineTuning(Section):
    """The initial weights, and which of them are trained."""

    init_from: str | None = Field(
        default=None, description="a run or Hugging Face folder with the initial weights"
    )
    lora: LoraSettings | None = Field(
        default=None, description="rank, alpha, targets: train LoRA matrices instead of the model's"
    )


class Optimization(Section):
    """Optimizer, schedule and number formats."""

    optimizer: OptimizerName = Field(default="adamw", description="adamw, lion, adafactor or sgd")
    learning_rate: Scale = Field(default=DEFAULT_LEARNING_RATE, description="at its highest")
    schedule: ScheduleName = Field(default="cosine", description="constant, cosine, linear, wsd")
    warmup_steps: Index = Field(default=0, description="steps of rising learning rate")
    final_lr_fraction: Part = Field(
        default=0.1, description="of the highest rate, at the last step"
    )
    decay_fraction: Share = Field(default=0.2, description="of all steps, for schedule wsd")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="first moment")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.95, description="second moment")
    weight_decay: Weight = Field(default=0.1, description="decoupled")
    no_decay: Words = Field(default=NO_DECAY, description="paths of parameters that do not decay")
    clip_norm: Scale | None = Field(default=1.0, description="of all gradients together")
    moment_dtype: Annotated[MomentDtype, any_spelling(*get_args(MomentDtype))] = Field(
        default="float32", description="of the first moment; int8: of both, in blocks"
    )
    precision: Annotated[Precision, any_spelling(*get_args(Precision))] | None = Field(
        default=None,
        description="matmuls in bfloat16, float32, float8[_static|_channels], int8; None: model's",
    )
    param_dtype: Annotated[ParamDtype, any_spelling(*get_args(ParamDtype))] | None = Field(
        default=None, description="format of the parameters that are updated; None: the model's"
    )
    z_loss: Weight = Field(default=0.0, description="weight of log²(softmax normaliser)")


# Settings of the optimizer; they have no effect if the model brings its own.
OPTIMIZER_FIELDS = tuple(
    name for name in Optimization.model_fields if name not in ("precision", "param_dtype", "z_loss")
)
# Training settings that decide the compiled program.
PROGRAM_FIELDS = (*Optimization.model_fields, "packing", "seed", "steps", "on_bad_loss", "lora")
# Length of the schedule if the job does not set the number of steps.
STEPS_IF_UNKNOWN = 10_000


class Reliability(Section):
    """Checkpoints, and the reaction to failures."""

    checkpoint_every: Index = Field(default=500, description="steps; 0: no checkpoints")
    checkpoint_seconds: Seconds | None = Field(
        default=None, description="seconds between checkpoints, instead of steps"
    )
    checkpoint_dir: PathOrBucket | None = Field(
        default=None, description="run_dir/checkpoints by default"
    )
    keep_checkpoints: Count = Field(default=3, description="the newest ones")
    async_checkpointing: bool = Field(default=True, description="write while training goes on")
    save_patience_s: Seconds = Field(
        default=600.0, description="seconds that saves may fail before the run ends (exit 205)"
    )
    on_bad_loss: Literal["stop", "rollback", "skip", "ignore"] = Field(
        default="stop", description="when the loss is not finite or jumps"
    )
    spike_factor: Scale | None = Field(
        default=None, description="robust deviations above the recent loss; None: only NaN"
    )
    hang_timeout_s: Seconds | None = Field(
        default=None, description="end the process when no step completes for so long"
    )
    on_recompile: Literal["refuse", "allow"] = Field(
        default="refuse", description="when a batch has another shape"
    )


class Reporting(Section):
    """Run folder, metrics and hooks."""

    run_dir: PathOrAddress | None = Field(
        default=None, description="a folder, or gs://…; runs/MODEL-TIME by default"
    )
    log_every: Count = Field(default=1, description="steps between two lines of metrics")
    eval_every: Index = Field(default=0, description="steps; 0: only at the end")
    eval_batches: Count = Field(default=16, description="batches of an evaluation")
    hooks: Words = Field(default=(), description="tensorboard, wandb, profile")
    peak_tflops: Scale | None = Field(
        default=None, description="peak of one device, for MFU if the catalog has none"
    )


class TrainingSettings(Reporting, Reliability, Optimization, FineTuning, DataFields, Settings):
    """How to train: data, optimizer, safety, reporting. Every key is a key of `train:`.

    Example:
        >>> TrainingSettings(steps=1000, learning_rate=1e-3).schedule
        'cosine'
    """

    steps: Count | None = Field(default=None, description="of the whole run, from step 0")
    seed: Seed = Field(default=0, description="of parameters, data order and dropout")
    tune_products: bool = Field(
        default=False, description="on one NVIDIA GPU: time cuBLAS under load first, once per model"
    )

    def optimizer_spec(self) -> OptimizerSpec:
        """Return the optimizer that the settings describe."""
        return OptimizerSpec(
            name=self.optimizer,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            no_decay=self.no_decay,
            clip_norm=self.clip_norm,
            moment_dtype=self.moment_dtype,
            skip_nonfinite=self.on_bad_loss == "skip",
        )

    def learning_rate_schedule(self) -> LearningRate:
        """Return the schedule over all steps of the run."""
        total_steps = self.steps or max(STEPS_IF_UNKNOWN, self.warmup_steps)
        return LearningRate(
            peak=self.learning_rate,
            schedule=self.schedule,
            total_steps=total_steps,
            warmup_steps=self.warmup_steps,
            final_fraction=self.final_lr_fraction,
            decay_fraction=self.decay_fraction,
        )
