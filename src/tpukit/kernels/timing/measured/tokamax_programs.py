"""The ops of tokamax: most public measurements of TPU kernels are in its tuning caches.

Its XLA implementations are the base classes that its kernels override, so that both sides of a
comparison are written by the same hands.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from pydantic import JsonValue

from ....errors import MissingExtraError, TPUKernelError
from ....hardware import get_chip
from .arguments import MeasuredProgram, group_sizes_of, shape_of
from .rows import MeasuredRow

_ATTENTION, _LOSS = "attention", "linear_softmax_cross_entropy_loss"
_PALLAS = "pallas_mosaic_tpu"
# Module and class of each program.
TOKAMAX_OPS: dict[tuple[str, str], tuple[str, str]] = {
    ("attention_fwd", "xla"): (f"{_ATTENTION}.base", "DotProductAttention"),
    ("attention_bwd", "xla"): (f"{_ATTENTION}.base", "DotProductAttentionVjp"),
    ("attention_fwd", _PALLAS): (f"{_ATTENTION}.{_PALLAS}", "PallasMosaicTpuFlashAttention"),
    ("attention_bwd", _PALLAS): (
        f"{_ATTENTION}.{_PALLAS}_vjp",
        "PallasMosaicTpuFlashAttentionVjp",
    ),
    ("ragged_dot", "xla"): ("ragged_dot.base", "RaggedDot"),
    ("ragged_dot", _PALLAS): (f"ragged_dot.{_PALLAS}", "PallasMosaicTpuRaggedDot"),
    ("linear_softmax_cross_entropy_fwd", "xla"): (
        f"{_LOSS}.base",
        "LinearSoftmaxCrossEntropyLoss",
    ),
    ("linear_softmax_cross_entropy_bwd", "xla"): (
        f"{_LOSS}.base",
        "LinearSoftmaxCrossEntropyLossVjp",
    ),
    ("linear_softmax_cross_entropy_fwd", _PALLAS): (
        f"{_LOSS}.{_PALLAS}",
        "PallasMosaicTpuLinearSoftmaxCrossEntropyLoss",
    ),
    ("linear_softmax_cross_entropy_bwd", _PALLAS): (
        f"{_LOSS}.{_PALLAS}",
        "PallasMosaicTpuLinearSoftmaxCrossEntropyLossVjp",
    ),
    ("gated_linear_unit", "xla"): ("gated_linear_unit.base", "GatedLinearUnit"),
    ("normalization_fwd", "xla"): ("normalization.base", "Normalization"),
    ("normalization_bwd", "xla"): ("normalization.base", "NormalizationVjp"),
    ("triangle_multiplication", "xla"): ("triangle_multiplication.base", "TriangleMultiplication"),
}
# Programs of tokamax that a row does not determine.
UNDETERMINED = {
    ("attention_fwd", "xla_chunked"): "the row does not say how long its chunks are",
}
# The op of tpukit whose measured kernels say how fast such a kernel runs.
_KINDS = {
    "attention_fwd": "flash_attention",
    "attention_bwd": "flash_attention_backward",
    "ragged_dot": "grouped_matmul",
    "linear_softmax_cross_entropy_fwd": "cross_entropy",
    "linear_softmax_cross_entropy_bwd": "cross_entropy_backward",
}
_ACTIVATIONS = ("gelu", "relu", "sigmoid", "silu", "swish", "tanh")
# Arguments that are not None where a row does not name them.
_DEFAULTS: Mapping[str, Any] = {
    "dropout_rate": 0.0,
    "normalize_output": True,
    "return_residuals": False,
    "scale_offset": 0.0,
}
# What attention makes of a precision where it runs on a TPU.
_PRESETS_ON_TPU = {
    "DEFAULT": "BF16_BF16_F32",
    "HIGH": "BF16_BF16_F32_X3",
    "HIGHEST": "BF16_BF16_F32_X6",
}
# Asked for by later versions, and what the kernels of this one always do.
_ALWAYS = ("zero_initialize",)
# Of a gradient for the rows, kernels since then name their tiles after the forward product.
_TILES_RENAMED = "2026-05"
_LANES = 128


def tokamax_program(row: MeasuredRow) -> MeasuredProgram:
    """The program of a row that tokamax measured, by the class that it measured.

    Raises:
        TPUKernelError: The row does not say enough, or asks for what this tokamax does not have.
        MissingExtraError: tokamax is not installed.
    """
    operation = _operation(*TOKAMAX_OPS[row.op, row.impl])
    parameters = list(inspect.signature(operation._fwd).parameters)
    keywords = _keywords(row, parameters)
    config = _config(row, operation)
    names = list(row.shapes)
    for name in names:
        if name.partition(".")[0] not in parameters:
            raise TPUKernelError(f"{name!r} is no argument of tokamax's {row.op}")
    arguments: list[Any] = [shape_of(row, name) for name in names]
    if row.mask_kind not in (None, "none", "causal", "bool_mask"):
        raise TPUKernelError(f"its mask is of kind {row.mask_kind!r}, which is not understood")
    if row.op == "ragged_dot":
        if "float8" in " ".join(row.dtypes.values()):
            raise TPUKernelError("its arrays are quantized, and the row does not say their scales")
        place = names.index("group_sizes") if "group_sizes" in names else None
        if place is None:
            raise TPUKernelError("the row does not say the shape of group_sizes")
        arguments[place] = group_sizes_of(row, arguments[place])

    def run(*arrays: Any) -> Any:
        given = _nested(dict(zip(names, arrays, strict=True)))
        if "mask" in parameters and row.op.startswith("attention"):
            given["mask"] = _mask(row, given.get("mask", {}))
        result = operation._fwd(**given, **keywords, config=config)
        return result if keywords["return_residuals"] else result[0]

    run.__name__ = row.op
    kind = _KINDS.get(row.op) if row.is_pallas else None
    return MeasuredProgram(_traced_on(row.device, run), arguments, kind)


def _operation(module: str, name: str) -> Any:
    try:
        return getattr(_module(module), name)()
    except ImportError as error:
        raise MissingExtraError("bench", needed_for="a measured row", module="tokamax") from error


def _module(name: str) -> Any:
    found = import_module(f"tokamax._src.ops.{name}")
    flags: Any = import_module("absl.flags").FLAGS
    if not flags.is_parsed():  # or tokamax would take options off a command line that is ours
        flags.mark_as_parsed()
    return found


def _traced_on(device: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function traced as if such a device were here: the kernels ask which it is."""
    chip = get_chip(device)
    kind = jax.sharding.AbstractDevice(chip.device_kinds[0], chip.cores_per_device, "tpu")

    @wraps(function)
    def traced(*arrays: Any) -> Any:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
            return function(*arrays)

    return traced


