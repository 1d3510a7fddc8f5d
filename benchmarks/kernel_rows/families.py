"""Which model a row is estimated with, and which rows no model covers."""

from collections.abc import Callable
from dataclasses import dataclass

from kernel_rows import attention, cross_entropy, dense, ragged_dot, serving
from kernel_rows.rows import Device, Row, device_of
from tpukit.errors import SliceError

Terms = Callable[[Row, Device], dict[str, float]]

MODELS: dict[tuple[str, str], Terms] = {
    ("attention_fwd", "xla"): attention.xla_terms,
    ("attention_bwd", "xla"): attention.xla_terms,
    ("attention_fwd", "xla_chunked"): attention.chunked_terms,
    ("attention_fwd", "pallas_mosaic_tpu"): attention.pallas_terms,
    ("attention_bwd", "pallas_mosaic_tpu"): attention.pallas_terms,
    ("ragged_dot", "xla"): ragged_dot.terms,
    ("ragged_dot", "pallas_mosaic_tpu"): ragged_dot.terms,
    ("ragged_dot", "pallas_mosaic_tpu_v2"): ragged_dot.terms,
    ("linear_softmax_cross_entropy_fwd", "xla"): cross_entropy.terms,
    ("linear_softmax_cross_entropy_fwd", "xla_chunked"): cross_entropy.terms,
    ("linear_softmax_cross_entropy_fwd", "pallas_mosaic_tpu"): cross_entropy.terms,
    ("linear_softmax_cross_entropy_bwd", "xla"): cross_entropy.terms,
    ("linear_softmax_cross_entropy_bwd", "pallas_mosaic_tpu"): cross_entropy.terms,
    ("gated_linear_unit", "xla"): dense.gated_linear_unit_terms,
    ("matmul", "xla"): dense.matmul_terms,
    ("normalization_fwd", "xla"): dense.norm_terms,
    ("hbm_copy", "xla"): dense.copy_terms,
    ("normalization_bwd", "xla"): dense.norm_terms,
    ("triangle_multiplication", "xla"): dense.triangle_terms,
    ("paged_attention_decode", "pallas_stacked_rpa"): serving.paged_decode_terms,
    ("mla_paged_attention_decode", "pallas"): serving.mla_terms,
    ("mla_paged_attention_mixed", "pallas"): serving.mla_terms,
}
NOT_MODELLED = {
    "fused_moe_ep": "a kernel of several devices with its exchange inside: not a kernel's time",
    "ragged_paged_attention_v3": "the source does not say how many sequences were decoded",
}


@dataclass(frozen=True)
class Work:
    """A row, the group whose constants it takes, and its work in ideal microseconds by kind."""

    row: Row
    regime: str
    terms: dict[str, float]

    @property
    def group(self) -> tuple[str, str, str, str]:
        """Rows that share constants: one device, one program."""
        return self.row.device, self.row.op, self.row.impl, self.regime


def work_of(row: Row) -> Work | str:
    """A row's work, or why it has no estimate."""
    if not row.timed_on_device:
        return f"timed by {row.timing_method}: not known to be the kernel alone"
    model = MODELS.get((row.op, row.impl))
    if model is None:
        return NOT_MODELLED.get(row.op, f"no model for {row.op} as {row.impl}")
    try:
        regime = ragged_dot.regime(row) if row.op == "ragged_dot" else ""
        return Work(row, regime, model(row, device_of(row.device)))
    except KeyError as missing:
        return f"the row does not say {missing}"
    except SliceError as unknown:
        return str(unknown)
