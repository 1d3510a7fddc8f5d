"""The loss of a vocabulary, from the factors of its logits.

A loss of logits that come straight from a product is computed from the two factors, a piece of the
tokens at a time, so that the logits need never exist whole; nobody has to write
`linear_cross_entropy` for that.
"""

from dataclasses import dataclass
from typing import Any

from .lowerings.losses import vocabulary_loss

# Below this many columns whole logits are small, and pieces of them only cost time.
LEAST_VOCABULARY = 4096
# What leaves logits as they are, or only joins their leading dimensions.
_KEEPS_LOGITS = ("float", "to", "view", "reshape", "flatten", "contiguous")


def let_modes_see_flatten() -> None:
    """Send a method of torchax's tensors through torch's own function, which a mode gets to see."""
    import torch
    from torchax.tensor import Tensor

    def flatten(tensor: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
        return torch.flatten(tensor, start_dim, end_dim)

    kind: Any = Tensor
    kind.flatten = flatten


@dataclass(frozen=True)
class TensorProduct:
    """Where a tensor came from: `x @ weight.T`, with leading dimensions joined or not.

    Attributes:
        result: The tensor; holding it keeps its id from being given to another.
        x: The activations.
        weight: The matrix, (columns, inputs).
    """

    result: Any
    x: Any
    weight: Any


def make_mode(environment: Any) -> Any:
    """Return a mode that remembers products, and computes their losses from the factors."""
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
    """Whether a tensor still has one row of logits for each token."""
    columns = known.weight.shape[0]
    floating = result.dtype.is_floating_point
    return floating and result.dim() >= 2 and result.shape[-1] == columns
