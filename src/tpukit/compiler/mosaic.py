"""A parser for the Mosaic program inside a Pallas call, which counts the FLOPs of its matmuls."""

import base64
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

IrObject: TypeAlias = Any
"""An object of MLIR's bindings in jaxlib, which have no types."""
_FIRST_LIST = re.compile(r"\[([\d, ]*)\]")
_SHAPE = re.compile(r"<((?:\d+x)*)[a-z]\w*")
_COUNTED = re.compile(r"index|i\d+|memref<[\dx]+xi\d+, #tpu.memory_space<smem>>")
_PRODUCT = "tpu.matmul"
_DYNAMIC = -(2**63)  # how MLIR writes a size that is known only at run time


class Uncountable(Exception):
    """A kernel's FLOPs cannot be determined from its program; the text states the reason."""


@dataclass(frozen=True)
class Operation:
    """One operation of a kernel.

    Attributes:
        operands: Numbers of its operands; None for an operand that is neither an integer nor a
            table of integers (vectors, other memory).
        results: Numbers of its results, likewise.
        number: An integer constant's value, or the kind of a comparison.
        flops: FLOPs of one run of a matmul.
    """

    name: str
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    bodies: tuple["Block", ...] = ()
    number: int | None = None
    flops: float = 0.0

    @property
    def multiplies(self) -> bool:
        """Whether it is a matmul or contains one."""
        return "matmul" in self.name or any(
            inner.multiplies for body in self.bodies for inner in body.operations
        )


@dataclass(frozen=True)
class Block:
    """Operations in order; the last one returns the results of a loop or branch."""

    arguments: tuple[int | None, ...]
    operations: tuple[Operation, ...]


@dataclass(frozen=True)
class Kernel:
    """A kernel's program, which runs once per point of its grid.

    Attributes:
        grid: Its extents; the first arguments of `body` are the position on it.
        tables: Number and extents of each integer table among its arguments.
    """

    grid: tuple[int, ...]
    body: Block
    tables: tuple[tuple[int, tuple[int, ...]], ...] = ()


def read_kernel(encoded: str) -> Kernel:
    """Parse the program in a call's `custom_call_config`.

    Raises:
        Uncountable: The program cannot be parsed, or does not state the size of its grid.
    """
    try:
        from jax._src.lib import tpu  # pyright: ignore[reportPrivateImportUsage]
        from jaxlib.mlir import ir
        from jaxlib.mlir.passmanager import PassManager
    except ImportError as error:
        raise Uncountable(f"this jax cannot parse kernels: {error}") from None
    context: IrObject = ir.Context()
    tpu.register_dialect(context)
    context.allow_unregistered_dialects = True  # the format kernels are stored in is no dialect
    with context, ir.Location.unknown():
        try:
            module = ir.Module.parse(base64.b64decode(encoded))
            PassManager.parse("builtin.module(mosaic-serde{serialize=false})").run(module.operation)
        except (ValueError, ir.MLIRError) as error:
            raise Uncountable(f"its program cannot be read: {error}") from None
        return _read_main(module.body.operations)


def _read_main(functions: IrObject) -> Kernel:
    """Return the kernel among the functions of its program; the others compute block indices."""
    main = next(
        (function for function in functions if "iteration_bounds" in function.attributes),
        functions[0],
    )
    grid = _numbers_in(main, "iteration_bounds")
    if _DYNAMIC in grid:
        raise Uncountable("the size of its grid is known only at run time")
    block = main.regions[0].blocks[0]
    body = _Reader(
        {_name(function.attributes["sym_name"]): function for function in functions}
    ).block(block)
    listed = sum(_numbers_in(main, "scalar_prefetch"))
    places = range(len(grid), len(grid) + listed)
    tables = [(body.arguments[at], tuple(_dims(block.arguments[at].type))) for at in places]
    return Kernel(grid, body, tuple((n, dims) for n, dims in tables if n is not None))


def _numbers_in(function: IrObject, name: str) -> tuple[int, ...]:
    """Return the numbers of an attribute such as "array<i64: 3, 8, 4>" or "2 : i64"."""
    if name not in function.attributes:
        return ()
    text = re.sub(r"\bi\d+\b", "", str(function.attributes[name]))
    return tuple(map(int, re.findall(r"-?\d+", text)))


