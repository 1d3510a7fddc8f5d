"""Work of the fused projection and softmax cross-entropy, forward and backward."""

import math

from kernel_rows.rows import Device, Row, round_up

# Rows of x that stay in VMEM while the projection streams by, where a row does not say.
NOMINAL_ROWS, NOMINAL_VOCABULARY = 1024, 2048


def terms(row: Row, device: Device) -> dict[str, float]:
    """The product over hidden size and vocabulary, the logits, the weights read per block."""
    tokens, hidden, vocab = row.dims["tokens"], row.dims["hidden"], row.dims["vocab"]
    backward = row.op.endswith("_bwd")
    wide = row.dtype("x") == "float32"
    block_b = min(row.config.get("b_block_size") or NOMINAL_ROWS, tokens)
    block_v = row.config.get("v_block_size") or NOMINAL_VOCABULARY
    padded = float(tokens) * device.pad(hidden) * round_up(vocab, 128)
    products = device.mxu_us(2 * padded * (3 if backward else 1))
    logits = device.hbm_us(float(tokens) * vocab * (4 if wide else 2))
    weights = device.hbm_us(float(hidden) * vocab * row.item_bytes("w"))
    x = device.hbm_us(float(tokens) * hidden * row.item_bytes("x"))
    blocks = math.ceil(tokens / block_b)
    in_blocks = row.impl != "xla"  # XLA takes the product whole
    return {
        "launch": 1.0,
        "products": products,
        "float32_products": products if wide else 0.0,
        "logits": logits,
        "weights": weights,
        "weights_again": weights * (blocks - 1) if in_blocks else 0.0,
        "inputs_again": x * math.ceil(vocab / block_v) if in_blocks else 0.0,
        "steps": float(blocks) * math.ceil(vocab / block_v) if in_blocks else 0.0,
        "long": products if tokens >= 8192 else 0.0,
        "long_float32": products if tokens >= 8192 and wide else 0.0,
    }
