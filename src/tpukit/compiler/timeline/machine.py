"""The work of an op, and the rates of one JAX device with their sources."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ...hardware import Figure, Slice
from ...hardware.catalog import dcn_rate
from ...hardware.formats import PeakName, parse_format
from ...hardware.rates import AttentionRates, ChipRates
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
    """One matmul.

    Attributes:
        dtype: The wider of the two operand formats, which the matrix unit uses.
        smaller_operand_bytes: Size of the smaller operand; if it fits in VMEM, the other is read
            once.
    """

    flops: float
    dtype: str
    smaller_operand_bytes: int


@dataclass(frozen=True)
class OpWork:
    """The matmuls of an op, and its bytes by memory."""

    products: tuple[MatrixProduct, ...] = ()
    hbm_bytes: float = 0.0
    vmem_bytes: float = 0.0
    host_bytes: float = 0.0

    @property
    def flops(self) -> float:
        """FLOPs of all matmuls together."""
        return sum(product.flops for product in self.products)


def work_of(instruction: Instruction, parent: Computation, module: HloModule) -> OpWork:
    """Return the work of an instruction on the core; not for loops and async starts."""
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
    """Return the bytes of `value` that the computation reads."""
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
    """Whether a nested fusion passes its operand on unchanged, at most in another layout.

    The compiler wraps whole stacks of layers this way before it slices out one layer.
    """
    if instruction.opcode != "fusion" or len(instruction.operands) != 1:
        return False
    called = module.computations[instruction.called["calls"]]
    return all(inner.opcode in _PASSES_ON for inner in called)


def _results(computation: Computation, module: HloModule) -> list[tuple[float, Shape]]:
    """Return the bytes written and the shape of each result."""
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
    """Return the update that an instruction writes into its first operand; else None."""
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


@dataclass(frozen=True)
class Machine:
    """The rates of a device in SI units, with the fitted shares that ops reach inside a step."""

    slice: Slice
    hbm_bytes_per_s: float
    vmem_bytes_per_s: float
    ici_bytes_per_s: float
    dcn_bytes_per_s: float
    host_bytes_per_s: float
    matrix_efficiency: float
    streamed_matrix_efficiency: float
    grouped_efficiency: float
    int8_over_bf16: float
    int8_gain_over_rows: float
    resident_bytes: float
    hbm_efficiency: float
    op_overhead_s: float
    hop_latency_s: float
    gathers_along_whole_torus: float
    int8_moment_bytes: float
    op_time_in_a_step: float
    wait_per_doubling: float
    attention: AttentionRates = field(repr=False)
    reduces_at_once: bool = False  # over all axes of the torus, not one after another

    @classmethod
    def of(
        cls,
        target: Slice,
        *,
        op_time_in_a_step: float | None = None,
        wait_per_doubling: float | None = None,
        reduces_at_once: bool = False,
    ) -> "Machine":
        """Return the machine for one device of `target`.

        Args:
            target: The slice.
            op_time_in_a_step: Fitted on whole steps; by default the shipped value.
            wait_per_doubling: Fitted on whole steps; by default the shipped value.
            reduces_at_once: Whether libtpu reduces over all torus axes at once
                (xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter); the program
                does not show this.
        """
        chip = target.chip
        rates = ChipRates.of(chip.name)
        together = op_time_in_a_step or rates.op_time_in_a_step
        needed = "the step-time model"
        hbm = chip.per_device(chip.hbm_gbps).require(needed) * 1e9
        dcn = chip.per_device(dcn_rate(chip)).require(needed)
        return cls(
            slice=target,
            hbm_bytes_per_s=hbm,
            vmem_bytes_per_s=hbm * rates.vmem_over_hbm,
            ici_bytes_per_s=chip.ici_link_effective_gbps.require(needed) * 1e9,
            dcn_bytes_per_s=dcn * rates.dcn_share * 1e9,
            host_bytes_per_s=chip.per_device(chip.pcie_gbps).require(needed) * 1e9,
            matrix_efficiency=rates.matrix_efficiency / together,
            streamed_matrix_efficiency=rates.streamed_matrix_efficiency / together,
            grouped_efficiency=rates.grouped_efficiency / together,
            int8_over_bf16=rates.int8_over_bf16,
            int8_gain_over_rows=rates.int8_gain_over_rows,
            resident_bytes=rates.resident_mib * 2**20,
            hbm_efficiency=rates.hbm_efficiency / together,
            op_overhead_s=rates.op_overhead_s,
            hop_latency_s=rates.hop_latency_s,
            gathers_along_whole_torus=rates.gathers_along_whole_torus,
            int8_moment_bytes=rates.int8_moment_bytes,
            op_time_in_a_step=together,
            wait_per_doubling=(
                rates.wait_per_doubling if wait_per_doubling is None else wait_per_doubling
            ),
            attention=AttentionRates.of(chip.name),
            reduces_at_once=reduces_at_once,
        )

    def peak_flops(self, dtype: str) -> float:
        """Return a device's peak for a format; bf16's peak if the format has no own rate."""
        chip = self.slice.chip
        figure: Figure = chip.per_device(chip.peak(_peak_name(dtype)))
        if figure.value is None:
            figure = chip.per_device(chip.peak("bf16"))
        return figure.require("the step-time model") * 1e12

    def matrix_s(self, products: Iterable[MatrixProduct]) -> float:
        """Return the time of the matmuls at the share of peak that measured ones reach."""
        return sum(
            product.flops / (self.peak_flops(product.dtype) * self._share_of_peak(product))
            for product in products
        )

    def _share_of_peak(self, product: MatrixProduct) -> float:
        """Return the share of peak, which is lower if neither operand fits in VMEM."""
        stays = product.smaller_operand_bytes <= self.resident_bytes
        share = self.matrix_efficiency if stays else self.streamed_matrix_efficiency
        return share * (self.int8_over_bf16 if _peak_name(product.dtype) == "int8" else 1.0)

    def attention_share(self, head_dim: float) -> float:
        """Return the share of the bf16 peak that splash attention reaches, measured alone."""
        return self.attention.share(head_dim, of_products=self.matrix_efficiency)

    def hbm_s(self, amount: float) -> float:
        """Return the time to move bytes between HBM and the core."""
        return amount / (self.hbm_bytes_per_s * self.hbm_efficiency)


def _peak_name(dtype: str) -> PeakName:
    """Return the catalog's name of the rate; wider operands are fed to the MXU as bf16 pieces."""
    return parse_format(dtype).peak or "bf16"
