"""One call of a module, apart: the tensors in it, and all else that decides which program runs."""

import inspect
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ...errors import TPUValidationError
from ...models.adapters.torch_module.arrays import dtype_of
from ...models.adapters.torch_module.environment import torch_trees
from ...training.recompile import ArgumentChange
from ..prepared import link_of

_LOSE_DIGITS = {"torch.float64", "torch.complex128"}


@dataclass(frozen=True)
class CallKind:
    """What calls have in common that one program serves.

    Attributes:
        tree: How the arguments nest; of torch's own pytrees, which know Hugging Face's classes.
        leaves: For each leaf its shape and format, or the value itself where it is no tensor.
        training: Which of the module's parts are in training mode.
    """

    tree: Any
    leaves: "tuple[TensorKind | ConstantArgument, ...]"
    training: tuple[bool, ...]

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and formats of the tensors, in the order of `ModuleCall.tensors`."""
        return [
            jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype))
            for leaf in self.leaves
            if isinstance(leaf, TensorKind)
        ]

    def arguments(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """The arguments of the module's forward by name, with these tensors in their places."""
        trees = torch_trees()

        rest = iter(tensors)
        filled = [
            leaf.value if isinstance(leaf, ConstantArgument) else next(rest) for leaf in self.leaves
        ]
        return trees.tree_unflatten(filled, self.tree)

    def describe(self) -> dict[str, str]:
        """Each argument in words: `input` is `float32[8,64]`, `use_cache` is `False`."""
        trees = torch_trees()

        named = trees.tree_unflatten(list(self.leaves), self.tree)
        paths: Any = trees.tree_flatten_with_path(named)[0]
        # The first step is into the dict of arguments: its key is the argument's name.
        return {path[0].key + trees.keystr(path[1:]): str(leaf) for path, leaf in paths}


@dataclass(frozen=True)
class TensorKind:
    """Shape and format that a tensor has as an array."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class ConstantArgument:
    """An argument that is no tensor: its value is part of the program.

    The type counts too: 1, 1.0 and True are equal, and make different programs.
    """

    kind: type
    value: Hashable

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class ModuleCall:
    """One call: which kind it is of, and its tensors."""

    kind: CallKind
    tensors: list[Any]

    def narrowed(self) -> list[str]:
        """Formats among the tensors that lose digits, because jax's numbers have 32 bits."""
        return sorted({str(one.dtype) for one in self.tensors} & _LOSE_DIGITS)


class CallReader:
    """Reads the calls of one module."""

    def __init__(self, module: Any) -> None:
        self._name = type(module).__name__
        self._parts = list(module.modules())
        self._signature = forward_signature(module)
        # A cache of keys and values holds tensors where no program can return them.
        self._spares_cache = "use_cache" in self._signature.parameters

    def read(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> ModuleCall:
        """Take a call apart.

        Raises:
            TPUValidationError: The module's forward takes no such arguments, or one of them is
                neither a tensor nor anything that could tell two programs apart.
        """
        trees = torch_trees()

        if self._spares_cache:
            options = {"use_cache": False, **options}
        try:
            bound = self._signature.bind(*arguments, **options)
        except TypeError as error:
            raise TPUValidationError(
                f"{self._name} cannot be called so: {error}; its forward takes {self._signature}."
            ) from None
        leaves, tree = trees.tree_flatten(dict(bound.arguments))
        tensors: list[Any] = []
        kinds = tuple(self._kind(leaf, tensors) for leaf in leaves)
        training = tuple(one.training for one in self._parts)
        return ModuleCall(CallKind(tree, kinds, training), tensors)

    def call(self, module: Any, arguments: dict[str, Any]) -> Any:
        """Call the module with arguments by name, however its forward takes each of them."""
        bound = inspect.BoundArguments(self._signature, arguments)  # pyright: ignore[reportArgumentType]  a dict is ordered
        return module(*bound.args, **bound.kwargs)

    def _kind(self, leaf: Any, tensors: list[Any]) -> TensorKind | ConstantArgument:
        import torch

        if isinstance(leaf, np.ndarray):
            leaf = torch.from_numpy(leaf)
        if isinstance(leaf, torch.Tensor):
            if leaf.is_meta:
                raise TPUValidationError(
                    f"{self._name} was given a tensor on torch's meta device, which has no values; "
                    "compile_for checks shapes alone."
                )
            tensors.append(leaf)
            return TensorKind(tuple(leaf.shape), dtype_of(leaf).name)
        try:
            hash(leaf)
        except TypeError:
            raise TPUValidationError(
                f"{self._name} was given a {type(leaf).__name__}, which is neither a tensor nor a "
                "plain value; pass tensors, numbers, texts, and lists or dicts of them."
            ) from None
        return ConstantArgument(type(leaf), leaf)


def forward_signature(module: Any) -> inspect.Signature:
    """Return what a module's own forward takes; a prepared one takes anything, for its own."""
    prepared = link_of(module) is not None
    forward = type(module).__bases__[1].forward if prepared else type(module).forward
    # A forward that somebody put on the instance goes before that of the class.
    return inspect.signature(vars(module).get("forward") or forward.__get__(module))


def find_changes(old: CallKind, new: CallKind) -> list[ArgumentChange]:
    """Every argument in which two kinds of calls differ; the module's mode is none."""
    before, after = old.describe(), new.describe()
    return [
        ArgumentChange(path=path, old=before.get(path), new=after.get(path))
        for path in (*before, *(path for path in after if path not in before))
        if before.get(path) != after.get(path)
    ]


def as_arguments(sample_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read sample inputs: a tensor is the one argument, a list or tuple all, a dict is by name."""
    if isinstance(sample_inputs, Mapping):
        return (), dict(sample_inputs)  # pyright: ignore[reportUnknownVariableType]  names are text
    if isinstance(sample_inputs, tuple | list):
        return tuple(sample_inputs), {}
    return (sample_inputs,), {}
