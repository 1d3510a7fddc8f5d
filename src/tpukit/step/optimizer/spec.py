"""What an optimizer is asked to be, as plain data: reading a job needs no jax."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from ...errors import ConfigError, did_you_mean

OptimizerName = Literal["adamw", "lion", "adafactor", "sgd"]
MomentDtype = Literal["float32", "bfloat16", "int8"]
OPTIMIZERS: tuple[str, ...] = get_args(OptimizerName)
MOMENT_DTYPES: tuple[str, ...] = get_args(MomentDtype)
DEFAULT_LEARNING_RATE = 3e-4
# Weights that a decay would only pull away from what they are for: the scale of a norm is 1, not
# 0, and a rare token's embedding would shrink for want of gradients.
NO_DECAY: tuple[str, ...] = ("norm", "bias", "scale", "embed")


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """What `build_optimizer` builds.

    Attributes:
        weight_decay: Decoupled from the gradient, times the learning rate (all four optimizers).
        no_decay: Regular expressions; a parameter whose path matches one, or that has fewer than
            two dimensions, is not decayed.
        clip_norm: Gradients are scaled down to this global norm; None never.
        moment_dtype: Format of the first moment (AdamW, Lion) or the momentum (SGD); the second
            moment stays in float32, whose range it needs. "int8" (AdamW) keeps both in eight
            bits, with a scale for each block.
        skip_nonfinite: Leave parameters and moments as they are when a gradient is not finite.
    """

    name: OptimizerName = "adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    no_decay: tuple[str, ...] = NO_DECAY
    clip_norm: float | None = 1.0
    moment_dtype: MomentDtype = "float32"
    skip_nonfinite: bool = False

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ConfigError(
                f"optimizer '{self.name}' is not known; use {', '.join(OPTIMIZERS)}, or pass an "
                f"optax transformation.{did_you_mean(self.name, OPTIMIZERS)}"
            )
        if self.moment_dtype not in MOMENT_DTYPES:
            raise ConfigError(
                f"moment_dtype '{self.moment_dtype}' is not one of {', '.join(MOMENT_DTYPES)}."
                + did_you_mean(self.moment_dtype, MOMENT_DTYPES)
            )
        if self.name == "adafactor" and self.moment_dtype != "float32":
            raise ConfigError(
                "moment_dtype is for optimizers with a first moment, and adafactor keeps none; "
                "leave it out."
            )
        if self.moment_dtype == "int8" and self.name != "adamw":
            raise ConfigError(
                f"moment_dtype='int8' is for adamw, and the optimizer is {self.name}; use "
                "'bfloat16', or adamw."
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "no_decay": list(self.no_decay)}
