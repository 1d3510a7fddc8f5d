"""How some of torch's functions become jax here, in place of torchax's own way.

Attention, norms and the loss of a vocabulary go to our kernels, which split themselves over a
mesh. BatchNorm is here because torchax leaves its running statistics as they were.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ....kernels.ops.cross_entropy.api import cross_entropy
from ....kernels.ops.cross_entropy.terms import Reduction
from ....kernels.ops.flash_attention.api import flash_attention
from ....kernels.ops.layer_norm.api import layer_norm
from ....kernels.ops.rms_norm.api import rms_norm

DEFAULT_RMS_EPS = {"bfloat16": 0.0078125, "float16": 0.0009765625, "float32": 1.1920929e-07}


def install(environment: Any) -> None:
    """Give an environment our lowerings."""
    import torch
    import torch.nn.functional as functional

    def as_jax(function: Any) -> Any:
        def lowered(*arguments: Any, **options: Any) -> Any:
            arguments, options = environment.t2j_iso((arguments, options))
            return environment.j2t_iso(function(*arguments, **options))

        return lowered

    for name, lowering in (
        ("scaled_dot_product_attention", attention),
        ("layer_norm", normalise),
        ("rms_norm", normalise_by_root_mean_square),
        ("linear_cross_entropy", vocabulary_loss),
    ):
        if hasattr(functional, name):
            environment.override_op_definition(getattr(functional, name), as_jax(lowering))
    environment.override_op_definition(functional.batch_norm, batch_norm)
    environment.override_op_definition(torch.batch_norm, _batch_norm_of_torch)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attn_mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> jax.Array:
    """Attend as `scaled_dot_product_attention` does, by our kernel where it can."""
    from .randomness import next_key

    boolean = attn_mask is None or attn_mask.dtype == jnp.bool_
    same_width = query.shape[-1] == value.shape[-1]
    kinds = query.dtype == key.dtype == value.dtype
    if query.ndim == 4 and boolean and same_width and kinds and not dropout_p:
        mask = None if attn_mask is None else _four_dimensions(attn_mask)
        return flash_attention(
            query, key, value, causal=is_causal, mask=mask, scale=scale, layout="BHSD"
        )
    groups = query.shape[-3] // key.shape[-3] if enable_gqa and query.ndim > 2 else 1
    if groups > 1:
        key, value = (jnp.repeat(one, groups, axis=-3) for one in (key, value))
    wide = jnp.promote_types(query.dtype, jnp.float32)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = jnp.einsum("...qd,...kd->...qk", query, key, preferred_element_type=wide) * factor
    allowed: Any = True
    if is_causal:
        allowed = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if attn_mask is not None and attn_mask.dtype == jnp.bool_:
        allowed = allowed & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask
    if allowed is not True:
        scores = jnp.where(allowed, scores, -jnp.inf)
    # A query that may attend to nothing gives zeros, not NaN.
    empty = jnp.all(jnp.isneginf(scores), -1, keepdims=True)
    shares = jnp.where(empty, 0, jax.nn.softmax(jnp.where(empty, 0, scores), axis=-1))
    if dropout_p:
        kept = jax.random.bernoulli(next_key(), 1 - dropout_p, shares.shape)
        shares = jnp.where(kept, shares / (1 - dropout_p), 0)
    return jnp.einsum("...qk,...kd->...qd", shares.astype(value.dtype), value)


def normalise(
    input: jax.Array,
    normalized_shape: Any,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = 1e-5,
) -> jax.Array:
    """Normalise as `layer_norm` does; several last axes count as one."""
    rows, scale, shift = _rows(input, normalized_shape, weight, bias)
    return layer_norm(rows, scale, shift, eps=eps).reshape(input.shape).astype(input.dtype)


def normalise_by_root_mean_square(
    input: jax.Array, normalized_shape: Any, weight: jax.Array | None = None, eps: Any = None
) -> jax.Array:
    """Normalise as `rms_norm` does; without `eps` torch takes that of the format."""
    rows, scale, _ = _rows(input, normalized_shape, weight, None)
    scale = jnp.ones(rows.shape[-1], input.dtype) if scale is None else scale
    least = DEFAULT_RMS_EPS[input.dtype.name] if eps is None else eps
    return rms_norm(rows, scale, eps=least).reshape(input.shape).astype(input.dtype)


def vocabulary_loss(
    input: jax.Array,
    linear_weight: jax.Array,
    target: jax.Array,
    *,
    linear_bias: jax.Array | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    **options: Any,
) -> jax.Array:
    """Compute the loss of `input @ linear_weight.T` without all of its logits at once."""
    del options  # how torch itself cuts the logits into pieces
    if linear_bias is not None or label_smoothing or jnp.issubdtype(target.dtype, jnp.floating):
        raise NotImplementedError(
            "linear_cross_entropy with a bias, smoothed labels or class probabilities; "
            "use linear and cross_entropy."
        )
    labels = jnp.where(target == ignore_index, -1, target)
    return cross_entropy(input, linear_weight.T, labels, reduction=reduction).loss


def batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Normalise over the batch, and move the running statistics as torch does."""
    import torch

    axes = [0, *range(2, input.dim())]
    shape = [1, -1] + [1] * (input.dim() - 2)
    wide = input.float()
    if training or running_mean is None:
        mean = wide.mean(axes)
        variance = ((wide - mean.reshape(shape)) ** 2).mean(axes)
        if running_mean is not None and training:
            count = input.numel() // input.shape[1]
            share = 0.0 if momentum is None else momentum
            for running, new in (
                (running_mean, mean.detach()),
                (running_var, variance.detach() * (count / max(count - 1, 1))),
            ):
                running.copy_((1 - share) * running + share * new.to(running.dtype))
    else:
        mean, variance = running_mean, running_var
    out = (wide - mean.reshape(shape)) * torch.rsqrt(variance + eps).reshape(shape)
    out = out if weight is None else out * weight.reshape(shape)
    out = out if bias is None else out + bias.reshape(shape)
    return out.to(input.dtype)


def _batch_norm_of_torch(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool,
    momentum: float, eps: float, cudnn_enabled: bool = True,
) -> Any:  # fmt: skip
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _four_dimensions(mask: jax.Array) -> jax.Array:
    """Return a mask of fewer dimensions with leading ones."""
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def _rows(
    input: jax.Array, normalized_shape: Any, weight: jax.Array | None, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Return the input with what is normalised as its one last axis, and its scale and shift."""
    axes = len(tuple(normalized_shape))
    rows = input.reshape(*input.shape[: input.ndim - axes], -1)
    flat = [None if one is None else one.reshape(-1) for one in (weight, bias)]
    return rows, flat[0], flat[1]