def _name(attribute: IrObject) -> str:
    return str(attribute).strip('@"')


class _Reader:
    """Gives every integer value of a program its own number."""

    def __init__(self, functions: Mapping[str, IrObject]) -> None:
        self._functions = functions
        self._numbers: dict[IrObject, int] = {}

    def block(self, block: IrObject) -> Block:
        arguments = self._values(block.arguments)
        return Block(arguments, tuple(self._operations(block)))

    def _operations(self, block: IrObject) -> Iterator[Operation]:
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

    def _values(self, values: IrObject) -> tuple[int | None, ...]:
        return tuple(
            self._numbers.setdefault(value, len(self._numbers)) if _is_counted(value.type) else None
            for value in values
        )


def _is_counted(kind: IrObject) -> bool:
    """Whether a value is an integer, or a table of integers in scalar memory."""
    return _COUNTED.fullmatch(str(kind)) is not None


def _whole_number(attribute: IrObject) -> int | None:
    """Return a constant's value from a text such as "1024 : i32"; None if not an integer."""
    text = str(attribute).split(" : ")[0]
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _product_flops(operation: IrObject) -> float:
    """Return two FLOPs per multiplied pair: result elements times summed elements."""
    left = _dims(operation.operands[0].type)
    summed = _FIRST_LIST.search(str(operation.attributes["dimension_numbers"]))
    if summed is None:
        raise Uncountable("one of its matmuls has unknown dimension numbers")
    contracted = [left[int(place)] for place in summed[1].split(",") if place.strip()]
    return 2.0 * prod(_dims(operation.results[0].type)) * prod(contracted)


def _dims(kind: IrObject) -> list[int]:
    found = _SHAPE.search(str(kind))
    return [int(size) for size in found[1].split("x") if size] if found else []


Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class UnknownNumber:
    """A number that is known only at run time, such as one loaded from memory."""

    source: str


Value: TypeAlias = Numbers | UnknownNumber


def _quotient(a: Numbers, b: Numbers) -> Numbers:
    """Divide, rounding towards zero as processors do."""
    b = np.where(b == 0, 1, b)
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


_COMPARISONS: tuple[Callable[[Any, Any], Any], ...] = (
    *(np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal),
    # Unsigned ones: what they compare are sizes and positions, which are not negative.
    *(np.less, np.less_equal, np.greater, np.greater_equal),
)
_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "arith.addi": np.add,
    "arith.subi": np.subtract,
    "arith.muli": np.multiply,
    "arith.divsi": _quotient,
    "arith.divui": _quotient,
    "arith.floordivsi": lambda a, b: a // np.where(b == 0, 1, b),
    "arith.ceildivsi": lambda a, b: -(-a // np.where(b == 0, 1, b)),
    "arith.remsi": lambda a, b: a - _quotient(a, b) * b,
    "arith.remui": lambda a, b: a - _quotient(a, b) * b,
    "arith.minsi": np.minimum,
    "arith.minui": np.minimum,
    "arith.maxsi": np.maximum,
    "arith.maxui": np.maximum,
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.shli": np.left_shift,
    "arith.shrsi": np.right_shift,
    "arith.shrui": np.right_shift,
}
_SAME = frozenset(
    (
        *("arith.extui", "arith.extsi", "arith.trunci", "arith.index_cast", "arith.index_castui"),
        "tpu.assume_multiple",
    )
)


def evaluate(name: str, operands: list[Value], number: int | None) -> Value:
    """Return the result of one operation on integers."""
    if name == "arith.constant" and number is not None:
        return np.array([number], dtype=np.int64)
    unknown = next((operand for operand in operands if isinstance(operand, UnknownNumber)), None)
    if unknown is not None:
        return unknown
    known: list[Any] = list(operands)
    if name in _SAME and len(known) == 1:
        return known[0]
    if name in _BINARY and len(known) == 2:
        return _BINARY[name](*known)
    if name == "arith.cmpi" and number is not None and number < len(_COMPARISONS):
        return _COMPARISONS[number](*known).astype(np.int64)
    if name == "arith.select" and len(known) == 3:
        return np.where(known[0] != 0, known[1], known[2])
    return UnknownNumber(name)


