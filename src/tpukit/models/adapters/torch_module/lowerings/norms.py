"""Norms by our kernels, and batch norms with running statistics, which torchax does not update."""

from typing import Any

import jax
import jax.numpy as jnp

from .....kernels.ops.layer_norm.api import layer_norm
from .....kernels.ops.rms_norm.api import rms_norm

DEFAULT_RMS_EPS = {"bfloat16": 0.0078125, "float16": 0.0009765625, "float32": 1.1920929e-07}


def lowerings() -> dict[Any, Any]:
    """Return the lowerings of this file: torch's function -> its counterpart on arrays."""
    import torch.nn.functional as functional

    return {
        functional.layer_norm: normalise,
        functional.rms_norm: normalise_by_root_mean_square,
    }


def lowerings_in_torch() -> dict[Any, Any]:
    """Return lowerings in terms of other torch functions, which change buffers."""
    import torch
    import torch.nn.functional as functional

    return {
        functional.batch_norm: batch_norm,
        torch.batch_norm: _batch_norm_of_torch,
        functional.instance_norm: instance_norm,
        torch.instance_norm: _instance_norm_of_torch,
    }


def normalise(
    input: jax.Array,
    normalized_shape: Any,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = 1e-5,
) -> jax.Array:
    """Return torch's `layer_norm`; several last axes count as one."""
    rows, scale, shift = _rows(input, normalized_shape, weight, bias)
    return layer_norm(rows, scale, shift, eps=eps).reshape(input.shape).astype(input.dtype)


def normalise_by_root_mean_square(
    input: jax.Array, normalized_shape: Any, weight: jax.Array | None = None, eps: Any = None
) -> jax.Array:
    """Return torch's `rms_norm`; without `eps` it uses the machine epsilon."""
    rows, scale, _ = _rows(input, normalized_shape, weight, None)
    scale = jnp.ones(rows.shape[-1], input.dtype) if scale is None else scale
    least = DEFAULT_RMS_EPS[input.dtype.name] if eps is None else eps
    return rms_norm(rows, scale, eps=least).reshape(input.shape).astype(input.dtype)


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
    """Return torch's `batch_norm`, and update the running statistics in place."""
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
            _move(running_mean, mean, share)
            _move(running_var, variance * (count / max(count - 1, 1)), share)
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


def instance_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Return torch's `instance_norm`; running statistics are means over the batch."""
    import torch

    axes = [*range(2, input.dim())]
    shape = [1, -1] + [1] * len(axes)
    wide = input.float()
    if use_input_stats:
        mean = wide.mean(axes, keepdim=True)
        variance = ((wide - mean) ** 2).mean(axes, keepdim=True)
        if running_mean is not None:
            count = input[0, 0].numel()
            _move(running_mean, mean.mean(0).flatten(), momentum)
            unbiased = variance * (count / max(count - 1, 1))
            _move(running_var, unbiased.mean(0).flatten(), momentum)
    else:
        mean, variance = running_mean.reshape(shape), running_var.reshape(shape)
    out = (wide - mean) * torch.rsqrt(variance + eps)
    out = out if weight is None else out * weight.reshape(shape)
    out = out if bias is None else out + bias.reshape(shape)
    return out.to(input.dtype)


def _instance_norm_of_torch(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, use_input_stats: bool,
    momentum: float, eps: float, cudnn_enabled: bool = True,
) -> Any:  # fmt: skip
    return instance_norm(
        input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    )


def _move(running: Any, new: Any, share: float) -> None:
    """Update running statistics in place."""
    running.copy_((1 - share) * running + share * new.detach().to(running.dtype))


def _rows(
    input: jax.Array, normalized_shape: Any, weight: jax.Array | None, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Return the input with all normalised axes joined, and its flat scale and shift."""
    axes = len(tuple(normalized_shape))
    rows = input.reshape(*input.shape[: input.ndim - axes], -1)
    flat = [None if one is None else one.reshape(-1) for one in (weight, bias)]
    return rows, flat[0], flat[1]
