"""torchax as this package uses it: imported late, with our lowerings, one environment for all."""

import functools
import os
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import jax

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
    """Return torch's module for nested containers, which knows Hugging Face's outputs too."""
    from torch.utils import _pytree  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]  torch has no other

    return _pytree


def torch_tpu_is_installed() -> bool:
    """Whether Google's own torch backend for TPUs is here; it needs a TPU to do anything."""
    return find_spec("torch_tpu") is not None


@functools.cache
def environment() -> Any:
    """Return the one torchax environment, with our lowerings in it.

    Raises:
        MissingExtraError: torchax is not installed.
        TPUNotAvailableError: Another backend took torch's one free place before.
    """
    require_torch("a PyTorch model")
    if find_spec("torchax") is None:
        raise MissingExtraError(EXTRA, needed_for="a PyTorch model", module="torchax")
    _refuse_clash()
    # torchax turns on libtpu's usage reports where nobody decided; here nobody asked for them.
    os.environ.setdefault("ENABLE_RUNTIME_UPTIME_TELEMETRY", "0")
    import torchax

    from . import lowerings
    from .vocabulary import let_modes_see_flatten

    environment = torchax.default_env()
    _lift_constants(environment)
    lowerings.install(environment)
    let_modes_see_flatten()
    return environment


@contextmanager
def running(key: jax.Array) -> Generator[Any]:
    """Run torch code on jax arrays; random numbers come from `key`, and from nowhere else."""
    here = environment()
    import torch

    from .vocabulary import make_mode

    with warnings.catch_warnings():
        # torch's whole numbers have 64 bits and jax's 32: narrowed on the way in, once, by us.
        warnings.filterwarnings("ignore", message="Explicitly requested dtype.*(int64|float64)")
        # Tensors that a forward makes for itself, without a word about devices, belong here too.
        with here, here.override_property(prng=key), torch.device("jax"), make_mode(here):
            yield here


def _lift_constants(environment: Any) -> None:
    """Let tensors that are not jax's take part as constants, as they do in eager torch.

    torchax refuses them; a table that a module keeps in a list, say, is one.
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
    """Refuse to load torchax where torch_tpu has registered its device already.

    Both claim the one device name that torch leaves to others, and the second one fails.
    """
    from torch._C import _get_privateuse1_backend_name  # pyright: ignore[reportPrivateUsage]  no public way to ask

    taken = _get_privateuse1_backend_name()
    if taken not in ("privateuseone", "jax") and "torchax" not in sys.modules:
        raise TPUNotAvailableError(
            f"torch's custom device is taken by '{taken}' (torch_tpu), and torchax needs it; start "
            "Python with TORCH_DEVICE_BACKEND_AUTOLOAD=0, or train with torch_tpu itself from the "
            "files that tpukit.torch.write_handover made."
        )
