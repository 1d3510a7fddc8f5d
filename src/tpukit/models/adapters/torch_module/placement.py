"""Where a module's activations live on a mesh: they follow the meaning of the weights they meet.

Without a word about them the compiler splits activations as the weights lie, and moves them in
every layer; a word after each product keeps the batch where it is.
"""

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from ....parallel.sharding.activations import constrain, current_rules
from ....parallel.sharding.dimensions import infer_dims
from .environment import environment
from .layers import find_layers
from .state import path_of

Dims = tuple[str | None, ...]
_TOKENS: Dims = ("batch", "sequence")
# What Hugging Face's configurations call the numbers of heads.
_HEADS = {
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_attention_heads", "n_head", "num_heads"),
}


class PlacedActivations:
    """While it is open, the outputs of a module's embeddings, products and layers are placed."""

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
    """Return how many heads a Hugging Face model has, so that none is cut; None of others."""
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
    """Return the meaning of the last dimension of what each inner module gives, by its id."""
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
            # Several elements make a head, and only whole ones may be split off.
            known = dims[0] not in ("heads", "kv_heads") or dims[0] in heads
            if dims[0] is not None and not guessed and known:
                found[id(inner)] = dims[0]
    return found
