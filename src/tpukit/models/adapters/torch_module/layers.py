"""Gradient checkpoints and activation shardings between the layers of a PyTorch module.

Without constraints the compiler shards activations like the weights and moves them in every layer.
A constraint after each matmul keeps the batch where it is.
"""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import jax

from ....parallel.sharding.activations import constrain, current_rules
from ....parallel.sharding.dimensions import infer_dims
from ...remat.policy import RematPolicy
from .environment import Nesting, environment, next_key, take_apart
from .state import path_of


class CheckpointedLayers:
    """A context in which every layer of a module is a checkpointed segment.

    Layers are the members of lists of modules of one class, such as the blocks of a transformer. A
    module without such a list is one segment.
    """

    def __init__(self, module: Any, remat: RematPolicy) -> None:
        self._remat = remat
        self._layers = find_layers(module) or [module] if remat.active else []

    def __enter__(self) -> None:
        for layer in self._layers:
            # Set on the instance, where it hides the class's method until it is deleted.
            layer.forward = _checkpointed(layer, layer.forward, self._remat)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for layer in self._layers:
            del layer.forward


def find_layers(module: Any) -> list[Any]:
    """Return the members of the outermost lists of at least two modules of one class."""
    import torch

    found: list[Any] = []
    inside: set[int] = set()
    for inner in module.modules():
        if id(inner) in inside or not isinstance(inner, torch.nn.ModuleList | torch.nn.Sequential):
            continue
        members = list(inner)
        if len(members) > 1 and len({type(one) for one in members}) == 1 and _has_inner(members[0]):
            found += members
            inside |= {id(deep) for one in members for deep in one.modules()}
    return found


def _has_inner(layer: Any) -> bool:
    """Whether a layer has children; a list of plain linear modules is not a list of layers."""
    return any(True for _ in layer.children())


def _checkpointed(layer: Any, forward: Callable[..., Any], remat: RematPolicy) -> Any:
    def run(*arguments: Any, **options: Any) -> Any:
        here = environment()
        tensors, nesting = take_apart((arguments, options))
        # Changed buffers must leave the segment as results, or tracers would escape.
        buffers = dict(layer.named_buffers())
        result_nesting: list[Nesting] = []

        def segment(key: jax.Array, held: Any, given: list[jax.Array]) -> Any:
            inner_arguments, inner_options = nesting.rebuild(here.j2t_iso(given))
            for name, value in held.items():
                buffers[name]._elem = value
            with here.override_property(prng=key):
                result = forward(*inner_arguments, **inner_options)
            flat, found = take_apart(result, only_plain=True)
            result_nesting[:] = [found]
            written = {name: one._elem for name, one in buffers.items()}
            return here.t2j_iso(flat), written

        held = {name: one._elem for name, one in buffers.items()}
        flat, written = remat.wrap(segment)(next_key(), held, here.t2j_iso(tensors))
        for name, value in written.items():
            buffers[name]._elem = value
        return result_nesting[0].rebuild(here.j2t_iso(flat))

    return run


Dims = tuple[str | None, ...]
_TOKENS: Dims = ("batch", "sequence")
# Names of the numbers of heads in Hugging Face's configurations.
_HEADS = {
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_attention_heads", "n_head", "num_heads"),
}


class PlacedActivations:
    """A context that constrains the outputs of a module's embeddings, linear modules and layers."""

    def __init__(self, module: Any) -> None:
        self._dims = {} if current_rules() is None else _dims_of_outputs(module)
        self._hook: Any = None

    def __enter__(self) -> None:
        if not self._dims:
            return
        from torch.nn.modules.module import register_module_forward_hook

        self._hook = register_module_forward_hook(self._place)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _place(self, module: Any, inputs: Any, output: Any) -> Any:
        last = self._dims.get(id(module))
        if last is None:
            return None
        if isinstance(output, tuple):
            return (_placed(output[0], last), *output[1:])
        return _placed(output, last)


def count_heads(module: Any) -> dict[str, int] | None:
    """Return the numbers of heads of a Hugging Face model, or None for other models."""
    config = getattr(module, "config", None)
    found: dict[str, int] = {}
    for dimension, names in _HEADS.items():
        counts = [getattr(config, name, None) for name in names]
        count = next((one for one in counts if isinstance(one, int)), None)
        if count is not None:
            found[dimension] = count
    return found or None


def _placed(output: Any, last: str) -> Any:
    import torch

    if not isinstance(output, torch.Tensor) or output.dim() < 2:
        return output
    rank = output.dim()
    names: Mapping[int, Dims] = {2: ("batch", last), 3: (*_TOKENS, last)}
    dims = names.get(rank, ("batch", *(None,) * (rank - 1)))
    here = environment()
    return here.j2t_iso(constrain(here.t2j_iso(output), *dims))


def _dims_of_outputs(module: Any) -> dict[int, str]:
    """Return the name of the last output dimension of each inner module, by its id."""
    import torch

    found = {id(layer): "embed" for layer in find_layers(module)}
    heads = count_heads(module) or {}
    nn = torch.nn
    kept = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    for name, inner in module.named_modules():
        if isinstance(inner, kept):
            found[id(inner)] = "embed"
        elif isinstance(inner, nn.Linear):
            dims, guessed = infer_dims(path_of(f"{name}.weight"), tuple(inner.weight.shape))
            # Heads can be sharded only where their number is known.
            known = dims[0] not in ("heads", "kv_heads") or dims[0] in heads
            if dims[0] is not None and not guessed and known:
                found[id(inner)] = dims[0]
    return found
