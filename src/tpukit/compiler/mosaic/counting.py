"""How many FLOPs a kernel does: each of its products, times how often the grid and loops run it.

Nothing of the model is asked. A causal kernel that leaves blocks above the diagonal out has a
branch or a loop bound that says so, and what it pads is multiplied, so it counts.
"""

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .kernel import Block, Kernel, Operation, Uncountable, read_kernel
from .numbers import Numbers, UnknownNumber, Value, evaluate

Times: TypeAlias = npt.NDArray[np.float64]
POINTS_AT_ONCE = 1 << 16
MOST_TURNS = 1 << 16  # of a loop whose turns differ, each followed by itself


@lru_cache(maxsize=256)
def kernel_flops(encoded: str, operands: tuple[tuple[int, ...] | None, ...] = ()) -> float:
    """FLOPs of the matrix products in one call of a kernel.

    Args:
        encoded: The program as the call's `custom_call_config` holds it.
        operands: Numbers of each operand that is a constant of the program, None for any other.

    Raises:
        Uncountable: How often a product runs is decided by numbers of the running program.
    """
    return count_flops(read_kernel(encoded), operands)


def count_flops(kernel: Kernel, operands: tuple[tuple[int, ...] | None, ...] = ()) -> float:
    """The same for a program that has been read."""
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
    """One way through a kernel's program, for many points of the grid side by side."""

    def __init__(self, tables: Mapping[int, Numbers]) -> None:
        self.tables = tables
        self.values: dict[int, Value] = {}
        self.flops = 0.0

    def run(self, block: Block, times: Times) -> None:
        """Count what the block does when it runs `times` at each point."""
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
                raise Uncountable(
                    f"it multiplies in a way this reader does not follow: {operation.name}"
                )
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
            np.clip(one, 0, size - 1)  # branches that are not taken may look beyond the table
            for one, size in zip(at, table.shape, strict=True)
            if not isinstance(one, UnknownNumber)
        ]
        known = len(places) == len(at)
        value: Value = table[tuple(places)] if known else UnknownNumber(operation.name)
        for result in _numbers_of(operation.results):
            self.values[result] = value

    def _known(self, number: int | None, operation: Operation) -> Numbers:
        value = self._value(number)
        if isinstance(value, UnknownNumber):
            raise Uncountable(
                f"how often its products run ({operation.name}) is decided by a number that only "
                f"the running program knows ({value.source})"
            )
        return value

    def _forget(self, operation: Operation) -> None:
        for result in _numbers_of(operation.results):
            self.values[result] = UnknownNumber(operation.name)

    def _call(self, operation: Operation, times: Times) -> None:
        body = operation.bodies[0]
        self._hand_on(body.arguments, [self._value(one) for one in operation.operands])
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
            one, other = given[0][place], given[1][place]
            if isinstance(one, UnknownNumber) or isinstance(other, UnknownNumber):
                self.values[result] = UnknownNumber(operation.name)
            else:
                self.values[result] = np.where(condition, one, other)

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
            raise Uncountable(f"a loop of {most} turns, no two of them alike, holds its products")
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
        self._hand_on(operation.results, [self._value(one) for one in body.arguments[1:]])

    def _yielded(self, body: Block) -> list[Value]:
        return [self._value(one) for one in body.operations[-1].operands] if body.operations else []

    def _hand_on(self, to: tuple[int | None, ...], values: list[Value]) -> None:
        for number, value in zip(to, values, strict=True):
            if number is not None:
                self.values[number] = value


def _numbers_of(values: tuple[int | None, ...]) -> set[int]:
    return {value for value in values if value is not None}


def _decides(block: Block, moved: set[int]) -> bool:
    """Whether how often a product runs may depend on any of the values `moved`.

    `moved` grows by all that is computed from them.
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
    """Whether anything but a load touches a table: then it may hold other numbers later."""
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