Times: TypeAlias = npt.NDArray[np.float64]
POINTS_AT_ONCE = 1 << 16
MOST_TURNS = 1 << 16  # of a loop whose turns differ, each followed by itself


@lru_cache(maxsize=256)
def kernel_flops(encoded: str, operands: tuple[tuple[int, ...] | None, ...] = ()) -> float:
    """Return the FLOPs of the matmuls in one call of a kernel.

    Args:
        encoded: The program in the call's `custom_call_config`.
        operands: Values of each operand that is a constant of the program; None for others.

    Raises:
        Uncountable: The number of matmul runs depends on run-time values.
    """
    return count_flops(read_kernel(encoded), operands)


def count_flops(kernel: Kernel, operands: tuple[tuple[int, ...] | None, ...] = ()) -> float:
    """Return the FLOPs of a parsed kernel."""
    body = kernel.body
    tables = {
        number: np.array(words, dtype=np.int64).reshape(dims)
        for (number, dims), words in zip(kernel.tables, operands, strict=False)
        if words is not None and len(words) == prod(dims) and not _writes(body, number)
    }
    places = body.arguments[: len(kernel.grid)]
    # Most extents, such as the batch's, decide nothing: one point stands for all of them.
    deciding = [
        number for number, place in enumerate(places) if _decides(body, _numbers_of((place,)))
    ]
    alike = prod(size for number, size in enumerate(kernel.grid) if number not in deciding)
    sizes = tuple(kernel.grid[number] for number in deciding)
    total = 0.0
    for start in range(0, prod(sizes), POINTS_AT_ONCE):
        points = np.arange(start, min(start + POINTS_AT_ONCE, prod(sizes)))
        walk = _Walk(tables)
        walk.values.update({place: np.zeros(1, np.int64) for place in _numbers_of(places)})
        if sizes:
            axes = np.unravel_index(points, sizes)
            for number, axis in zip(deciding, axes, strict=True):
                place = places[number]
                if place is not None:
                    walk.values[place] = axis.astype(np.int64)
        walk.run(body, np.ones(len(points)))
        total += walk.flops
    return total * alike


