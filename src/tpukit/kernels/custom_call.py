"""`custom_call`: compiled code of the user's inside a jax program, over `jax.ffi`."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import ArrayLike

from ..annotations import PyTree
from ..errors import TPUKernelError, did_you_mean

# Platform names, and what XLA's target registry calls them.
_PLATFORMS = {"cpu": "cpu", "gpu": "CUDA", "cuda": "CUDA", "rocm": "ROCM", "tpu": "tpu"}


def custom_call(
    name: str,
    inputs: ArrayLike | Sequence[ArrayLike],
    platform: str | None = None,
    *,
    result: PyTree | None = None,
    **attributes: Any,
) -> PyTree:
    """Call a target that was registered with `jax.ffi.register_ffi_target`.

    Args:
        name: The target's name.
        inputs: An array, or several in the target's order.
        platform: Platform of the program: "cpu", "gpu" or "tpu"; None takes jax's default.
        result: Shape and dtype of the result, or a sequence of them (`jax.ShapeDtypeStruct`); None
            means those of the first input.
        **attributes: Further arguments of the target, as numpy scalars and strings.

    Returns:
        The target's result.

    Raises:
        TPUKernelError: No such target is registered for the platform.

    Example:
        >>> jax.ffi.register_ffi_target("my_custom_op", jax.ffi.pycapsule(library.MyOp), "cpu")
        >>> custom_call("my_custom_op", x, platform="cpu")
    """
    arrays = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
    if not arrays:
        raise TPUKernelError(f"custom_call({name!r}) was given no inputs; give at least one array.")
    wanted = platform or jax.default_backend()
    _check_target(name, wanted)
    first: Any = jax.typeof(jax.numpy.asarray(arrays[0]))
    shapes = jax.ShapeDtypeStruct(first.shape, first.dtype) if result is None else result
    call = jax.ffi.ffi_call(name, shapes, vmap_method="sequential")
    return call(*arrays, **attributes)


def _check_target(name: str, platform: str) -> None:
    """Refuse a target that would fail in the compiler or at run time."""
    # The only list of targets.
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    if platform.lower() not in _PLATFORMS:
        raise TPUKernelError(
            f"platform={platform!r} is unknown; expected one of {', '.join(_PLATFORMS)}."
            + did_you_mean(platform, _PLATFORMS)
        )
    known = xla_client.custom_call_targets(_PLATFORMS[platform.lower()])
    if name in known:
        return
    if platform.lower() == "tpu":
        way_out = (
            "libtpu runs no foreign compiled code: write it in Pallas and register it with "
            "@register_tpu_op(on_tpu=…)"
        )
    else:
        way_out = (
            f"register it first: jax.ffi.register_ffi_target({name!r}, capsule, "
            f"platform={platform!r})"
        )
    raise TPUKernelError(
        f"no custom call {name!r} is registered for {platform}; {way_out}."
        + did_you_mean(name, known)
    )
