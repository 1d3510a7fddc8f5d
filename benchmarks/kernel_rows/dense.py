"""Work of the ops XLA makes alone: gated linear unit, matmul, copy, norms, triangle."""

from kernel_rows.rows import Device, Row, padded_bytes


def gated_linear_unit_terms(row: Row, device: Device) -> dict[str, float]:
    """Both projections at once, their float32 result through HBM, then the gate."""
    m, k, n = row.dims["m"], row.dims["k"], row.dims["n"]
    item = row.item_bytes("x")
    wide = item == 4
    products = device.mxu_us(2.0 * m * device.pad(k) * device.pad(2 * n))
    between = device.hbm_us(padded_bytes((m, 2 * n), 4))
    ends = device.hbm_us(padded_bytes((m, k), item) + padded_bytes((m, n), item))
    return {
        "launch": 1.0,
        "products": products,
        "float32_products": products if wide else 0.0,
        "between": between,
        "float32_between": between if wide else 0.0,
        "ends": ends,
        "weights": device.hbm_us(padded_bytes((k, 2 * n), row.item_bytes("weights"))),
        "narrow": between if k <= 64 else 0.0,
    }


def matmul_terms(row: Row, device: Device) -> dict[str, float]:
    """One product, each operand read once."""
    m, k, n = row.dims["m"], row.dims["k"], row.dims["n"]
    return {
        "launch": 1.0,
        "products": device.mxu_us(2.0 * m * device.pad(k) * device.pad(n)),
        "traffic": device.hbm_us(2.0 * (m * k + k * n + m * n)),
    }


def copy_terms(row: Row, device: Device) -> dict[str, float]:
    """Every byte read and written."""
    return {"launch": 1.0, "traffic": device.hbm_us(2.0 * row.dims["bytes"])}


def norm_terms(row: Row, device: Device) -> dict[str, float]:
    """Every array of x's size read or written once: two forward, three backward."""
    passes = 3 if row.op.endswith("_bwd") else 2
    return {"launch": 1.0, "traffic": device.hbm_us(passes * row.argument_bytes("x"))}


def triangle_terms(row: Row, device: Device) -> dict[str, float]:
    """Gated projections of an (n, n, c) tensor and one product over n for each channel."""
    n, _, channels = row.dims["x_shape"]
    item = row.item_bytes("x")
    plane = padded_bytes((n * n, channels), item)
    return {
        "launch": 1.0,
        "products": device.mxu_us(2.0 * channels * n * n * device.pad(n)),
        "passes": device.hbm_us(plane),
    }
