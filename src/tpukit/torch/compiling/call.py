"""One call of a module: its tensors, and everything else that decides which program runs."""

import inspect
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ...annotations import PyTree
from ...errors import TPUModelError, TPUValidationError
from ...models.adapters.protocol import ModelInputs, Variables
from ...models.adapters.torch_module.adapter import TorchAdapter, TorchModel
from ...models.adapters.torch_module.arrays import dtype_of
from ...models.adapters.torch_module.environment import torch_trees
from ...models.execution import Execution
from ...training.recompile import ArgumentChange
from ..border import tensor_of
from ..prepared import link_of

if TYPE_CHECKING:
    import torch

_LOSE_PRECISION = {"torch.float64", "torch.complex128"}


@dataclass(frozen=True)
class CallKind:
    """The properties that calls of one program have in common.

    Attributes:
        tree: Structure of the arguments, as a torch pytree, which supports Hugging Face classes.
        leaves: Shape and dtype of each tensor, or the value of any other leaf.
        training: For each submodule, whether it is in training mode.
    """

    tree: PyTree
    leaves: "tuple[TensorKind | ConstantArgument, ...]"
    training: tuple[bool, ...]

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the tensors, in the order of `ModuleCall.tensors`."""
        return [
            jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype))
            for leaf in self.leaves
            if isinstance(leaf, TensorKind)
        ]

    def arguments(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """Return the arguments of the module's forward by name, with these tensors in them."""
        trees = torch_trees()

        rest = iter(tensors)
        filled = [
            leaf.value if isinstance(leaf, ConstantArgument) else next(rest) for leaf in self.leaves
        ]
        return trees.tree_unflatten(filled, self.tree)

    def describe(self) -> dict[str, str]:
        """Return each argument as text: `input` is `float32[8,64]`, `use_cache` is `False`."""
        trees = torch_trees()

        named = trees.tree_unflatten(list(self.leaves), self.tree)
        paths: Any = trees.tree_flatten_with_path(named)[0]
        # The first part of a path is the argument's name.
        return {path[0].key + trees.keystr(path[1:]): str(leaf) for path, leaf in paths}


@dataclass(frozen=True)
class TensorKind:
    """Shape and dtype of a tensor as an array."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class ConstantArgument:
    """An argument that is not a tensor; its value is part of the program.

    The type counts too, because 1, 1.0 and True are equal but make different programs.
    """

    kind: type
    value: Hashable

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class ModuleCall:
    """One call: its kind and its tensors."""

    kind: CallKind
    tensors: list[Any]

    def narrowed(self) -> list[str]:
        """Return the dtypes of tensors that lose precision, because jax uses 32 bits."""
        return sorted({str(tensor.dtype) for tensor in self.tensors} & _LOSE_PRECISION)


class CallReader:
    """Reads the calls of one module."""

    def __init__(self, module: "torch.nn.Module") -> None:
        self._name = type(module).__name__
        self._parts = list(module.modules())
        self._signature = forward_signature(module)
        # No program can return the tensors of a KV cache.
        self._spares_cache = "use_cache" in self._signature.parameters

    def read(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> ModuleCall:
        """Separate a call's tensors from its other arguments.

        Raises:
            TPUValidationError: The module's forward does not accept the arguments, or one of them
                is neither a tensor nor hashable.
        """
        trees = torch_trees()

        if self._spares_cache:
            options = {"use_cache": False, **options}
        try:
            bound = self._signature.bind(*arguments, **options)
        except TypeError as error:
            raise TPUValidationError(
                f"{self._name} does not accept these arguments: {error}; its forward takes "
                f"{self._signature}."
            ) from None
        leaves, tree = trees.tree_flatten(dict(bound.arguments))
        tensors: list[Any] = []
        kinds = tuple(self._kind(leaf, tensors) for leaf in leaves)
        training = tuple(part.training for part in self._parts)
        return ModuleCall(CallKind(tree, kinds, training), tensors)

    def call(self, module: "torch.nn.Module", arguments: dict[str, Any]) -> PyTree:
        """Call the module with arguments by name, positional or not."""
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
                    "use compile_for to check shapes only."
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


def forward_signature(module: "torch.nn.Module") -> inspect.Signature:
    """Return the signature of a module's own forward, also of a prepared module."""
    is_prepared = link_of(module) is not None
    forward = type(module).__bases__[1].forward if is_prepared else type(module).forward
    # A forward on the instance goes before that of the class.
    return inspect.signature(vars(module).get("forward") or forward.__get__(module))


