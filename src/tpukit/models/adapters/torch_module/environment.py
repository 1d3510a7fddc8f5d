"""The torchax environment: imported late, with our lowerings, one per process."""

import functools
import os
import sys
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import jax

from ....annotations import PyTree
from ....errors import MissingExtraError, TPUNotAvailableError
from .arrays import to_array

EXTRA = "torch"


def require_torch(needed_for: str) -> Any:
    """Import torch.

    Raises:
        MissingExtraError: It is not installed.
    """
    if find_spec("torch") is None:
        raise MissingExtraError(EXTRA, needed_for=needed_for, module="torch")
    import torch

    return torch


def torch_trees() -> Any:
    """Return torch's module for nested containers, which supports Hugging Face's outputs too."""
    from torch.utils import _pytree  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]  torch has no other

    return _pytree


def torch_tpu_is_installed() -> bool:
    """Whether Google's torch backend for TPUs is installed; it works on a TPU only."""
    return find_spec("torch_tpu") is not None


@functools.cache
def environment() -> Any:
    """Return the one torchax environment, with our lowerings in it.

    Raises:
        MissingExtraError: torchax is not installed.
        TPUNotAvailableError: Another backend has registered torch's custom device already.
    """
    require_torch("a PyTorch model")
    if find_spec("torchax") is None:
        raise MissingExtraError(EXTRA, needed_for="a PyTorch model", module="torchax")
    _refuse_clash()
    # torchax enables libtpu's usage reports by default; they are off unless the user enables them.
    os.environ.setdefault("ENABLE_RUNTIME_UPTIME_TELEMETRY", "0")
    import torchax

    from . import lowerings
    from .lowerings.losses import let_modes_see_flatten

    environment = torchax.default_env()
    _lift_constants(environment)
    lowerings.install(environment)
    let_modes_see_flatten()
    return environment


@contextmanager
def running(key: jax.Array) -> Generator[Any]:
    """Run torch code on jax arrays; all random numbers come from `key`."""
    here = environment()
    import torch

    from .lowerings.losses import make_mode

    with warnings.catch_warnings():
        # torch has 64-bit integers and jax 32-bit ones; inputs are narrowed once, by us.
        warnings.filterwarnings("ignore", message="Explicitly requested dtype.*(int64|float64)")
        # Tensors that a forward creates without a device belong on this device too.
        with here, here.override_property(prng=key), torch.device("jax"), make_mode(here):
            yield here


def _lift_constants(environment: Any) -> None:
    """Convert plain torch tensors to constants, as in eager torch.

    torchax rejects such tensors, for example a table that a module keeps in a list.
    """
    import torch

    unwrap = environment.t2j_iso

    def lifted(tensor: Any) -> Any:
        plain = not isinstance(tensor, torchax_types) and not tensor.is_meta
        return environment.j2t_iso(to_array(tensor)) if plain else tensor

    trees = torch_trees()
    from torchax.tensor import Tensor, View

    torchax_types = (Tensor, View)
    environment.t2j_iso = lambda tree: unwrap(trees.tree_map_only(torch.Tensor, lifted, tree))


def _refuse_clash() -> None:
    """Raise an error where torch_tpu has registered its device already.

    Both need torch's one custom device, and the second registration would fail.
    """
    from torch._C import _get_privateuse1_backend_name  # pyright: ignore[reportPrivateUsage]  no public way to ask

    taken = _get_privateuse1_backend_name()
    if taken not in ("privateuseone", "jax") and "torchax" not in sys.modules:
        raise TPUNotAvailableError(
            f"torch's custom device is taken by '{taken}' (torch_tpu), but torchax needs it; start "
            "Python with TORCH_DEVICE_BACKEND_AUTOLOAD=0, or train with torch_tpu itself from the "
            "files that tpukit.torch.write_handover made."
        )


def next_key() -> jax.Array:
    """Return a new key for one random operation."""
    return environment().get_and_rotate_prng_key()


# Types that are constant in a program. Other values in a result, except tensors, are dropped,
# because they may contain tensors that must not leave the program, such as a KV cache.
PLAIN = (bool, int, float, complex, str)


class Nesting:
    """The structure of nested containers with tensors, and their other values.

    Two are equal if they have the same structure and equal other values.
    """

    def __init__(self, tree: PyTree, others: Sequence[Any], is_tensor: Sequence[bool]) -> None:
        self._tree, self._others, self._is_tensor = tree, others, is_tensor
        self._key = (str(tree), repr(others), tuple(is_tensor))

    def rebuild(self, tensors: Sequence[Any]) -> Any:
        """Return the containers with these tensors."""
        left = iter(tensors)
        filled = [
            next(left) if yes else other
            for yes, other in zip(self._is_tensor, self._others, strict=True)
        ]
        return torch_trees().tree_unflatten(filled, self._tree)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Nesting) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def take_apart(
    nested: Any, kind: type | None = None, *, only_plain: bool = False
) -> tuple[list[Any], Nesting]:
    """Return the tensors in nested containers, and the structure to rebuild them.

    Args:
        nested: Lists, tuples, dicts and other containers of torch.
        kind: The class of tensors; torch's own by default.
        only_plain: Whether values that are neither tensors nor plain become None.
    """
    import torch

    kind = torch.Tensor if kind is None else kind
    leaves, tree = torch_trees().tree_flatten(nested)
    is_tensor = [isinstance(leaf, kind) for leaf in leaves]
    others = [
        None if yes or (only_plain and not isinstance(leaf, PLAIN)) else leaf
        for leaf, yes in zip(leaves, is_tensor, strict=True)
    ]
    tensors = [leaf for leaf, yes in zip(leaves, is_tensor, strict=True) if yes]
    return tensors, Nesting(tree, others, is_tensor)
