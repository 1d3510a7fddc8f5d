"""A module's forward, on one kind of call, as a pure function of arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ...errors import TPUModelError
from ...models.adapters.protocol import ModelInputs, Variables
from ...models.adapters.torch_module.adapter import TorchAdapter, TorchModel
from ...models.adapters.torch_module.arrays import to_tensor
from ...models.adapters.torch_module.environment import torch_trees
from ...models.execution import Execution
from .call import CallKind, CallReader

Arrays = dict[str, jax.Array]
_PLAIN = (bool, int, float, str, type(None))
_TENSOR = object()  # stands where a tensor was


@dataclass(frozen=True)
class Result:
    """How the outputs of a forward nest, and what in them is no tensor."""

    tree: Any
    leaves: tuple[Any, ...]

    def outputs(self, arrays: Sequence[jax.Array]) -> Any:
        """The outputs as the module gives them, with tensors of torch's own."""
        trees = torch_trees()

        rest = iter(arrays)
        filled = [_as_torch(next(rest)) if leaf is _TENSOR else leaf for leaf in self.leaves]
        return trees.tree_unflatten(filled, self.tree)


class ForwardFunction:
    """The function that is traced; it remembers what only tracing tells.

    Attributes:
        kind: The calls it is for.
        traces: How often it was traced.
        result: How the outputs nest, known after a trace.
        written: Paths of the tensors that the forward writes to, known after a trace.
    """

    def __init__(self, module: Any, reader: CallReader, kind: CallKind) -> None:
        self.traces = 0
        self.result: Result | None = None
        self.written: tuple[str, ...] = ()
        self._reader, self.kind = reader, kind
        self._name = type(module).__name__
        self._adapter = TorchAdapter(TorchModel(module, self._forward), ModelInputs((), {}))

    def __call__(
        self, trained: Arrays, carried: Arrays, seed: jax.Array, tensors: list[jax.Array]
    ) -> tuple[list[jax.Array], Arrays]:
        """Return the tensors of the outputs, and what was written to."""
        self.traces += 1
        applied = self._adapter.apply(
            Variables(trained, carried),
            {str(number): one for number, one in enumerate(tensors)},
            rng=jax.random.key(seed),
            execution=Execution(),
        )
        written = {
            path: new for path, new in applied.model_state.items() if new is not carried[path]
        }
        self.written = tuple(written)
        return applied.outputs, written

    def _forward(self, module: Any, batch: Mapping[str, Any]) -> list[Any]:
        import torch

        trees = torch_trees()

        outputs = self._reader.call(module, self.kind.arguments(list(batch.values())))
        leaves, tree = trees.tree_flatten(outputs)
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                raise TPUModelError(
                    f"{self._name} gives a {type(leaf).__name__}, whose tensors cannot leave a "
                    "compiled program; let it give tensors in tuples, lists, dicts or a "
                    "Hugging Face output (there: use_cache=False)."
                )
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        marked = (_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        self.result = Result(tree, tuple(marked))
        return tensors


def _as_torch(array: jax.Array) -> Any:
    """Return an array as torch would have it: it counts in 64 bits, and jax in 32."""
    import torch

    tensor = to_tensor(array)
    return tensor.long() if tensor.dtype == torch.int32 else tensor


def is_needed(jaxpr: Any, argument: int) -> bool:
    """Tell whether the results of a traced program depend on its argument of that number."""
    needed = set(map(id, jaxpr.outvars))
    for equation in reversed(jaxpr.eqns):
        if equation.effects or any(id(one) in needed for one in equation.outvars):
            needed.update(map(id, equation.invars))
    return id(jaxpr.invars[argument]) in needed
