"""`@tpu_kernel` and `@register_tpu_op`: turn any function or Pallas kernel into an op."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, overload

import jax
from jax.extend import core

from ...annotations import PyTree
from ...errors import TPUKernelError, did_you_mean
from ...hardware.target import current_target
from ...plain_data import JsonMapping
from ..blocks.tiling import call_padded
from ..blocks.tuned import choose_blocks
from ..blocks.vmem import check_vmem
from ..partition.splits import Splits
from ..precision import PrecisionConfig
from .dispatch import Passes, dispatch, dispatch_with_gradient, recomputed
from .op import ON_GPU, PALLAS_TPU, REFERENCE, Blocks, BlockSizes, KernelCase, Op, shape_text
from .registry import add_op

Function = Callable[..., PyTree]
Gradient = Callable[..., tuple[PyTree, ...]]
_FUNCTIONS = ("on_tpu", "on_gpu", "gradient", "default_blocks", "block_space", "vmem_bytes")
# Scores of S tokens with heads of D outweigh queries, keys, values and result S / 4D times.
TOO_MANY_TIMES = 4


class TpuKernel:
    """An op made of a function; call it like the function.

    Positional arguments are arrays (or trees of them), keywords are static options, and
    `implementation=` and `blocks=` are as for built-in ops. The static timer and the tuner take
    the attribute `op`.
    """

    def __init__(
        self,
        function: Function,
        *,
        name: str | None = None,
        on_tpu: Function | None = None,
        on_gpu: Function | None = None,
        precision: PrecisionConfig | str | None = None,
        use_efficient_attention: bool = False,
        pad_to_tiles: bool = False,
        gradient: Gradient | None = None,
        cases: Iterable[KernelCase] = (),
        default_blocks: Callable[[KernelCase, str | None], BlockSizes] | None = None,
        block_space: Callable[[KernelCase, str], Iterable[Blocks]] | None = None,
        vmem_bytes: Callable[[KernelCase, Any], int] | None = None,
        splits: Splits | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.precision = None if precision is None else PrecisionConfig.parse(precision)
        self.use_efficient_attention = use_efficient_attention
        self.pad_to_tiles = pad_to_tiles
        if default_blocks is None and (block_space or vmem_bytes):
            raise TPUKernelError(
                f"{self.name} was given block_space= or vmem_bytes= without default_blocks=; give "
                "the blocks to use where there are no tuned ones."
            )
        self._default_blocks = default_blocks
        self._gradient = gradient
        self._splits = splits or Splits()
        named = {REFERENCE: function, PALLAS_TPU: on_tpu, ON_GPU: on_gpu}
        self._functions = {key: value for key, value in named.items() if value is not None}
        self.op = Op(
            name=self.name,
            function=self,
            implementations={
                key: functools.partial(self, implementation=key) for key in self._functions
            },
            cases=tuple(cases),
            block_space=block_space or self._only_default,
            vmem_bytes=vmem_bytes or _no_vmem,
            default_blocks=default_blocks or _no_blocks,
            splits=self._splits,
        )

    def __repr__(self) -> str:
        return f"tpu_kernel({self.name!r}: {', '.join(self._functions)})"

    def __call__(
        self,
        *arrays: PyTree,
        implementation: str | None = None,
        blocks: Blocks | None = None,
        **options: Any,
    ) -> PyTree:
        """Run the implementation of the platform the program is lowered for, or a named one.

        Raises:
            TPUKernelError: There is no such implementation, the blocks do not fit, or the target
                generation lacks the precision.
        """
        if self.precision is not None:
            self.precision.check(current_target())

        def call(*arrays: PyTree) -> PyTree:
            return self._dispatch(arrays, implementation, blocks, options)

        if self.use_efficient_attention:
            refuse_all_scores(self.name, call, *arrays)
        if self.precision is not None:
            return self.precision.apply(call, *arrays)
        return call(*arrays)

    def _dispatch(
        self,
        arrays: tuple[PyTree, ...],
        implementation: str | None,
        blocks: Blocks | None,
        options: Mapping[str, Any],
    ) -> PyTree:
        choice: dict[str, Any] = {
            "implementation": implementation,
            "on_tpu": PALLAS_TPU if PALLAS_TPU in self._functions else REFERENCE,
            "on_gpu": ON_GPU if ON_GPU in self._functions else REFERENCE,
            "options": options,
            "own_precision": False,
        }
        functions = {key: self._prepared(value) for key, value in self._functions.items()}
        if PALLAS_TPU in functions and self._default_blocks is not None:
            choice["pallas_options"] = {"blocks": blocks or self._choose_blocks(arrays, options)}
            self._check_blocks(arrays, options, choice["pallas_options"]["blocks"])
        elif blocks is not None:
            raise TPUKernelError(
                f"{self.name} takes no blocks=, but got some; give it on_tpu= and default_blocks= "
                "where it is defined."
            )
        if self._gradient is None and len(functions) == 1:
            return dispatch(self.name, functions, *arrays, **choice)
        # A kernel's gradient is computed from its arguments.
        splits = replace(self._splits, residuals=self._splits.arguments)
        return dispatch_with_gradient(
            self.name, self._passes(functions), *arrays, splits=splits, **choice
        )

    def _passes(self, functions: Mapping[str, Function]) -> dict[str, Passes]:
        """Give every implementation the user's gradient, or else the reference's."""
        reference, gradient = recomputed(functions[REFERENCE]), self._gradient

        def backward(residuals: PyTree, cotangent: PyTree, **options: Any) -> tuple[PyTree, ...]:
            if gradient is not None:
                return gradient(residuals, cotangent, **options)
            options.pop("blocks", None)
            return reference.backward(residuals, cotangent, **options)

        return {
            key: Passes(recomputed(value).forward, backward) for key, value in functions.items()
        }

    def _prepared(self, function: Function) -> Function:
        if not self.pad_to_tiles:
            return function
        return functools.partial(call_padded, self._functions[REFERENCE], function)

    def _case(self, arrays: tuple[PyTree, ...], options: Mapping[str, Any]) -> KernelCase:
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arrays)]
        return KernelCase("traced", tuple(shapes), options)

    def _choose_blocks(self, arrays: tuple[PyTree, ...], options: Mapping[str, Any]) -> BlockSizes:
        assert self._default_blocks is not None
        return choose_blocks(self.name, self._case(arrays, options), self._default_blocks)

    def _check_blocks(
        self, arrays: tuple[PyTree, ...], options: Mapping[str, Any], blocks: Blocks
    ) -> None:
        chip = current_target()
        if chip is not None:
            check_vmem(self.op, self._case(arrays, options), blocks, chip)

    def _only_default(self, case: KernelCase, chip: str) -> tuple[Blocks, ...]:
        return (self.op.default_blocks(case, chip),)


@overload
def tpu_kernel(function: Function, **settings: Any) -> TpuKernel: ...
@overload
def tpu_kernel(function: None = None, **settings: Any) -> Callable[[Function], TpuKernel]: ...
def tpu_kernel(
    function: Function | None = None, **settings: Any
) -> TpuKernel | Callable[[Function], TpuKernel]:
    """Turn a function into an op: `@tpu_kernel`, `@tpu_kernel(precision=PrecisionConfig.HIGH)`.

    The function is the reference. It runs on platforms without an implementation of their own, and
    its gradient serves implementations that have none.

    Args:
        function: Plain jax of arrays; keyword arguments are static.
        **settings: Any of
            name: In profiles and in the registry; by default the function's name.
            on_tpu: A function of the same arguments for TPU, such as a Pallas kernel; with
                `default_blocks` it is given `blocks=` too.
            on_gpu: The same for NVIDIA GPUs.
            precision: A `PrecisionConfig` or the name of one: arguments are cast to it, results
                cast back.
            use_efficient_attention: Refuse, at tracing, attention that keeps all scores in memory
                at once. `flash_attention` passes on every platform;
                `jax.nn.dot_product_attention` is refused.
            pad_to_tiles: Pad arrays with zeros to full tiles and cut the results back. For
                functions whose result does not change with zeros at the end: elementwise ones and
                matmuls, not a mean.
            gradient: `f(arrays, cotangent, **options)` -> a gradient for each array.
            cases: Shapes for the static timer and the tuner.
            default_blocks: (case, chip or None) -> the blocks where there are no tuned ones.
            block_space: (case, chip) -> the blocks that the tuner tries.
            vmem_bytes: (case, blocks) -> VMEM in bytes; more than the chip has is refused.
            splits: A `Splits`: which dimensions may be sharded over a mesh. Without it kernels get
                gathered arrays.

    Raises:
        TPUKernelError: Settings contradict each other, or the precision is unknown.
    """
    _check_settings(settings)
    if function is None:
        return functools.partial(_make_kernel, **settings)
    return _make_kernel(function, **settings)


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
    """Register an op by name for `get_tpu_op`, the static timer and the tuner.

    Args:
        function: A function, a `@tpu_kernel`, or an `Op`; it is returned as an op.
        replace: Whether to replace an op that is registered under the name.
        **settings: As for `tpu_kernel`, for a plain function.

    Raises:
        TPUKernelError: The name is taken, or settings are given for an op.
    """
    if function is None:

        def register(function: Function) -> TpuKernel:
            return register_tpu_op(function, replace=replace, **settings)

        return register
    if isinstance(function, Op | TpuKernel):
        if settings:
            raise TPUKernelError(
                f"{function.name} is already an op and cannot take {', '.join(settings)}; give "
                "them where the op is made."
            )
        op = function
    else:
        op = tpu_kernel(function, **settings)
    add_op(op.op if isinstance(op, TpuKernel) else op, replace=replace)
    return op


def _make_kernel(function: Function, **settings: Any) -> TpuKernel:
    if not callable(function):
        raise TPUKernelError(f"@tpu_kernel takes a function, but got {function!r}.")
    return TpuKernel(function, **settings)


def _check_settings(settings: JsonMapping) -> None:
    known = list(inspect.signature(TpuKernel).parameters)[1:]
    for name, value in settings.items():
        if name not in known:
            raise TPUKernelError(
                f"@tpu_kernel has no setting {name!r}; expected one of {', '.join(known)}."
                + did_you_mean(name, known)
            )
        if name in _FUNCTIONS and value is not None and not callable(value):
            raise TPUKernelError(f"{name}= of @tpu_kernel takes a function, but got {value!r}.")


def refuse_all_scores(name: str, function: Callable[..., Any], *arrays: PyTree) -> None:
    """Trace `function` and refuse it if one of its matmuls returns a full score matrix.

    Such a matmul has batch axes (heads) and two sides that are both axes of arguments (queries and
    keys), and its result is four times as large as all arguments and results together. Blocks of
    scores, in a loop or in a kernel, pass; so do short sequences, where nothing is saved.

    Raises:
        TPUKernelError: With the shape of the scores, and the function to call instead.
    """
    closed = jax.make_jaxpr(function)(*arrays)
    outside = [*closed.in_avals, *closed.out_avals]
    most = TOO_MANY_TIMES * sum(math.prod(aval.shape) for aval in outside)
    axes = {size for aval in closed.in_avals for size in aval.shape}
    for equation in _matmuls(closed.jaxpr):
        scores = equation.outvars[0].aval
        if math.prod(scores.shape) > most and _joins(equation, axes):
            raise TPUKernelError(
                f"{name} has use_efficient_attention=True, but computes all scores at once, "
                f"{shape_text(scores)}; call tpukit.kernels.flash_attention, which computes them "
                "block by block."
            )


def _matmuls(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        elif equation.primitive.name != "pallas_call":  # its arrays are blocks in VMEM
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
                if _is_jaxpr(inner):
                    yield from _matmuls(getattr(inner, "jaxpr", inner))


def _is_jaxpr(value: object) -> bool:
    return isinstance(value, core.Jaxpr | core.ClosedJaxpr)


def _joins(equation: Any, axes: set[int]) -> bool:
    """Whether this is a batched matmul whose longest axis on either side is one of `axes`."""
    contracted, batch = equation.params["dimension_numbers"]
    if not batch[0]:
        return False
    longest: list[int] = []
    for operand, *taken in zip(equation.invars, contracted, batch, strict=True):
        shape = operand.aval.shape
        free = [size for at, size in enumerate(shape) if not any(at in group for group in taken)]
        longest.append(max(free, default=1))
    return axes.issuperset(longest)


def _no_vmem(case: KernelCase, blocks: Any) -> int:
    return 0


def _no_blocks(case: KernelCase, chip: str | None) -> BlockSizes:
    return BlockSizes()
