"""`TpuKernel`: anyone's function with everything an op has."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax

from ...annotations import PyTree
from ...errors import TPUKernelError
from ...hardware.target import current_target
from ..blocks.tiling import call_padded
from ..blocks.tuned import choose_blocks
from ..blocks.vmem import check_vmem
from ..partition.splits import Splits
from ..precision import PrecisionConfig
from .dispatch import dispatch
from .gradient import Passes, dispatch_with_gradient, recomputed
from .op import ON_GPU, PALLAS_TPU, REFERENCE, Blocks, BlockSizes, KernelCase, Op
from .scores_guard import refuse_all_scores

Function = Callable[..., PyTree]
Gradient = Callable[..., tuple[PyTree, ...]]


class TpuKernel:
    """A function with everything an op has; call it as the function it was made from.

    Positional arguments are arrays (or trees of them), keywords are static options, and
    `implementation=` and `blocks=` are as for tpukit's own ops. `op` is what the static timer
    and the tuner take.
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
                f"{self.name} was given a block space or its VMEM and no default_blocks=; give "
                "the blocks it takes when nobody has tuned it."
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
        """Run it on the platform the program is lowered for, or by the name of one.

        Raises:
            TPUKernelError: No such implementation, blocks that do not fit, or a precision that
                the generation traced for has not.
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
                f"{self.name} was given blocks= and takes none; give it on_tpu= and "
                "default_blocks= where it is defined."
            )
        if self._gradient is None and len(functions) == 1:
            return dispatch(self.name, functions, *arrays, **choice)
        # A kernel's gradient is computed from its arguments.
        splits = replace(self._splits, residuals=self._splits.arguments)
        return dispatch_with_gradient(
            self.name, self._passes(functions), *arrays, splits=splits, **choice
        )

    def _passes(self, functions: Mapping[str, Function]) -> dict[str, Passes]:
        """A kernel has no derivative of its own: the user's gradient, or the reference's."""
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


def _no_vmem(case: KernelCase, blocks: Any) -> int:
    return 0


def _no_blocks(case: KernelCase, chip: str | None) -> BlockSizes:
    return BlockSizes()
