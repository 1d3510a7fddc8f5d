"""Gradient checkpoints between the layers that a module keeps in its lists."""

from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax

from ...remat.policy import RematPolicy
from .environment import environment
from .nesting import Nesting, take_apart
from .randomness import next_key


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
        here = environment()
        tensors, nesting = take_apart((arguments, options))
        # What the layer writes to must leave the segment as a result, or a tracer would escape.
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
