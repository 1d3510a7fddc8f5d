"""The measured Pallas programs themselves: tokamax's kernels with a row's own block sizes."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh
from tokamax._src.ops.attention import base as attention_base
from tokamax._src.ops.attention import pallas_mosaic_tpu as attention
from tokamax._src.ops.attention import pallas_mosaic_tpu_vjp as attention_vjp
from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu as ragged_dot

from kernel_rows.ragged_dot import named_tiles
from kernel_rows.rows import Row
from tpukit.hardware import get_chip

Program = tuple[Callable[..., Any], Sequence[Any]]
PROGRAMS: dict[str, Callable[[Row], Program]] = {}


def program_of(row: Row) -> Program | None:
    """The function a row timed and its arguments; None where it is not one of tokamax 0.0.12."""
    if row.impl != "pallas_mosaic_tpu" or not row.config or row.op not in PROGRAMS:
        return None
    function, arguments = PROGRAMS[row.op](row)
    return _on(row.device, function), arguments


def _on(device: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function traced as if a device of that name were here: the kernels ask which it is."""
    chip = get_chip(device)
    kind = jax.sharding.AbstractDevice(chip.device_kinds[0], chip.cores_per_device, "tpu")

    @wraps(function)
    def traced(*arrays: Any) -> Any:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
            return function(*arrays)

    return traced


def _shape(row: Row, argument: str) -> jax.ShapeDtypeStruct:
    shape = row.shapes[argument]
    assert shape is not None
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(row.dtypes[argument]))


def _attention_options(row: Row) -> dict[str, Any]:
    return {
        "precision": (jax.lax.DotAlgorithmPreset.DEFAULT,) * 2,
        "logits_dtype": jnp.dtype(jnp.float32),
        "logits_scale": row.static_args["logits_scale"],
        "bias": None,
        "logits_soft_cap": None,
        "mask": attention_base.Mask(is_causal=row.mask_kind == "causal"),
        "dropout_mask": None,
        "dropout_rate": 0.0,
        "paging_info": None,
        "q_indices": None,
        "k_indices": None,
        "normalize_output": True,
        "return_residuals": bool(row.static_args.get("return_residuals")),
    }


def _attention_forward(row: Row) -> Program:
    layouts = {
        name: attention.splash.QKVLayout[value] if name.endswith("_layout") else value
        for name, value in row.config.items()
    }
    config = attention.Config(**layouts)
    kernel, options = attention.PallasMosaicTpuFlashAttention(), _attention_options(row)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return kernel._fwd(q, k, v, config=config, **options)

    return attend, [_shape(row, name) for name in ("q", "k", "v")]


def _attention_backward(row: Row) -> Program:
    config = attention_vjp.Config(**row.config)
    kernel, options = attention_vjp.PallasMosaicTpuFlashAttentionVjp(), _attention_options(row)

    def attend_gradient(largest: Any, total: Any, *arrays: Any) -> Any:
        return kernel._fwd((largest, total), *arrays, config=config, **options)[0]

    names = ("residuals.0", "residuals.1", "out", "dout", "q", "k", "v")
    return attend_gradient, [_shape(row, name) for name in names]


def _ragged_dot(row: Row) -> Program:
    tile_m, tile_k, tile_n = named_tiles(row)
    config = ragged_dot.Config(
        tile_m=tile_m,
        tile_k=tile_k,
        tile_n=tile_n,
        input_buffer_count=row.config.get("input_buffer_count", 2),
    )
    kernel = ragged_dot.PallasMosaicTpuRaggedDot()
    variant = row.dims["variant"]
    dimensions = {
        "fwd": ragged_dot.DEFAULT_RAGGED_DOT_DIM_NUMS,
        "dlhs": ragged_dot.DLHS_RAGGED_DOT_DIM_NUMS,
        "drhs": ragged_dot.DRHS_RAGGED_DOT_DIM_NUMS,
    }[variant.split("_")[0]]
    wanted = row.static_args.get("preferred_element_type")

    def multiply(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
        return kernel._fwd(
            lhs,
            rhs,
            group_sizes=group_sizes,
            ragged_dot_dimension_numbers=dimensions,
            precision=(jax.lax.Precision.DEFAULT,) * 2,
            preferred_element_type=jnp.dtype(wanted) if wanted else None,
            return_residuals=bool(row.static_args.get("return_residuals")),
            config=config,
        )

    sizes = np.asarray(row.group_sizes, dtype=np.int32)
    return multiply, [_shape(row, "lhs"), _shape(row, "rhs"), sizes]


PROGRAMS.update(
    attention_fwd=_attention_forward,
    attention_bwd=_attention_backward,
    ragged_dot=_ragged_dot,
)
