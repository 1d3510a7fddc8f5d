"""The rates of one JAX device of a slice, and where each of them comes from."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...hardware import Figure, Slice
from ...hardware.catalog import dcn_rate
from ...hardware.formats import PeakName, parse_format
from ...hardware.rates import AttentionRates, ChipRates
from .work import MatrixProduct


@dataclass(frozen=True)
class Machine:
    """What a device can do, in SI units, with the fitted shares that ops reach inside a step."""

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
        """The machine behind one device of `target`.

        Args:
            target: The slice.
            op_time_in_a_step: Fitted on whole steps; by default as shipped.
            wait_per_doubling: The same.
            reduces_at_once: Whether libtpu was told to reduce over all axes of the torus at once
                (xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter); a program does
                not show it.
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
        """Peak of one device for products of a format; bf16's where it has no rate of its own."""
        chip = self.slice.chip
        figure: Figure = chip.per_device(chip.peak(_peak_name(dtype)))
        if figure.value is None:
            figure = chip.per_device(chip.peak("bf16"))
        return figure.require("the step-time model") * 1e12

    def matrix_s(self, products: Iterable[MatrixProduct]) -> float:
        """Time of the products at the share of peak that measured ones reach."""
        return sum(
            product.flops / (self.peak_flops(product.dtype) * self._share_of_peak(product))
            for product in products
        )

    def _share_of_peak(self, product: MatrixProduct) -> float:
        """Less when neither operand can stay in VMEM, because both are then read repeatedly."""
        stays = product.smaller_operand_bytes <= self.resident_bytes
        share = self.matrix_efficiency if stays else self.streamed_matrix_efficiency
        return share * (self.int8_over_bf16 if _peak_name(product.dtype) == "int8" else 1.0)

    def attention_share(self, head_dim: float) -> float:
        """Share of the bf16 peak that splash attention reaches, measured alone."""
        return self.attention.share(head_dim, of_products=self.matrix_efficiency)

    def hbm_s(self, amount: float) -> float:
        """Time to move bytes between HBM and the core."""
        return amount / (self.hbm_bytes_per_s * self.hbm_efficiency)


def _peak_name(dtype: str) -> PeakName:
    """Under which the catalog has the rate; wider operands enter the matrix unit as bf16 pieces."""
    return parse_format(dtype).peak or "bf16"
