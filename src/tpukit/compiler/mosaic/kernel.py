"""A reader for the Mosaic program that a Pallas call carries: its grid, its loops, its products."""

import base64
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

_FIRST_LIST = re.compile(r"\[([\d, ]*)\]")
_SHAPE = re.compile(r"<((?:\d+x)*)[a-z]\w*")
_COUNTED = re.compile(r"index|i\d+|memref<[\dx]+xi\d+, #tpu.memory_space<smem>>")
_PRODUCT = "tpu.matmul"
_DYNAMIC = -(2**63)  # how MLIR writes a size that only the running program knows


class Uncountable(Exception):
    """Nobody can tell from its program how many FLOPs a kernel does; the text says why."""


@dataclass(frozen=True)
class Operation:
    """One operation of a kernel.

    Attributes:
        operands: Numbers of the values it takes; None for what is neither a whole number nor a
            table of them (vectors, other memory).
        results: The same of what it makes.
        number: An integer constant's value, or which comparison it is.
        flops: Of a matrix product, done once.
    """

    name: str
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    bodies: tuple["Block", ...] = ()
    number: int | None = None
    flops: float = 0.0

    @property
    def multiplies(self) -> bool:
        """Whether it is a matrix product or holds one."""
        return "matmul" in self.name or any(
            inner.multiplies for body in self.bodies for inner in body.operations
        )


@dataclass(frozen=True)
class Block:
    """Operations in order; the last hands on what a loop or branch gives back."""

    arguments: tuple[int | None, ...]
    operations: tuple[Operation, ...]


@dataclass(frozen=True)
class Kernel:
    """A kernel's program, run once for every point of its grid.

    Attributes:
        grid: Its extents; the first arguments of `body` are the position on it.
        tables: Number and extents of each table of whole numbers that it is called with.
    """

    grid: tuple[int, ...]
    body: Block
    tables: tuple[tuple[int, tuple[int, ...]], ...] = ()


def read_kernel(encoded: str) -> Kernel:
    """Read the program that a call carries in its `custom_call_config`.

    Raises:
        Uncountable: It cannot be read, or the size of its grid is not in it.
    """
    try:
        from jax._src.lib import tpu  # pyright: ignore[reportPrivateImportUsage]
        from jaxlib.mlir import ir
        from jaxlib.mlir.passmanager import PassManager
    except ImportError as error:
        raise Uncountable(f"this jax reads no kernels: {error}") from None
    context: Any = ir.Context()
    tpu.register_dialect(context)
    context.allow_unregistered_dialects = True  # the format kernels are stored in is no dialect
    with context, ir.Location.unknown():
        try:
            module = ir.Module.parse(base64.b64decode(encoded))
            PassManager.parse("builtin.module(mosaic-serde{serialize=false})").run(module.operation)
        except (ValueError, ir.MLIRError) as error:
            raise Uncountable(f"its program cannot be read: {error}") from None
        return _read_main(module.body.operations)


def _read_main(functions: Any) -> Kernel:
    """The kernel among the functions of its program; the others say which blocks it is given."""
    main = next((one for one in functions if "iteration_bounds" in one.attributes), functions[0])
    grid = _numbers_in(main, "iteration_bounds")
    if _DYNAMIC in grid:
        raise Uncountable("the size of its grid is a number of the running program")
    block = main.regions[0].blocks[0]
    body = _Reader({_name(one.attributes["sym_name"]): one for one in functions}).block(block)
    listed = sum(_numbers_in(main, "scalar_prefetch"))
    places = range(len(grid), len(grid) + listed)
    tables = [(body.arguments[at], tuple(_dims(block.arguments[at].type))) for at in places]
    return Kernel(grid, body, tuple((n, dims) for n, dims in tables if n is not None))


def _numbers_in(function: Any, name: str) -> tuple[int, ...]:
    """An attribute's numbers, such as those of "array<i64: 3, 8, 4>" or "2 : i64"."""
    if name not in function.attributes:
        return ()
    text = re.sub(r"\bi\d+\b", "", str(function.attributes[name]))
    return tuple(map(int, re.findall(r"-?\d+", text)))


def _name(attribute: Any) -> str:
    return str(attribute).strip('@"')


class _Reader:
    """Gives every whole number of a program its own number."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._functions = functions
        self._numbers: dict[Any, int] = {}

    def block(self, block: Any) -> Block:
        arguments = self._values(block.arguments)
        return Block(arguments, tuple(self._operations(block)))

    def _operations(self, block: Any) -> Iterator[Operation]:
        for found in block.operations:
            operation = found.operation
            name = operation.name
            bodies = tuple(self.block(inner) for part in operation.regions for inner in part.blocks)
            number, flops = None, 0.0
            if name == "func.call":
                called = self._functions[_name(operation.attributes["callee"])]
                bodies = (self.block(called.regions[0].blocks[0]),)
            elif name == "arith.constant":
                number = _whole_number(operation.attributes["value"])
            elif name == "arith.cmpi":
                number = _whole_number(operation.attributes["predicate"])
            elif name == _PRODUCT:
                flops = _product_flops(operation)
            results = self._values(operation.results)
            yield Operation(name, self._values(operation.operands), results, bodies, number, flops)

    def _values(self, values: Any) -> tuple[int | None, ...]:
        return tuple(
            self._numbers.setdefault(value, len(self._numbers)) if _is_counted(value.type) else None
            for value in values
        )


def _is_counted(kind: Any) -> bool:
    """Whether it is a whole number or a table of them in scalar memory."""
    return _COUNTED.fullmatch(str(kind)) is not None


def _whole_number(attribute: Any) -> int | None:
    """A constant's value by its text, such as "1024 : i32"; a vector's or a fraction's is None."""
    text = str(attribute).split(" : ")[0]
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _product_flops(operation: Any) -> float:
    """Two for every pair that is multiplied: elements of the result by those summed for each."""
    left = _dims(operation.operands[0].type)
    summed = _FIRST_LIST.search(str(operation.attributes["dimension_numbers"]))
    if summed is None:
        raise Uncountable("a product of it has dimension numbers this reader does not know")
    contracted = [left[int(place)] for place in summed[1].split(",") if place.strip()]
    return 2.0 * prod(_dims(operation.results[0].type)) * prod(contracted)


def _dims(kind: Any) -> list[int]:
    found = _SHAPE.search(str(kind))
    return [int(size) for size in found[1].split("x") if size] if found else []