class _Walk:
    """One path through a kernel's program, for many grid points at once."""

    def __init__(self, tables: Mapping[int, Numbers]) -> None:
        self.tables = tables
        self.values: dict[int, Value] = {}
        self.flops = 0.0

    def run(self, block: Block, times: Times) -> None:
        """Count the block's FLOPs when it runs `times` at each point."""
        for operation in block.operations:
            if operation.flops:
                self.flops += operation.flops * float(times.sum())
            elif operation.name == "scf.for":
                self._loop(operation, times)
            elif operation.name == "scf.if":
                self._branch(operation, times)
            elif operation.name in ("func.call", "tpu.region"):
                self._call(operation, times)
            elif operation.multiplies:
                raise Uncountable(f"it has an unsupported matmul: {operation.name}")
            elif operation.name == "memref.load" and operation.operands[0] in self.tables:
                self._look_up(operation)
            else:
                known = [self._value(operand) for operand in operation.operands]
                for result in _numbers_of(operation.results):
                    self.values[result] = evaluate(operation.name, known, operation.number)

    def _value(self, number: int | None) -> Value:
        return (
            UnknownNumber("memory")
            if number is None
            else self.values.get(number, UnknownNumber("memory"))
        )

    def _look_up(self, operation: Operation) -> None:
        table = self.tables[operation.operands[0] or 0]
        at = [self._value(operand) for operand in operation.operands[1:]]
        places = [
            np.clip(value, 0, size - 1)  # branches that are not taken may look beyond the table
            for value, size in zip(at, table.shape, strict=True)
            if not isinstance(value, UnknownNumber)
        ]
        known = len(places) == len(at)
        value: Value = table[tuple(places)] if known else UnknownNumber(operation.name)
        for result in _numbers_of(operation.results):
            self.values[result] = value

    def _known(self, number: int | None, operation: Operation) -> Numbers:
        value = self._value(number)
        if isinstance(value, UnknownNumber):
            raise Uncountable(
                f"the number of matmul runs ({operation.name}) depends on a number that is known "
                f"only at run time ({value.source})"
            )
        return value

    def _forget(self, operation: Operation) -> None:
        for result in _numbers_of(operation.results):
            self.values[result] = UnknownNumber(operation.name)

    def _call(self, operation: Operation, times: Times) -> None:
        body = operation.bodies[0]
        self._hand_on(body.arguments, [self._value(value) for value in operation.operands])
        self.run(body, times)
        self._hand_on(operation.results, self._yielded(body))

    def _branch(self, operation: Operation, times: Times) -> None:
        wanted = _numbers_of(operation.results)
        if not operation.multiplies and (
            not wanted or isinstance(self._value(operation.operands[0]), UnknownNumber)
        ):
            self._forget(operation)
            return
        condition = self._known(operation.operands[0], operation) != 0
        given: list[list[Value]] = []
        for body, taken in zip(operation.bodies, (condition, ~condition), strict=True):
            self.run(body, times * taken)
            given.append(self._yielded(body))
        for place, result in enumerate(operation.results):
            if result is None:
                continue
            value, other = given[0][place], given[1][place]
            if isinstance(value, UnknownNumber) or isinstance(other, UnknownNumber):
                self.values[result] = UnknownNumber(operation.name)
            else:
                self.values[result] = np.where(condition, value, other)

    def _loop(self, operation: Operation, times: Times) -> None:
        body = operation.bodies[0]
        carried = _numbers_of(operation.results)
        if not operation.multiplies and not carried:
            return
        bounds = [self._value(operand) for operand in operation.operands[:3]]
        if not operation.multiplies and any(isinstance(bound, UnknownNumber) for bound in bounds):
            self._forget(operation)
            return
        lower, upper, step = (self._known(operand, operation) for operand in operation.operands[:3])
        turns = np.maximum(0, -((lower - upper) // np.maximum(step, 1)))
        counter = body.arguments[0]
        starts = [self._value(operand) for operand in operation.operands[3:]]
        self._hand_on(body.arguments[1:], starts)
        if not carried and not _decides(body, _numbers_of(body.arguments)):
            if counter is not None:
                self.values[counter] = lower
            self.run(body, times * turns)
            return
        most = int(turns.max(initial=0))
        if most > MOST_TURNS:
            raise Uncountable(f"a loop of {most} iterations that all differ contains its matmuls")
        for turn in range(most):
            running = turn < turns
            if counter is not None:
                self.values[counter] = lower + turn * step
            before = [self._value(argument) for argument in body.arguments[1:]]
            self.run(body, times * running)
            after = self._yielded(body)
            self._hand_on(
                body.arguments[1:],
                [
                    new
                    if isinstance(new, UnknownNumber) or isinstance(old, UnknownNumber)
                    else np.where(running, new, old)
                    for new, old in zip(after, before, strict=True)
                ],
            )
        self._hand_on(operation.results, [self._value(value) for value in body.arguments[1:]])

    def _yielded(self, body: Block) -> list[Value]:
        return (
            [self._value(value) for value in body.operations[-1].operands]
            if body.operations
            else []
        )

    def _hand_on(self, to: tuple[int | None, ...], values: list[Value]) -> None:
        for number, value in zip(to, values, strict=True):
            if number is not None:
                self.values[number] = value


def _numbers_of(values: tuple[int | None, ...]) -> set[int]:
    return {value for value in values if value is not None}


def _decides(block: Block, moved: set[int]) -> bool:
    """Whether the number of matmul runs may depend on any of the values in `moved`.

    Every value computed from them is added to `moved`.
    """
    for operation in block.operations:
        touched = bool(_numbers_of(operation.operands) & moved)
        holds = bool(operation.bodies) and operation.multiplies
        if holds and (touched or any(_decides(body, moved) for body in operation.bodies)):
            return True
        if touched or any(_uses(body, moved) for body in operation.bodies):
            moved |= _numbers_of(operation.results)
    return False


def _writes(block: Block, table: int) -> bool:
    """Whether anything but a load accesses a table, so its contents may change."""
    return any(
        (table in operation.operands and operation.name != "memref.load")
        or any(_writes(body, table) for body in operation.bodies)
        for operation in block.operations
    )


def _uses(block: Block, moved: set[int]) -> bool:
    return any(
        _numbers_of(operation.operands) & moved
        or any(_uses(body, moved) for body in operation.bodies)
        for operation in block.operations
    )
