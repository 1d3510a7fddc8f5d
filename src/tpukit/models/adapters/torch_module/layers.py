"""Gradient checkpoints between the layers that a module keeps in its lists."""

from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax

from ...remat.policy import RematPolicy
from .environment import environment, torch_trees
from .randomness import next_key

_PLAIN = (bool, int, float, complex, str)


class CheckpointedLayers:
    """While it is open, every layer of a module's lists is one checkpointed segment.

    A list counts whose members are modules of one class, as the blocks of a transformer are. Of a
    module without such a list, the whole is one segment.
    """

    def __init__(self, module: Any, remat: RematPolicy) -> None:
        self._remat = remat
        self._layers = find_layers(module) or [module] if remat.active else []

    def __enter__(self) -> None:
        for layer in self._layers:
            # On the instance: it hides the class's own, and taking it away brings that back.
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
    """Return the members of every list of at least two modules of one class, outermost lists."""
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
    """Whether a layer is made of others; a list of single products is no list of layers."""
    return any(True for _ in layer.children())


def _checkpointed(layer: Any, forward: Callable[..., Any], remat: RematPolicy) -> Any:
    def run(*arguments: Any, **options: Any) -> Any:
        import torch

        trees = torch_trees()

        here = environment()
        leaves, tree = trees.tree_flatten((arguments, options))
        is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        tensors = [leaf for leaf, yes in zip(leaves, is_tensor, strict=True) if yes]
        # What the layer writes to must leave the segment as a result, or a tracer would escape.
        buffers = dict(layer.named_buffers())
        shape_of_result: list[Any] = []

        def segment(key: jax.Array, held: Any, given: list[jax.Array]) -> Any:
            arrays = iter(here.j2t_iso(given))
            filled = [
                next(arrays) if yes else leaf for leaf, yes in zip(leaves, is_tensor, strict=True)
            ]
            inner_arguments, inner_options = trees.tree_unflatten(filled, tree)
            for name, value in held.items():
                buffers[name]._elem = value
            with here.override_property(prng=key):
                result = forward(*inner_arguments, **inner_options)
            flat, result_tree = trees.tree_flatten(result)
            is_array = [isinstance(one, torch.Tensor) for one in flat]
            # A cache of keys and values holds arrays of the segment, which must not escape it.
            others = [one if isinstance(one, _PLAIN) else None for one in flat]
            shape_of_result[:] = [result_tree, is_array, others]
            written = {name: one._elem for name, one in buffers.items()}
            kept = [one for one, yes in zip(flat, is_array, strict=True) if yes]
            return here.t2j_iso(kept), written

        held = {name: one._elem for name, one in buffers.items()}
        flat, written = remat.wrap(segment)(next_key(), held, here.t2j_iso(tensors))
        for name, value in written.items():
            buffers[name]._elem = value
        result_tree, is_array, others = shape_of_result
        arrays = iter(here.j2t_iso(flat))
        whole = [next(arrays) if yes else one for one, yes in zip(others, is_array, strict=True)]
        return trees.tree_unflatten(whole, result_tree)

    return run
