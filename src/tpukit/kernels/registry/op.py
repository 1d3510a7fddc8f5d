"""The `Op` type: a public function, its implementations, and the shapes it is timed at."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp

from ...annotations import PyTree
from ...errors import TPUKernelError, did_you_mean
from ...plain_data import JsonObject
from ..partition.splits import Splits

Implementation = TypeVar("Implementation")
Direction = Literal["forward", "backward"]
REFERENCE = "reference"
PALLAS_TPU = "pallas_tpu"
XLA = "xla"
TRITON = "triton"
ON_GPU = "gpu"  # of a user's own op
# Implementations that the compiler cannot partition, so they run on each device's shards.
KERNELS = frozenset({PALLAS_TPU, TRITON, ON_GPU})


@dataclass(frozen=True)
class KernelCase:
    """One shape at which an op is compiled, timed and tuned.

    Attributes:
        name: Short and readable, e.g. "causal_4096".
        arguments: Shapes and dtypes of the arrays, in the order of the op's function.
        options: Static keyword arguments of the op's function.
    """

    name: str
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def to_dict(self) -> JsonObject:
        """Return shapes as text such as "bfloat16[8,128]", and the options."""
        return {
            "name": self.name,
            "arguments": [shape_text(argument) for argument in self.arguments],
            "options": dict(self.options),
        }


class Blocks(Protocol):
    """Block sizes and switches of a kernel: a frozen dataclass of integers and booleans."""

    def to_dict(self) -> JsonObject:
        """Return the sizes by name, as tuning data stores them."""
        ...


@dataclass(frozen=True)
class BlockSizes:
    """Base of an op's own blocks: subclass it as a frozen dataclass of ints and bools."""

    def to_dict(self) -> JsonObject:
        """Return the sizes by name, as tuning data stores them."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


def shape_bucket(case: KernelCase) -> str:
    """Return the bucket of a case: every size rounded up to a power of two, and the options.

    Float options (an epsilon, a scale) change no schedule and are left out.
    """
    shapes = [
        f"{jnp.dtype(array.dtype).name}[{','.join(str(_power(size)) for size in array.shape)}]"
        for array in case.arguments
    ]
    options = [
        f"{name}={value}"
        for name, value in sorted(case.options.items())
        if value is not None and not isinstance(value, float)
    ]
    return " ".join([*shapes, *options])


@dataclass(frozen=True)
class Op:
    """An op, as dispatch, the static timer and the tuner use it.

    For a new op write a folder with `api.py` (the reference in plain jnp, the public function,
    which calls `dispatch`, and this object, named `OP`) and `pallas_tpu.py` (the kernel and its
    blocks); `triton_gpu.py` or `cudnn_gpu.py` where a GPU has a kernel.

    Attributes:
        name: The folder's name, and the scope that profiles show.
        function: The public function: `f(*arrays, **options, implementation=None, blocks=None)`.
        implementations: By name, each `f(*arrays, **options)`. "pallas_tpu" takes `blocks=` and
            `interpret=` besides, and chooses blocks itself when given None.
        cases: The first ones compile in a second or two.
        block_space: (case, chip name) -> the blocks that the tuner tries.
        vmem_bytes: Scratch and double-buffered blocks of a case, in bytes of one core.
        default_blocks: (case, chip name) -> the blocks where no tuned entry exists. A chip of None
            is unknown, so that the blocks must fit every generation.
        differentiable: Numbers of the array arguments that have a gradient; none means forward
            only.
        bucket: (case) -> the key of its tuned blocks.
        on_gpu: The implementation that dispatch takes on an NVIDIA GPU.
        values: (case) -> default values, by position, of integer arguments that decide what a
            kernel does (group sizes), for the timer and the tuner.
        splits: The names of the arrays' dimensions, and which may be sharded over a mesh.
    """

    name: str
    function: Callable[..., Any]
    implementations: Mapping[str, Callable[..., Any]]
    cases: tuple[KernelCase, ...]
    block_space: Callable[[KernelCase, str], Iterable[Blocks]]
    vmem_bytes: Callable[[KernelCase, Any], int]
    default_blocks: Callable[[KernelCase, str | None], Blocks]
    differentiable: tuple[int, ...] = (0,)
    bucket: Callable[[KernelCase], str] = shape_bucket
    on_gpu: str = REFERENCE
    values: Callable[[KernelCase], Mapping[int, Any]] | None = None
    splits: Splits = field(default_factory=Splits)

    def case(self, name: str) -> KernelCase:
        """Return the case of that name.

        Raises:
            TPUKernelError: The op has no such case.
        """
        for case in self.cases:
            if case.name == name:
                return case
        known = [case.name for case in self.cases]
        raise TPUKernelError(
            f"{self.name} has no case {name!r}; it has {', '.join(known)}."
            + did_you_mean(name, known)
        )

    def bind(
        self,
        case: KernelCase,
        *,
        implementation: str = PALLAS_TPU,
        blocks: Blocks | None = None,
        direction: Direction = "forward",
    ) -> Callable[..., Any]:
        """Return a function of `case.arguments` alone, to be jitted, lowered or compiled.

        Args:
            case: Gives the options.
            implementation: Which of `implementations`.
            blocks: For "pallas_tpu"; None lets it choose.
            direction: "backward" gives the gradients with respect to the differentiable
                arguments, with the results themselves as their cotangents: a forward and a
                backward pass.
        """
        chosen = find_implementation(self.name, self.implementations, implementation)
        options = dict(case.options)
        if implementation == PALLAS_TPU:
            options["blocks"] = blocks

        def forward(*arrays: PyTree) -> Any:
            return chosen(*arrays, **options)

        def total(*arrays: PyTree) -> Any:
            parts: list[jax.Array] = jax.tree.leaves(forward(*arrays))
            # The barrier makes the cotangent an array in memory, as in a model. Without it XLA
            # would fuse the operations before it into the backward pass.
            weights = [jax.lax.stop_gradient(jax.lax.optimization_barrier(part)) for part in parts]
            return sum(
                jnp.sum(part.astype(jnp.float32) * weight.astype(jnp.float32))
                for part, weight in zip(parts, weights, strict=True)
            )

        bound = forward if direction == "forward" else jax.grad(total, self.differentiable)
        bound = cast(Callable[..., Any], bound)
        bound.__name__ = f"{self.name}_{implementation}_{direction}"
        return bound


def find_implementation(
    op: str, implementations: Mapping[str, Implementation], name: str
) -> Implementation:
    """Return the implementation of that name.

    Raises:
        TPUKernelError: There is none of that name.
    """
    if name not in implementations:
        raise TPUKernelError(
            f"{op} has no implementation {name!r}; it has {', '.join(implementations)}. "
            "implementation=None chooses by platform." + did_you_mean(name, implementations)
        )
    return implementations[name]


def shape_text(array: Any) -> str:
    """Return dtype and shape as HLO writes them, e.g. "bfloat16[8,128]"."""
    return f"{jnp.dtype(array.dtype).name}[{','.join(map(str, array.shape))}]"


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