def _keywords(row: MeasuredRow, parameters: list[str]) -> dict[str, Any]:
    """The arguments that are not arrays."""
    arrays = {name.partition(".")[0] for name in row.shapes} | {"config", "mask", "group_sizes"}
    for name, value in row.static_args.items():
        if value and name not in parameters and name not in _ALWAYS:
            raise TPUKernelError(
                f"this tokamax's {row.op} has no argument {name!r} (it is {value!r})"
            )
    return {name: _keyword(row, name) for name in parameters if name not in arrays}


def _keyword(row: MeasuredRow, name: str) -> Any:
    if name == "ragged_dot_dimension_numbers":
        return _dimension_numbers(row)
    value = row.static_args.get(name)
    if value is None:
        return _DEFAULTS.get(name)
    try:
        if name == "precision":
            return _precision(row, value)
        if name in ("logits_dtype", "preferred_element_type"):
            return jnp.dtype(str(value))
        if name == "activation":
            return getattr(jax.nn, value if value in _ACTIVATIONS else "")
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise TPUKernelError(f"{name} {value!r} is none that is known here") from error
    if isinstance(value, (list, dict)):
        raise TPUKernelError(f"{name!r} is given as {value!r}, which is not understood")
    return value


def _precision(row: MeasuredRow, value: Any) -> Any:
    """As each op takes it: one preset, a pair of presets for attention, else a pair."""
    if isinstance(value, str):
        return jax.lax.DotAlgorithmPreset[value]
    if row.op.startswith("attention"):
        both = [one if isinstance(one, str) else one[0] for one in value]
        return tuple(jax.lax.DotAlgorithmPreset[_PRESETS_ON_TPU.get(one, one)] for one in both)
    return tuple(jax.lax.Precision[one] for one in value)


