"""Losses: the vocabulary loss from the factors of its logits, and others that torchax gets wrong.

A loss of logits that come straight from a matmul is computed from the two factors, a chunk of
tokens at a time, so that all logits never exist at once. Users need not call
`linear_cross_entropy`.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from .....kernels.ops.cross_entropy.api import cross_entropy
from .....kernels.ops.cross_entropy.terms import Reduction

# optax replaces minus infinity by a finite number; a loss above this means that no alignment
# exists, for which torch returns infinity.
_NO_ALIGNMENT = 5e4


def lowerings() -> dict[Any, Any]:
    """Return the lowerings of this file: torch's function -> its counterpart on arrays."""
    import torch.nn.functional as functional

    found: dict[Any, Any] = {
        functional.gaussian_nll_loss: gaussian_loss,
        functional.multilabel_margin_loss: margin_of_labels,
        functional.ctc_loss: alignment_loss,
    }
    # Only newer versions of torch have it.
    if hasattr(functional, "linear_cross_entropy"):
        found[functional.linear_cross_entropy] = vocabulary_loss
    return found


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
    """Return the loss of `input @ linear_weight.T` without holding all logits."""
    del options  # torch's own chunking
    if linear_bias is not None or label_smoothing or jnp.issubdtype(target.dtype, jnp.floating):
        raise NotImplementedError(
            "linear_cross_entropy with a bias, smoothed labels or class probabilities; "
            "use linear and cross_entropy."
        )
    labels = jnp.where(target == ignore_index, -1, target)
    return cross_entropy(input, linear_weight.T, labels, reduction=reduction).loss


def gaussian_loss(
    input: jax.Array,
    target: jax.Array,
    var: jax.Array | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: Reduction = "mean",
) -> jax.Array:
    """Return the negative log likelihood of a target under a normal distribution.

    Eager torch raises an error for negative variances; a compiled program uses `eps` instead.
    """
    spread = jnp.asarray(var, input.dtype)
    if spread.ndim and spread.shape == input.shape[:-1]:
        spread = spread[..., None]
    # The gradient ignores the clamp, as in torch.
    spread = spread + jax.lax.stop_gradient(jnp.maximum(spread, eps) - spread)
    loss = 0.5 * (jnp.log(spread) + (input - target) ** 2 / spread)
    return _reduced(loss + (0.5 * math.log(2 * math.pi) if full else 0), reduction)


def margin_of_labels(
    input: jax.Array,
    target: jax.Array,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Reduction = "mean",
) -> jax.Array:
    """Return torch's `multilabel_margin_loss`; the labels of an example end at the first -1."""
    del size_average, reduce  # deprecated forms of `reduction`, which torch has converted
    given = jnp.cumprod(target >= 0, axis=-1).astype(bool)
    classes = input.shape[-1]
    labels = jnp.where(given, target, 0)
    chosen = (jax.nn.one_hot(labels, classes, dtype=bool) & given[..., None]).any(-2)
    scores = jnp.take_along_axis(input, labels, axis=-1)
    short = jax.nn.relu(1 - scores[..., :, None] + input[..., None, :])
    counted = given[..., :, None] & ~chosen[..., None, :]
    return _reduced(jnp.where(counted, short, 0).sum((-2, -1)) / classes, reduction)


