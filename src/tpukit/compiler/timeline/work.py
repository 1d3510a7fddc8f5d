"""What one instruction makes the chip do: products, bytes of HBM, bytes of VMEM.

Bytes are counted as the hardware moves them: with tile padding, each operand once, only the
touched part of slices and in-place updates, and nothing for what already lies in VMEM.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..hlo import Computation, HloModule, Instruction, Shape, matrix_flops
from ..hlo.shape import HBM, HOST, VMEM

FREE = frozenset(
    (
        *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"),
        *("partition-id", "replica-id", "opt-barrier", "domain", "add-dependency"),
    )
)
_PASSES_ON = frozenset(("parameter", "bitcast", "copy", "reshape", "transpose"))
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))


@dataclass(frozen=True)
class MatrixProduct:
    """One matrix product.

    Attributes:
        dtype: The wider of the two operand formats: what the matrix unit is fed with.
        smaller_operand_bytes: Whether it can stay in VMEM decides how often the other is read.
    """

    flops: float
    dtype: str
    smaller_operand_bytes: int


@dataclass(frozen=True)
class OpWork:
    """Matrix products, and bytes by memory."""

    products: tuple[MatrixProduct, ...] = ()
    hbm_bytes: float = 0.0
    vmem_bytes: float = 0.0
    host_bytes: float = 0.0

    @property
    def flops(self) -> float:
        """All products together."""
        return sum(product.flops for product in self.products)


def work_of(instruction: Instruction, parent: Computation, module: HloModule) -> OpWork:
    """The work of an instruction that runs on the core (not of a loop or an async start)."""
    if instruction.opcode in FREE:
        return OpWork()
    fused = instruction.called.get("calls") if instruction.opcode == "fusion" else None
    if fused is not None:
        computation = module.computations[fused]
        traffic = _fusion_traffic(computation, module)
        return OpWork(tuple(_products_in(computation, module)), **traffic)
    product = _product(instruction, parent)
    return OpWork((product,) if product else (), **_plain_traffic(instruction, parent))


def _products_in(computation: Computation, module: HloModule) -> Iterator[MatrixProduct]:
    for instruction in computation:
        product = _product(instruction, computation)
        if product:
            yield product
        elif instruction.opcode == "fusion":
            for called in module.called_by(instruction):
                yield from _products_in(called, module)


def _product(instruction: Instruction, computation: Computation) -> MatrixProduct | None:
    flops = matrix_flops(instruction, computation)
    if not flops:
        return None
    operands = [computation.by_name[name].shapes[0] for name in instruction.operands[:2]]
    widest = max(operands, key=lambda shape: shape.bytes / shape.elements)
    return MatrixProduct(flops, widest.dtype, min(shape.bytes for shape in operands))


def _fusion_traffic(computation: Computation, module: HloModule) -> dict[str, float]:
    bytes_by_space = {HBM: 0.0, VMEM: 0.0, HOST: 0.0}
    for parameter in computation.parameters.values():
        for shape in parameter.shapes:
            touched = _touched_bytes(parameter, shape, computation, module)
            _add(bytes_by_space, shape, touched)
    for written, shape in _results(computation, module):
        _add(bytes_by_space, shape, written)
    return _named(bytes_by_space)


def _touched_bytes(
    value: Instruction, shape: Shape, computation: Computation, module: HloModule
) -> float:
    """Bytes of `value` that the computation reads."""
    whole = float(shape.padded_bytes)
    touched = 0.0
    for user in computation:
        if value.name not in user.operands:
            continue
        if user.opcode in _SLICES and user.operands[0] == value.name:
            touched += user.shapes[0].padded_bytes
        elif user.operands[0] == value.name and _update_of(user, module) is not None:
            continue  # updated in place: what stays is not read
        elif user.opcode in ("bitcast", "reshape") or _only_looks(user, module):
            touched += _touched_bytes(user, shape, computation, module)
        elif user.opcode == "fusion":
            called = module.computations[user.called["calls"]]
            for index, name in enumerate(user.operands):
                if name == value.name and index in called.parameters:
                    touched += _touched_bytes(called.parameters[index], shape, called, module)
        else:
            return whole
        if touched >= whole:
            return whole
    return touched


def _only_looks(instruction: Instruction, module: HloModule) -> bool:
    """Whether a nested fusion only passes its operand on, in another layout at most.

    The compiler wraps whole stacks of layers so before it slices one layer out of them.
    """
    if instruction.opcode != "fusion" or len(instruction.operands) != 1:
        return False
    called = module.computations[instruction.called["calls"]]
    return all(inner.opcode in _PASSES_ON for inner in called)


def _results(computation: Computation, module: HloModule) -> list[tuple[float, Shape]]:
    """Bytes written and shape of each result."""
    root = computation.root
    parts = (
        [computation.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    )
    return [
        (_written_bytes(part, shape, computation, module), shape)
        for part, shape in zip(parts, root.shapes, strict=False)
    ]


def _written_bytes(
    value: Instruction, shape: Shape, computation: Computation, module: HloModule
) -> float:
    while value.opcode in ("bitcast", "reshape"):
        value = computation.by_name[value.operands[0]]
    update = _update_of(value, module)
    if update is not None:
        return float(computation.by_name[update].shapes[0].padded_bytes)
    if value.opcode == "fusion":
        called = module.computations[value.called["calls"]]
        inner = _results(called, module)
        if len(inner) == 1:
            return inner[0][0]
    return float(shape.padded_bytes)


def _update_of(instruction: Instruction, module: HloModule) -> str | None:
    """What an instruction writes over a part of its first operand; None where it does not."""
    if instruction.opcode == "dynamic-update-slice":
        return instruction.operands[1]
    if instruction.opcode != "scatter":
        return None
    kept = module.computations[instruction.called["to_apply"]].root
    # One that adds, as gradients of a table are, reads and writes whole pages of it.
    overwrites = kept.opcode == "parameter" and kept.arguments.strip() == "1"
    return instruction.operands[2] if overwrites else None


def _plain_traffic(instruction: Instruction, parent: Computation) -> dict[str, float]:
    bytes_by_space = {HBM: 0.0, VMEM: 0.0, HOST: 0.0}
    if instruction.opcode == "dynamic-update-slice":
        update = parent.by_name[instruction.operands[1]].shapes[0]
        _add(bytes_by_space, update, update.padded_bytes)
        _add(bytes_by_space, instruction.shapes[0], update.padded_bytes)
        return _named(bytes_by_space)
    for shape in instruction.shapes:
        _add(bytes_by_space, shape, shape.padded_bytes)
    if instruction.opcode in _SLICES:
        source = parent.by_name[instruction.operands[0]].shapes[0]
        _add(bytes_by_space, source, instruction.shapes[0].padded_bytes)
        return _named(bytes_by_space)
    for name in dict.fromkeys(instruction.operands):
        for shape in parent.by_name[name].shapes if name in parent.by_name else ():
            _add(bytes_by_space, shape, shape.padded_bytes)
    return _named(bytes_by_space)


def _add(bytes_by_space: dict[int, float], shape: Shape, amount: float) -> None:
    if shape.memory_space in bytes_by_space:
        bytes_by_space[shape.memory_space] += amount


def _named(bytes_by_space: dict[int, float]) -> dict[str, float]:
    return {
        "hbm_bytes": bytes_by_space[HBM],
        "vmem_bytes": bytes_by_space[VMEM],
        "host_bytes": bytes_by_space[HOST],
    }