def _dimension_numbers(row: MeasuredRow) -> Any:
    kernels, variant = _module(f"ragged_dot.{_PALLAS}"), str(row.dims.get("variant", ""))
    names = {
        "fwd": "DEFAULT_RAGGED_DOT_DIM_NUMS",
        "dlhs": "DLHS_RAGGED_DOT_DIM_NUMS",
        "drhs": "DRHS_RAGGED_DOT_DIM_NUMS",
    }
    if variant.split("_")[0] not in names:
        raise TPUKernelError(f"{variant!r} is no variant of ragged_dot; expected fwd, dlhs or drhs")
    return getattr(kernels, names[variant.split("_")[0]])


def _mask(row: MeasuredRow, given: Mapping[str, Any]) -> Any:
    mask = _module(f"{_ATTENTION}.base").Mask
    return mask(given.get("bool_mask"), is_causal=row.mask_kind == "causal")


def _nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays by argument: "residuals.0" is the first of a tuple, "mask.bool_mask" a part."""
    plain: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        argument, dot, part = name.partition(".")
        if dot:
            parts.setdefault(argument, {})[part] = array
        else:
            plain[argument] = array
    for argument, named in parts.items():
        numbered = all(part.isdigit() for part in named)
        plain[argument] = tuple(named[part] for part in sorted(named)) if numbered else named
    return plain


def _config(row: MeasuredRow, operation: Any) -> Any:
    """The block sizes as this tokamax writes them; None for what XLA makes."""
    if not row.is_pallas:
        return None
    if not row.config:
        raise TPUKernelError("the row does not say its block sizes")
    known = {field.name for field in fields(operation.config_cls)}
    for name, value in row.config.items():
        if value and name not in known:
            raise TPUKernelError(f"this tokamax's {row.op} has no block size {name!r}")
    sizes: dict[str, Any] = {key: value for key, value in row.config.items() if key in known}
    if row.op == "ragged_dot":
        sizes |= _named_tiles(row)
    try:
        for name in sizes:
            if name.endswith("_layout"):
                layouts = _module(f"{_ATTENTION}.{_PALLAS}").splash.QKVLayout
                sizes[name] = layouts[sizes[name]]
        return operation.config_cls(**sizes)
    except (KeyError, TypeError, ValueError) as error:
        raise TPUKernelError(f"tokamax refuses its block sizes {dict(row.config)}") from error


def _named_tiles(row: MeasuredRow) -> dict[str, int]:
    """The tiles over m, k and n of the row's own product."""
    tile_m, tile_k, tile_n = (_size(row.config, name) for name in ("tile_m", "tile_k", "tile_n"))
    k, n = _size(row.dims, "k"), _size(row.dims, "n")
    too_large = tile_k >= k + _LANES or tile_n >= n + _LANES
    renamed = row.source_date >= _TILES_RENAMED or too_large
    if str(row.dims.get("variant")).startswith("dlhs") and renamed:
        tile_k, tile_n = tile_n, tile_k
    return {"tile_m": tile_m, "tile_k": tile_k, "tile_n": tile_n}


def _size(table: Mapping[str, JsonValue], name: str) -> int:
    value = table.get(name)
    if not isinstance(value, int):
        raise TPUKernelError(f"the row does not say {name}")
    return value
