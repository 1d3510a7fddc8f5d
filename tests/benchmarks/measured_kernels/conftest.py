import pytest

SHAPE = [2, 256, 2, 128]


def attention(**changed):
    """One measured attention row, small enough to be compiled in seconds."""
    return {
        "id": "a1",
        "device": "v6e",
        "op": "attention_fwd",
        "impl": "pallas_mosaic_tpu",
        "dims": {"batch": 2, "q_len": 256, "kv_len": 256},
        "shapes": {"q": SHAPE, "k": SHAPE, "v": SHAPE},
        "dtypes": {"q": "bfloat16", "k": "bfloat16", "v": "bfloat16"},
        "mask_kind": "causal",
        "static_args": {
            "precision": [["DEFAULT", "DEFAULT"], ["DEFAULT", "DEFAULT"]],
            "logits_dtype": "float32",
            "logits_scale": 0.088,
            "normalize_output": True,
            "dropout_rate": 0.0,
            "bias": None,
        },
        "config": {
            "block_q": 256,
            "block_kv": 256,
            "block_kv_compute": 256,
            "q_layout": "HEAD_DIM_MINOR",
            "k_layout": "HEAD_DIM_MINOR",
            "v_layout": "HEAD_DIM_MINOR",
            "use_experimental_scheduler": False,
            "use_base2_exp": True,
        },
        "measured_us": 20.0,
        "timing_method": "xprof_device_span",
        "source_date": "2026-08-19",
    } | changed


def ragged_dot(**changed):
    """One measured grouped product."""
    return {
        "id": "g1",
        "device": "v5p",
        "op": "ragged_dot",
        "impl": "pallas_mosaic_tpu",
        "dims": {"variant": "fwd_gmm", "m": 512, "k": 256, "n": 384, "num_groups": 2},
        "shapes": {"lhs": [512, 256], "rhs": [2, 256, 384], "group_sizes": [2]},
        "dtypes": {"lhs": "bfloat16", "rhs": "bfloat16", "group_sizes": "int32"},
        "group_sizes": {"kind": "explicit", "values": [200, 312]},
        "static_args": {"precision": ["DEFAULT", "DEFAULT"], "zero_initialize": True},
        "config": {"tile_m": 128, "tile_k": 256, "tile_n": 128, "combine_scopes": False},
        "measured_us": 15.0,
        "timing_method": "xprof_device_span",
        "source_date": "2026-07-21",
    } | changed


@pytest.fixture
def attention_row():
    return attention


@pytest.fixture
def ragged_dot_row():
    return ragged_dot
