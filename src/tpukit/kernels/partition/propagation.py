"""Find the shardings of an op's arguments with Shardy while the program is lowered.

Under `jax.jit` the sharding of an array over automatic axes is not part of its type, because one
trace serves every sharding. It is known only when the program is lowered, from the shardings of the
program's arguments and from its constraints. The operations that lead from those to the op are
copied into a program of their own. Shardy, which also partitions the real program, propagates the
shardings to the copies of the op's arguments.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import func, sdy

from .splits import Axes, Spec

Value: TypeAlias = Any  # an `ir.Value`: its stubs are generic, its class is not
SHARDING = "sdy.sharding"
FUNCTION = "func.func"
CONSTRAINT = "sdy.sharding_constraint"
REGION = "sdy.manual_computation"
PASSES = "builtin.module(sdy-propagation-pipeline)"


@dataclass(frozen=True)
class Known:
    """Known shardings of some values.

    Attributes:
        specs: For each value the mesh axes of its dimensions; None where they depend on the caller
            of the enclosing function.
        mesh: The sizes of the mesh axes by name; empty where nothing is sharded.
    """

    specs: tuple[Spec | None, ...]
    mesh: dict[str, int]

    @property
    def is_unknown(self) -> bool:
        """Whether no sharding is known and some depend on the caller."""
        split = any(axes for spec in self.specs if spec for axes in spec)
        return not split and any(spec is None for spec in self.specs)


def known_shardings(module: ir.Module, values: Sequence[Value]) -> Known:
    """Return the shardings of `values` in a program under construction, as far as known."""
    source = _ShardingSource(module)
    source.add(values)
    mesh = _mesh_of_program(module)
    if not any(sharding is not None for sharding in source.leaves.values()):
        unsplit = (_replicated(value) if source.is_closed(value) else None for value in values)
        return Known(tuple(unsplit), mesh)
    copy = source.copy(values)
    passmanager.PassManager.parse(PASSES, module.context).run(copy.operation)
    functions = _symbols(copy)
    results = _get(functions["main"].attributes, "res_attrs") or [{}] * len(values)
    specs: list[Spec | None] = []
    for value, result in zip(values, results, strict=True):
        stated = _get(result, SHARDING)
        if stated is None:
            specs.append(_replicated(value) if source.is_closed(value) else None)
            continue
        sharding = sdy.TensorShardingAttr(stated)
        mesh |= _mesh_axes(sharding, functions)
        specs.append(tuple(_axes(dimension) for dimension in sharding.dimension_shardings))
    return Known(tuple(specs), mesh)


class _ShardingSource:
    """The operations between stated shardings and some values."""

    def __init__(self, module: ir.Module) -> None:
        self._module = module
        self._functions = _symbols(module)
        self._seen: set[Any] = set()
        self._operations: list[ir.Operation] = []  # each after its operands' operations
        self.leaves: dict[Value, Any] = {}  # where to begin, with the stated sharding or None

    def add(self, values: Sequence[Value]) -> None:
        """Follow values back to stated shardings."""
        waiting: list[Value | ir.Operation] = list(reversed(values))
        while waiting:
            item = waiting.pop()
            if isinstance(item, ir.Operation):
                self._operations.append(item)  # its operands have been followed by now
                continue
            producer = _producer(item)
            if item in self.leaves or producer in self._seen:
                continue
            if producer is None or _states_sharding(producer):
                self.leaves[item] = _stated(item)
                continue
            self._seen.add(producer)
            waiting.append(producer)
            waiting.extend(_taken(producer))

    def is_closed(self, value: Value) -> bool:
        """Whether `value` does not depend on arguments of an inner function."""
        reached, waiting = set[Any](), [value]
        while waiting:
            item = waiting.pop()
            if item in self.leaves:
                if self.leaves[item] is None and not _is_program_argument(item):
                    return False
                continue
            producer = _producer(item)
            if producer not in reached:
                reached.add(producer)
                waiting.extend(_taken(producer))
        return True

    def copy(self, values: Sequence[Value]) -> ir.Module:
        """Return a program that takes the leaves and returns `values`."""
        copied = ir.Module.create(loc=ir.Location.unknown(self._module.context))
        with ir.Location.unknown(self._module.context), ir.InsertionPoint(copied.body):
            for name in self._needed():
                self._functions[name].clone()
            types = [leaf.type for leaf in self.leaves], [value.type for value in values]
            main = func.FuncOp("main", ir.FunctionType.get(*types))
            main.arg_attrs = [
                ir.DictAttr.get({} if stated is None else {SHARDING: stated})
                for stated in self.leaves.values()
            ]
            block = main.add_entry_block()
            copy_of = dict(zip(self.leaves, block.arguments, strict=True))
            with ir.InsertionPoint(block):
                for operation in self._operations:
                    clone = operation.clone().operation
                    pairs = zip(_nested(operation), _nested(clone), strict=True)
                    for inner, inner_clone in pairs:
                        for number, operand in enumerate(inner.operands):
                            if operand in copy_of:
                                inner_clone.operands[number] = copy_of[operand]
                    copy_of.update(zip(operation.results, clone.results, strict=True))
                func.ReturnOp([copy_of[value] for value in values])
        return copied

    def _needed(self) -> list[str]:
        """Return the names of the meshes, and of the functions that the operations call."""
        names = [n for n, op in self._functions.items() if op.operation.name == "sdy.mesh"]
        waiting = list(self._operations)
        while waiting:
            for operation in _nested(waiting.pop()):
                if "callee" not in operation.attributes:
                    continue
                name = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
                if name not in names:
                    names.append(name)
                    waiting.append(self._functions[name].operation)
        return names


def _symbols(module: ir.Module) -> dict[str, Any]:
    operations = [op for op in module.body.operations if "sym_name" in op.attributes]
    return {ir.StringAttr(op.attributes["sym_name"]).value: op for op in operations}


def _producer(value: Value) -> Any:
    """Return the operation that computes a value; None for a block argument."""
    return None if isinstance(value.owner, ir.Block) else value.owner.operation


def _nested(operation: ir.Operation) -> Iterator[ir.Operation]:
    yield operation
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _nested(inner.operation)


def _taken(operation: ir.Operation) -> list[Value]:
    """Return an operation's operands, including those of its inner blocks from outside."""
    if not len(operation.regions):
        return list(operation.operands)
    inside = set(_nested(operation))
    taken = list(operation.operands)
    for inner in inside - {operation}:
        for value in inner.operands:
            around = value.owner.owner if isinstance(value.owner, ir.Block) else value.owner
            if around.operation not in inside:
                taken.append(value)
    return taken


