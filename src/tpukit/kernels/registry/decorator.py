"""`@tpu_kernel` and `@register_tpu_op`: anyone's function or Pallas kernel becomes an op."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, overload

from ...errors import TPUKernelError, did_you_mean
from .op import Op
from .registry import add_op
from .user_kernel import Function, TpuKernel

_FUNCTIONS = ("on_tpu", "on_gpu", "gradient", "default_blocks", "block_space", "vmem_bytes")


@overload
def tpu_kernel(function: Function, **settings: Any) -> TpuKernel: ...
@overload
def tpu_kernel(function: None = None, **settings: Any) -> Callable[[Function], TpuKernel]: ...
def tpu_kernel(
    function: Function | None = None, **settings: Any
) -> TpuKernel | Callable[[Function], TpuKernel]:
    """Make a function an op: `@tpu_kernel`, or `@tpu_kernel(precision=PrecisionConfig.HIGH)`.

    The function is the reference: it runs wherever no better implementation is given, and gives
    the gradient of those that have none.

    Args:
        function: Plain jax of arrays; keyword arguments are static.
        **settings: Any of
            name: What profiles and the registry call it; by default the function's name.
            on_tpu: A function of the same arguments for TPU, such as a Pallas kernel; with
                `default_blocks` it is given `blocks=` too.
            on_gpu: The same for NVIDIA GPUs.
            precision: A `PrecisionConfig` or the name of one: arguments are cast to it, results
                cast back.
            use_efficient_attention: A promise that is checked when it is traced: attention
                inside never holds all scores at once. `flash_attention` keeps it on every
                platform; `jax.nn.dot_product_attention` is left as it is, and refused.
            pad_to_tiles: Arrays are padded with zeros to whole tiles, results cut back to the
                shapes that the function gives without. For functions whose result zeros beyond
                the end do not change: elementwise ones and products, not a mean.
            gradient: `f(arrays, cotangent, **options)` -> a gradient for each array.
            cases: Shapes for the static timer and the tuner.
            default_blocks: (case, chip or None) -> the blocks where nobody has tuned.
            block_space: (case, chip) -> the blocks that the tuner tries.
            vmem_bytes: (case, blocks) -> what they take; more than the chip has is refused.
            splits: A `Splits`: which dimensions kernels may be given pieces of where arrays lie on
                a mesh; without it they are given whole arrays.

    Raises:
        TPUKernelError: Settings that contradict each other, or an unknown precision.
    """
    _check_settings(settings)
    return functools.partial(_made, **settings) if function is None else _made(function, **settings)


@overload
def register_tpu_op(function: Op, *, replace: bool = False) -> Op: ...
@overload
def register_tpu_op(function: Function, *, replace: bool = False, **settings: Any) -> TpuKernel: ...
@overload
def register_tpu_op(
    function: None = None, *, replace: bool = False, **settings: Any
) -> Callable[[Function], TpuKernel]: ...
def register_tpu_op(
    function: Function | Op | None = None, *, replace: bool = False, **settings: Any
) -> Op | TpuKernel | Callable[[Function], TpuKernel]:
    """Make an op known by name to `get_tpu_op`, the static timer and the tuner.

    Args:
        function: A function, a `@tpu_kernel`, or an `Op`; it is returned as an op.
        replace: Whether to take the place of one registered before under the name.
        **settings: As for `tpu_kernel`, for a plain function.

    Raises:
        TPUKernelError: The name is taken, or settings are given for what is an op already.
    """
    if function is None:

        def register(given: Function) -> TpuKernel:
            return register_tpu_op(given, replace=replace, **settings)

        return register
    if isinstance(function, Op | TpuKernel):
        if settings:
            raise TPUKernelError(
                f"{function.name} is an op already and cannot take {', '.join(settings)}; give "
                "them where it is made."
            )
        made = function
    else:
        made = tpu_kernel(function, **settings)
    add_op(made.op if isinstance(made, TpuKernel) else made, replace=replace)
    return made


def _made(function: Function, **settings: Any) -> TpuKernel:
    if not callable(function):
        raise TPUKernelError(f"@tpu_kernel makes an op of a function and was given {function!r}.")
    return TpuKernel(function, **settings)


def _check_settings(settings: Mapping[str, Any]) -> None:
    known = list(inspect.signature(TpuKernel).parameters)[1:]
    for name, value in settings.items():
        if name not in known:
            raise TPUKernelError(
                f"@tpu_kernel has no setting {name!r}; it has {', '.join(known)}."
                + did_you_mean(name, known)
            )
        if name in _FUNCTIONS and value is not None and not callable(value):
            raise TPUKernelError(
                f"{name}= of @tpu_kernel takes a function and was given {value!r}."
            )
