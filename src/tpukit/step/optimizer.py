"""Optimizers by name: AdamW, Lion, Adafactor and SGD with clipping, schedule and decay masks."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..annotations import PyTree
from ..parallel.sharding.trees import join_path
from .int8_adam import scale_by_int8_adam
from .optimizer_spec import NO_DECAY, SMALLEST_FACTORED, LearningRate, OptimizerSpec


def build_optimizer(
    spec: OptimizerSpec, learning_rate: LearningRate | float
) -> optax.GradientTransformation:
    """Return the optax transformation of `spec`: clip, then update, then decay."""
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
        # Without parameter scaling the learning rate has the same meaning as for the others.
        core = optax.chain(
            optax.adafactor(
                1.0,
                min_dim_size_to_factor=SMALLEST_FACTORED,
                multiply_by_parameter_scale=False,
                clipping_threshold=1.0,
            ),
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
    # The chain has the same structure with and without clipping or skipping, so that a resumed run
    # that changes these settings still finds its moments.
    clip = optax.identity() if spec.clip_norm is None else optax.clip_by_global_norm(spec.clip_norm)
    whole = optax.chain(clip, core)
    return _skip_nonfinite(whole) if spec.skip_nonfinite else whole


def _skip_nonfinite(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Skip the update where a gradient is not finite; the training loop decides when to stop.

    Unlike `optax.apply_if_finite` it keeps no counter, so its state equals the state of `inner`.
    """

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[Any, Any]:
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
    """Return a function from parameters to True where weight decay applies.

    Patterns match paths such as "layers/input_norm/scale". Names are checked as well as the number
    of dimensions, because stacked layers add a dimension to every parameter.
    """
    patterns = [re.compile(pattern) for pattern in no_decay]

    def mask(params: PyTree) -> PyTree:
        def decayed(path: Any, leaf: Any) -> bool:
            name = join_path(path)
            return leaf.ndim >= 2 and not any(pattern.search(name) for pattern in patterns)

        return jax.tree_util.tree_map_with_path(decayed, params)

    return mask
