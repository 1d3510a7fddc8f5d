"""Optimizers by name: AdamW, Lion, Adafactor and SGD with clipping, schedule and decay masks."""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from ...errors import ConfigError, did_you_mean
from ...parallel.sharding.trees import join_path
from .moments import scale_by_int8_adam
from .schedule import LearningRate

OptimizerName = Literal["adamw", "lion", "adafactor", "sgd"]
MomentDtype = Literal["float32", "bfloat16", "int8"]
OPTIMIZERS: tuple[str, ...] = get_args(OptimizerName)
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


def build_optimizer(
    spec: OptimizerSpec, learning_rate: LearningRate | float
) -> optax.GradientTransformation:
    """The optax transformation that `spec` describes: clip, then update, then decay."""
    rate: Any = learning_rate
    dtype = jnp.dtype(spec.moment_dtype)
    decay = spec.weight_decay
    mask = decay_mask(spec.no_decay)
    if spec.moment_dtype == "int8":
        core = optax.chain(
            scale_by_int8_adam(spec.beta1, spec.beta2, spec.eps),
            optax.add_decayed_weights(decay, mask),
            optax.scale_by_learning_rate(rate),
        )
    elif spec.name == "adamw":
        core = optax.adamw(
            rate,
            b1=spec.beta1,
            b2=spec.beta2,
            eps=spec.eps,
            weight_decay=decay,
            mask=mask,
            mu_dtype=dtype,
        )
    elif spec.name == "lion":
        core = optax.lion(
            rate, b1=spec.beta1, b2=spec.beta2, weight_decay=decay, mask=mask, mu_dtype=dtype
        )
    elif spec.name == "adafactor":
        # Without parameter scaling the learning rate means what it means for the others.
        core = optax.chain(
            optax.adafactor(1.0, multiply_by_parameter_scale=False, clipping_threshold=1.0),
            optax.scale(-1.0),
            optax.add_decayed_weights(decay, mask),
            optax.scale_by_learning_rate(rate),
        )
    else:
        core = optax.chain(
            optax.trace(decay=spec.beta1, accumulator_dtype=dtype),
            optax.add_decayed_weights(decay, mask),
            optax.scale_by_learning_rate(rate),
        )
    # Neither clipping nor skipping has a state of its own, and each keeps its place where it is
    # not asked for: a run that goes on with another answer finds its moments where they were.
    clip = optax.identity() if spec.clip_norm is None else optax.clip_by_global_norm(spec.clip_norm)
    whole = optax.chain(clip, core)
    return _skip_nonfinite(whole) if spec.skip_nonfinite else whole


def _skip_nonfinite(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Change nothing where a gradient is not finite; a guard outside decides when to stop.

    Unlike `optax.apply_if_finite` it counts nothing, so its state is that of `inner`.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        finite = jnp.all(
            jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(updates)])
        )
        return jax.lax.cond(
            finite,
            lambda: inner.update(updates, state, params),
            lambda: (jax.tree.map(jnp.zeros_like, updates), state),
        )

    return optax.GradientTransformation(inner.init, update)


def decay_mask(no_decay: Sequence[str] = NO_DECAY) -> Callable[[Any], Any]:
    """A function from parameters to True where weight decay applies.

    Paths are words joined by "/", e.g. "layers/input_norm/scale". A stack of layers adds a
    dimension to each, so names decide first and the number of dimensions last.
    """
    patterns = [re.compile(pattern) for pattern in no_decay]

    def mask(params: Any) -> Any:
        def decayed(path: Any, leaf: Any) -> bool:
            name = join_path(path)
            return leaf.ndim >= 2 and not any(pattern.search(name) for pattern in patterns)

        return jax.tree_util.tree_map_with_path(decayed, params)

    return mask