def alignment_loss(
    log_probs: jax.Array,
    targets: jax.Array,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    zero_infinity: bool = False,
) -> jax.Array:
    """Return torch's `ctc_loss`."""
    if targets.ndim != log_probs.ndim - 1:
        raise NotImplementedError(
            "ctc_loss with the labels of all examples in one row; pass one row an example."
        )
    single = log_probs.ndim == 2
    logits = log_probs[None] if single else log_probs.swapaxes(0, 1)
    labels = targets[None] if single else targets
    steps, wanted = (
        jnp.broadcast_to(jnp.asarray(one), logits.shape[:1])
        for one in (input_lengths, target_lengths)
    )
    late = jnp.arange(logits.shape[1]) >= steps[:, None]
    past = jnp.arange(labels.shape[1]) >= wanted[:, None]
    loss = optax.ctc_loss(
        logits, late.astype(logits.dtype), labels, past.astype(logits.dtype), blank_id=blank
    )
    loss = jnp.where(loss > _NO_ALIGNMENT, 0 if zero_infinity else jnp.inf, loss)
    if reduction == "mean":
        loss = loss / jnp.maximum(wanted, 1)
    return _reduced(loss[0] if single else loss, reduction)


def _reduced(loss: jax.Array, reduction: str) -> jax.Array:
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


# Below this many columns logits are small, and chunks only cost time.
LEAST_VOCABULARY = 4096
# Methods that keep logits unchanged, or only join their leading dimensions.
_KEEPS_LOGITS = ("float", "to", "view", "reshape", "flatten", "contiguous")


def let_modes_see_flatten() -> None:
    """Route `Tensor.flatten` of torchax through torch's function, which a mode can intercept."""
    import torch
    from torchax.tensor import Tensor

    def flatten(tensor: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
        return torch.flatten(tensor, start_dim, end_dim)

    kind: Any = Tensor
    kind.flatten = flatten


@dataclass(frozen=True)
class TensorProduct:
    """The factors of a tensor `x @ weight.T`, with leading dimensions joined or not.

    Attributes:
        result: The tensor; a reference keeps its id from being reused.
        x: The activations.
        weight: The matrix, (columns, inputs).
    """

    result: Any
    x: Any
    weight: Any


def make_mode(environment: Any) -> Any:
    """Return a mode that records vocabulary matmuls and computes losses from their factors."""
    import torch
    import torch.nn.functional as functional

    keeps = {getattr(torch.Tensor, name) for name in _KEEPS_LOGITS} | {torch.flatten}

    class FusedHeads(torch.overrides.TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self._products: dict[int, TensorProduct] = {}

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            known = self._products.get(id(args[0])) if args else None
            if func is functional.cross_entropy and known is not None:
                loss = self._loss(known, *args, **kwargs)
                if loss is not None:
                    return loss
            result = func(*args, **kwargs)
            if func is functional.linear and _has_vocabulary(*args, **kwargs):
                self._products[id(result)] = TensorProduct(result, args[0], args[1])
            elif known is not None and func in keeps and _same_columns(result, known):
                self._products[id(result)] = TensorProduct(result, known.x, known.weight)
            return result

        def _loss(
            self,
            known: TensorProduct,
            input: Any,
            target: Any,
            weight: Any = None,
            size_average: Any = None,
            ignore_index: int = -100,
            reduce: Any = None,
            reduction: str = "mean",
            label_smoothing: float = 0.0,
        ) -> Any:
            given = (weight, size_average, reduce)
            plain = all(one is None for one in given) and not label_smoothing
            if not plain or target.dtype.is_floating_point or input.dim() != 2:
                return None
            x, matrix, labels = environment.t2j_iso((known.x, known.weight, target))
            found = vocabulary_loss(
                x,
                matrix,
                labels.reshape(x.shape[:-1]),
                reduction=reduction,  # pyright: ignore[reportArgumentType]  torch has the same three
                ignore_index=ignore_index,
            )
            return environment.j2t_iso(found.reshape(-1) if reduction == "none" else found)

    return FusedHeads()


def _has_vocabulary(input: Any, weight: Any, bias: Any = None) -> bool:
    return bias is None and weight.shape[0] >= LEAST_VOCABULARY


def _same_columns(result: Any, known: TensorProduct) -> bool:
    """Whether a tensor still has one row of logits per token."""
    columns = known.weight.shape[0]
    floating = result.dtype.is_floating_point
    return floating and result.dim() >= 2 and result.shape[-1] == columns
