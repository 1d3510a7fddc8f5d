"""`cross_entropy`: the loss from hidden states and output matrix, without storing all logits."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp

from ....errors import TPUKernelError, did_you_mean
from ...registry.dispatch import dispatch, with_backward
from ...registry.op import PALLAS_TPU, REFERENCE, XLA, KernelCase, Op, find_implementation
from . import chunked, pallas_tpu
from .pallas_tpu import OP_NAME, SPLITS, CrossEntropyBlocks, block_space, default_blocks, vmem_bytes
from .terms import CrossEntropy, LossTerms, Reduction, reduce_losses


def cross_entropy_reference(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: Reduction = "mean",
) -> CrossEntropy:
    """Compute `cross_entropy` from all logits (T, V) at once, in float32 or wider."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.dot(x, w, preferred_element_type=wide)
    losses, log_normaliser = LossTerms(z_loss, soft_cap).of_logits(logits, labels)
    loss = reduce_losses(losses, weights.astype(losses.dtype), reduction)
    return CrossEntropy(loss, jax.lax.stop_gradient(log_normaliser))


Options = dict[str, Any]  # z_loss, soft_cap and reduction
IMPLEMENTATIONS: dict[str, Callable[..., CrossEntropy]] = {
    PALLAS_TPU: pallas_tpu.cross_entropy_pallas,
    XLA: chunked.cross_entropy_chunked,
    REFERENCE: cross_entropy_reference,
}


def cross_entropy(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None = None,
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: Reduction = "mean",
    implementation: str | None = None,
    blocks: CrossEntropyBlocks | None = None,
) -> CrossEntropy:
    """Return the softmax cross-entropy of `x @ w` against `labels`, computed in float32.

    Args:
        x: (..., d) hidden states.
        w: (d, V) the output matrix.
        labels: (...) the correct column of each token; a negative label excludes the token.
        weights: (...) the weight of each token; 1 by default.
        z_loss: Weight of the squared log of the softmax's normaliser, which keeps logits small.
        soft_cap: Squeeze logits into ±soft_cap by a tanh before the softmax.
        reduction: "none" returns the weighted loss of every token, "sum" their sum, "mean" that sum
            divided by the sum of weights.
        implementation: "pallas_tpu", "xla" (chunk by chunk) or "reference" (all logits at once).
            None takes the kernel on TPU for calls without a gradient, and "xla" otherwise: with a
            gradient the kernel computes the logits three times and "xla" once.
        blocks: Block sizes of the Pallas kernel; None takes the tuned ones.

    Returns:
        The loss, and the log of each token's softmax normaliser, which has no gradient.

    Raises:
        TPUKernelError: Shapes do not match, or a name is unknown.
    """
    _check(x, w, labels, weights, reduction, soft_cap)
    shape = labels.shape
    tokens = x.reshape(-1, x.shape[-1])
    wide = jnp.promote_types(x.dtype, jnp.float32)
    counted = (labels >= 0).astype(wide)
    counted = counted if weights is None else counted * weights.astype(wide)
    arrays = (tokens, w, labels.reshape(-1), counted.reshape(-1))
    options: Options = {"z_loss": z_loss, "soft_cap": soft_cap, "reduction": reduction}
    if implementation is None:
        alone = partial(_without_gradient, options=options, blocks=blocks)
        result = with_backward(partial(_forward, options=options), _backward, *arrays, result=alone)
    else:
        named = find_implementation(OP_NAME, IMPLEMENTATIONS, implementation)
        own: dict[str, Any] = {"blocks": blocks} if implementation == PALLAS_TPU else {}
        result = named(*arrays, **options, **own)
    loss = result.loss.reshape(shape) if reduction == "none" else result.loss
    return CrossEntropy(loss, result.log_normaliser.reshape(shape))


def _without_gradient(
    *arrays: jax.Array, options: Options, blocks: CrossEntropyBlocks | None
) -> CrossEntropy:
    loss = "t" if options["reduction"] == "none" else ""
    splits = replace(SPLITS, arguments=("t d", "d v", "t", "t"), result=(loss, "t"))
    return dispatch(
        OP_NAME,
        {PALLAS_TPU: pallas_tpu.without_gradient, XLA: chunked.cross_entropy_chunked},
        *arrays,
        on_gpu=XLA,
        elsewhere=XLA,
        options=options,
        pallas_options={"blocks": blocks},
        names=splits.alone,
    )


def _forward(*arrays: jax.Array, options: Options) -> tuple[CrossEntropy, Any]:
    with jax.named_scope(OP_NAME):
        return jax.vjp(partial(chunked.cross_entropy_chunked, **options), *arrays)


def _backward(pull: Any, factors: CrossEntropy) -> tuple[jax.Array, ...]:
    return pull(factors)


def _check(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None,
    reduction: str,
    soft_cap: float | None,
) -> None:
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[0]:
        raise TPUKernelError(
            f"cross_entropy multiplies x {x.shape} by w {w.shape}; w must be (width, vocabulary) "
            "with the width of x's last axis. Transpose a tied embedding."
        )
    for name, array in (("labels", labels), ("weights", weights)):
        if array is not None and array.shape != x.shape[:-1]:
            raise TPUKernelError(
                f"{name} are {array.shape} and x is {x.shape}; there must be one for each token, "
                f"{x.shape[:-1]}."
            )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TPUKernelError(
            f"labels are {labels.dtype}; expected integers, the column of w each token should get."
        )
    if reduction not in get_args(Reduction):
        raise TPUKernelError(
            f"reduction={reduction!r} is unknown; known are {', '.join(get_args(Reduction))}."
            + did_you_mean(reduction, get_args(Reduction))
        )
    if soft_cap is not None and soft_cap <= 0:
        raise TPUKernelError(f"soft_cap={soft_cap} must be positive; None switches it off.")


def _case(name: str, tokens: int, width: int, vocab: int) -> KernelCase:
    return KernelCase(
        name,
        (
            jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16),
            jax.ShapeDtypeStruct((width, vocab), jnp.bfloat16),
            jax.ShapeDtypeStruct((tokens,), jnp.int32),
            jax.ShapeDtypeStruct((tokens,), jnp.float32),
        ),
    )


OP = Op(
    name=OP_NAME,
    function=cross_entropy,
    implementations=IMPLEMENTATIONS,
    cases=(
        _case("small", 256, 512, 1000),
        _case("llama3_8b_2048", 2048, 4096, 128256),
        _case("llama3_8b_8192", 8192, 4096, 128256),
        _case("gemma3_12b_4096", 4096, 3840, 262144),
        _case("qwen3_8b_4096", 4096, 4096, 151936),
    ),
    block_space=block_space,
    vmem_bytes=vmem_bytes,
    default_blocks=default_blocks,
    on_gpu=XLA,
    differentiable=(0, 1),
    splits=SPLITS,
)