def find_changes(old: CallKind, new: CallKind) -> list[ArgumentChange]:
    """Return every argument in which two kinds of calls differ; training mode is ignored."""
    before, after = old.describe(), new.describe()
    return [
        ArgumentChange(path=path, old=before.get(path), new=after.get(path))
        for path in (*before, *(path for path in after if path not in before))
        if before.get(path) != after.get(path)
    ]


def as_arguments(sample_inputs: PyTree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert sample inputs, a tensor, tuple, list or dict, to positional and keyword arguments."""
    if isinstance(sample_inputs, Mapping):
        return (), dict(sample_inputs)  # pyright: ignore[reportUnknownVariableType]  names are text
    if isinstance(sample_inputs, tuple | list):
        return tuple(sample_inputs), {}
    return (sample_inputs,), {}


Arrays = dict[str, jax.Array]
_PLAIN = (bool, int, float, str, type(None))
_TENSOR = object()  # marks the position of a tensor


@dataclass(frozen=True)
class Result:
    """Structure of a forward's outputs, with the values that are not tensors."""

    tree: PyTree
    leaves: tuple[PyTree, ...]

    def outputs(self, arrays: Sequence[jax.Array]) -> PyTree:
        """Return the outputs as the module returns them, with torch tensors."""
        trees = torch_trees()

        rest = iter(arrays)
        filled = [tensor_of(next(rest)) if leaf is _TENSOR else leaf for leaf in self.leaves]
        return trees.tree_unflatten(filled, self.tree)


class ForwardFunction:
    """A module's forward, for one kind of call, as a pure function of arrays.

    Attributes:
        kind: The kind of call.
        traces: How often it was traced.
        result: Structure of the outputs, known after a trace.
        written: Paths of the tensors that the forward changes, known after a trace.
    """

    def __init__(self, module: "torch.nn.Module", reader: CallReader, kind: CallKind) -> None:
        self.traces = 0
        self.result: Result | None = None
        self.written: tuple[str, ...] = ()
        self._reader, self.kind = reader, kind
        self._name = type(module).__name__
        self._adapter = TorchAdapter(TorchModel(module, self._forward), ModelInputs((), {}))

    def __call__(
        self, trained: Arrays, carried: Arrays, seed: jax.Array, tensors: list[jax.Array]
    ) -> tuple[list[jax.Array], Arrays]:
        """Return the output tensors and the changed state."""
        self.traces += 1
        applied = self._adapter.apply(
            Variables(trained, carried),
            {str(number): tensor for number, tensor in enumerate(tensors)},
            rng=jax.random.key(seed),
            execution=Execution(),
        )
        written = {
            path: new for path, new in applied.model_state.items() if new is not carried[path]
        }
        self.written = tuple(written)
        return applied.outputs, written

    def _forward(self, module: "torch.nn.Module", batch: Mapping[str, PyTree]) -> list[Any]:
        import torch

        trees = torch_trees()

        outputs = self._reader.call(module, self.kind.arguments(list(batch.values())))
        leaves, tree = trees.tree_flatten(outputs)
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                raise TPUModelError(
                    f"{self._name} returns a {type(leaf).__name__}, whose tensors cannot leave a "
                    "compiled program; return tensors in tuples, lists, dicts or a Hugging Face "
                    "output (with use_cache=False)."
                )
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        marked = (_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        self.result = Result(tree, tuple(marked))
        return tensors


def is_needed(jaxpr: Any, argument: int) -> bool:
    """Return whether the results of a traced program depend on an argument, given by index."""
    needed = set(map(id, jaxpr.outvars))
    for equation in reversed(jaxpr.eqns):
        if equation.effects or any(id(var) in needed for var in equation.outvars):
            needed.update(map(id, equation.invars))
    return id(jaxpr.invars[argument]) in needed
