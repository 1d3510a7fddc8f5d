"""What a walk through a program keeps track of, and who is told of products."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from .parameter import StoredParameter
from .product import Contraction
from .view import View


@dataclass(frozen=True, eq=False)
class StoredLeaf:
    """A parameter of the program.

    Attributes:
        number: Among all of them.
        stored: What it is kept as; None for an array.
    """

    number: int
    stored: StoredParameter | None = None


@dataclass(frozen=True, eq=False)
class Tracked:
    """A value that is a parameter or a part of one; `get` makes the array, where it is needed."""

    leaf: StoredLeaf
    view: View
    dtype: Any
    get: Callable[[], jax.Array]


@dataclass(frozen=True, eq=False)
class Multiplied:
    """A `dot_general` with a tracked weight.

    Attributes:
        weight: The tracked operand.
        x: The other one.
        weight_first: Whether the weight is the first operand.
        contraction: Of the weight.
        x_contraction: Of the other operand, axis by axis the same.
    """

    weight: Tracked
    x: jax.Array
    weight_first: bool
    contraction: Contraction
    x_contraction: Contraction


def tracked_parameter(leaf: StoredLeaf, view: View, dtype: Any) -> Tracked:
    """What a stored parameter is to a program, before anything is done to it."""
    stored = leaf.stored
    assert stored is not None
    return Tracked(leaf, view, dtype, lambda: stored.dense(view).astype(dtype))


class Visitor(Protocol):
    """What is done at products."""

    @property
    def records(self) -> bool:
        """Whether it keeps values of the program, which cannot leave what is computed again."""
        ...

    def product(self, found: Multiplied, multiply: Callable[[Any, Any], Any]) -> Any:
        """The product's result; `multiply(x, weight)` is the program's own."""
        ...

    def enter_loop(self) -> Any:
        """Begin the body of a loop; what it returns is handed to `leave_loop`."""
        ...

    def leave_loop(self, entered: Any) -> Any:
        """End the body: what it has recorded, as arrays that the loop then stacks."""
        ...

    def after_loop(self, recorded: Any) -> None:
        """Take what the body recorded, stacked over all steps."""
        ...


def plain(value: Any) -> Any:
    """The array, whatever it was kept as."""
    return value.get() if isinstance(value, Tracked) else value
