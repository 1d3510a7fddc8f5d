"""Work of attention, forward and backward: XLA, XLA in chunks, and the Pallas splash kernel."""

import math
from dataclasses import dataclass

from kernel_rows.rows import Device, Row, padded_bytes, round_up

LANES = 128
# Block sizes the kernel takes where a row does not name them.
DEFAULT_BLOCK = 128


@dataclass(frozen=True)
class Sizes:
    """The sizes of one attention call."""

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    item_bytes: float

    @classmethod
    def of(cls, row: Row) -> "Sizes":
        """The sizes a row names."""
        d = row.dims
        return cls(
            d["batch"],
            d["q_len"],
            d["kv_len"],
            d["num_q_heads"],
            d["num_kv_heads"],
            d["head_dim_qk"],
            d["head_dim_v"],
            row.item_bytes("q"),
        )

    @property
    def heads(self) -> int:
        """Independent (batch, query head) pairs."""
        return self.batch * self.q_heads

    @property
    def logits(self) -> float:
        """Elements of the score matrices."""
        return float(self.heads) * self.q_len * self.kv_len

    def product_flops(self, device: Device, elements: float, products: int) -> float:
        """Flops of `products` pairs of matrix products over visited scores, padded to the unit."""
        return products * elements * (device.pad(self.qk_dim) + device.pad(self.v_dim))

    def io_bytes(self) -> float:
        """q, k, v and the output, laid out with the head size in the lanes."""
        q = padded_bytes((self.heads * self.q_len, self.qk_dim), self.item_bytes)
        out = padded_bytes((self.heads * self.q_len, self.v_dim), self.item_bytes)
        pairs = self.batch * self.kv_heads * self.kv_len
        k = padded_bytes((pairs, self.qk_dim), self.item_bytes)
        v = padded_bytes((pairs, self.v_dim), self.item_bytes)
        return q + out + k + v

    def compact_bytes(self) -> float:
        """The same with no lane left empty."""
        queries = self.heads * self.q_len * (self.qk_dim + self.v_dim)
        keys = self.batch * self.kv_heads * self.kv_len * (self.qk_dim + self.v_dim)
        return float(queries + keys) * self.item_bytes


def xla_terms(row: Row, device: Device) -> dict[str, float]:
    """Products, passes over the scores in HBM, arguments, and what some variants add."""
    sizes = Sizes.of(row)
    backward = row.op.endswith("_bwd")
    scores = device.hbm_us(sizes.logits * 4)
    io = device.hbm_us(sizes.io_bytes())
    products = 5 if backward else 2
    flops = sizes.product_flops(device, sizes.logits, products)
    repeated = sizes.q_heads // sizes.kv_heads - 1
    return {
        "launch": 1.0,
        "products": device.mxu_us(flops),
        "unpadded_products": device.mxu_us(products * sizes.logits * (sizes.qk_dim + sizes.v_dim)),
        "scores": scores,
        "wide_heads": io if sizes.qk_dim >= 256 else 0.0,
        "arguments": io,
        "compact_arguments": device.hbm_us(sizes.compact_bytes()),
        "mask": device.hbm_us(row.argument_bytes("bias") + row.argument_bytes("mask.bool_mask")),
        "causal": scores if row.mask_kind == "causal" else 0.0,
        "masked_scores": scores if row.mask_kind == "bool_mask" else 0.0,
        "float16": io if row.dtype("q") == "float16" else 0.0,
        "repeated_heads": io * repeated,
        "residuals": _residual_us(row, sizes, device),
    }


def chunked_terms(row: Row, device: Device) -> dict[str, float]:
    """As XLA's, with keys and values read again for every chunk of queries."""
    sizes = Sizes.of(row)
    chunks = math.ceil(sizes.q_len / 512)
    terms = xla_terms(row, device)
    terms["keys_again"] = device.hbm_us(sizes.io_bytes() / 2) * (chunks - 1)
    terms["in_chunks"] = terms["scores"] if chunks > 1 else 0.0
    return terms


def pallas_terms(row: Row, device: Device) -> dict[str, float]:
    """Tiles visited by the splash kernel, their products and softmax, and the transposes around."""
    sizes = Sizes.of(row)
    backward = row.op.endswith("_bwd")
    suffix = "_dkv" if backward else ""
    block_q = min(row.config.get(f"block_q{suffix}") or DEFAULT_BLOCK, sizes.q_len)
    block_kv = min(row.config.get(f"block_kv{suffix}") or DEFAULT_BLOCK, sizes.kv_len)
    compute = min(row.config.get(f"block_kv{suffix}_compute") or block_kv, block_kv)
    visited, cut = tiles(sizes, block_q, block_kv, causal=row.mask_kind == "causal")
    elements = float(sizes.heads) * visited * block_q * block_kv
    cut_elements = float(sizes.heads) * cut * block_q * block_kv
    steps = float(sizes.heads) * visited
    io = device.hbm_us(sizes.io_bytes())
    # The softmax works on (8, 128) registers; counted as one pass of the matrix unit's edge, so
    # that the term has the unit of the others.
    softmax = device.mxu_us(2 * elements * device.mxu_size)
    exposed = sizes.heads * _fill_us(sizes, block_q, block_kv, device)
    return {
        "launch": 1.0,
        "products": device.mxu_us(sizes.product_flops(device, elements, 5 if backward else 2)),
        "softmax": softmax,
        "masking": device.mxu_us(2 * cut_elements * device.mxu_size),
        "steps": steps,
        "inner_steps": steps * block_kv / compute,
        "head_start": exposed,
        "transposes": io,
        "arguments": device.hbm_us(sizes.compact_bytes()),
        "residuals": _residual_us(row, sizes, device),
    }


def tiles(sizes: Sizes, block_q: int, block_kv: int, *, causal: bool) -> tuple[int, int]:
    """Tiles visited for one head, and those of them the diagonal cuts."""
    rows, columns = math.ceil(sizes.q_len / block_q), math.ceil(sizes.kv_len / block_kv)
    if not causal:
        return rows * columns, 0
    visited = cut = 0
    for i in range(rows):
        first, last = i * block_q, min((i + 1) * block_q, sizes.q_len) - 1
        reached = min(last // block_kv + 1, columns)
        whole = min((first + 1) // block_kv, columns)
        visited += reached
        cut += reached - whole
    return visited, cut


def _fill_us(sizes: Sizes, block_q: int, block_kv: int, device: Device) -> float:
    """Reading the first tile of a head, which nothing hides."""
    width = round_up(sizes.qk_dim, LANES) + round_up(sizes.v_dim, LANES)
    return device.hbm_us((block_q + block_kv) * width * sizes.item_bytes)


def _residual_us(row: Row, sizes: Sizes, device: Device) -> float:
    """Row maxima and sums, each stored with a whole register of lanes an element."""
    if not row.static_args.get("return_residuals") and not row.op.endswith("_bwd"):
        return 0.0
    return device.hbm_us(2.0 * sizes.heads * sizes.q_len * LANES * 4)
