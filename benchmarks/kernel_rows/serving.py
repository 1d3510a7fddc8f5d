"""Work of attention over a paged cache: one pass over the keys and values of every sequence."""

from kernel_rows.rows import Device, Row


def paged_decode_terms(row: Row, device: Device) -> dict[str, float]:
    """The cache read once, a fixed cost a sequence."""
    d = row.dims
    item = row.item_bytes("kv")
    cache = float(d["batch"]) * d["ctx"] * d["num_kv_heads"] * 2 * d["head_dim"] * item
    return {"launch": 1.0, "cache": device.hbm_us(cache), "sequences": float(d["batch"])}


def mla_terms(row: Row, device: Device) -> dict[str, float]:
    """Latent cache of one kv head: read once a block of queries, products padded to the unit."""
    d, config = row.dims, row.config
    tokens, width = d["max_num_tokens"], d["kv_lora_rank"] + d["qk_rope_head_dim"]
    queries = config.get("num_queries_per_block") or 1
    keys = d["page_size"] * (config.get("num_kv_pages_per_block") or 1)
    blocks = float(tokens) / queries
    visited = d["kv_len"] if d["case"] == "decode" else (d["kv_len"] + tokens) / 2
    rows = device.pad(queries * d["num_q_heads"])
    return {
        "launch": 1.0,
        "cache": device.hbm_us(blocks * visited * device.pad(width) * 2),
        "products": device.mxu_us(blocks * rows * visited * 2.0 * 2 * device.pad(width)),
        "steps": blocks * visited / keys,
    }