def _states_sharding(operation: ir.Operation) -> bool:
    if operation.name == REGION:
        return True
    if operation.name != CONSTRAINT:
        return False
    dimensions = sdy.TensorShardingAttr(operation.attributes["sharding"]).dimension_shardings
    return all(sdy.DimensionShardingAttr(dimension).is_closed for dimension in dimensions)


def _stated(value: Value) -> Any:
    producer = _producer(value)
    if producer is None:
        function = value.owner.owner.operation
        arguments = _get(function.attributes, "arg_attrs") if function.name == FUNCTION else None
        return arguments and _get(arguments[ir.BlockArgument(value).arg_number], SHARDING)
    if producer.name == CONSTRAINT:
        return producer.attributes["sharding"]
    shardings = sdy.TensorShardingPerValueAttr(producer.attributes["out_shardings"]).shardings
    return shardings[ir.OpResult(value).result_number]


def _is_program_argument(value: Value) -> bool:
    if not isinstance(value.owner, ir.Block):
        return True
    function = value.owner.owner.operation
    named = "sym_name" in function.attributes
    return named and ir.StringAttr(function.attributes["sym_name"]).value == "main"


def _mesh_of_program(module: ir.Module) -> dict[str, int]:
    """Return the mesh of the program's first sharded argument."""
    functions = _symbols(module)
    for argument in _get(functions["main"].attributes, "arg_attrs") or []:
        stated = _get(argument, SHARDING)
        if stated is not None:
            return _mesh_axes(sdy.TensorShardingAttr(stated), functions)
    return {}


def _get(attributes: Any, name: str) -> Any:
    """Return an attribute, or None; MLIR's maps have no `get`."""
    return attributes[name] if name in attributes else None  # noqa: SIM401


def _mesh_axes(sharding: Any, functions: dict[str, Any]) -> dict[str, int]:
    mesh = sharding.mesh_or_ref
    if isinstance(mesh, ir.FlatSymbolRefAttr):
        mesh = functions[mesh.value].attributes["mesh"]
    return {axis.name: axis.size for axis in map(sdy.MeshAxisAttr, sdy.MeshAttr(mesh).axes)}


def _axes(dimension: Any) -> Axes:
    """Return the axes of one dimension, up to the first that shards it only in part."""
    axes: list[str] = []
    for axis in map(sdy.AxisRefAttr, sdy.DimensionShardingAttr(dimension).axes):
        if axis.sub_axis_info is not None:
            break
        axes.append(axis.name)
    return tuple(axes)


def _replicated(value: Value) -> Spec:
    return ((),) * ir.RankedTensorType(value.type).rank
