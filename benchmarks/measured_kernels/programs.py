"""Rebuild the program that a measured row timed, if its source is available here."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh
from pydantic import JsonValue

from tpukit.errors import MissingExtraError, TPUError, TPUKernelError
from tpukit.hardware import get_chip
from tpukit.hardware.target import target_chip
from tpukit.kernels.registry.op import PALLAS_TPU, Direction, KernelCase, find_implementation
from tpukit.kernels.registry.registry import builtin_ops, get_tpu_op
from tpukit.kernels.timing.bench import kind_of

from .rows import MeasuredRow


@dataclass(frozen=True)
class MeasuredProgram:
    """A function, its arguments, and the kernel kind whose rates time it.

    Attributes:
        function: The program.
        arguments: Shapes, or arrays where the values decide what a kernel does.
        kind: The kernel kind; None for plain XLA.
    """

    function: Callable[..., Any]
    arguments: Sequence[Any]
    kind: str | None = None


def shape_of(row: MeasuredRow, argument: str) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of one argument of a row.

    Raises:
        TPUKernelError: The row does not state them, or jax has no such dtype.
    """
    for table, what in ((row.shapes, "shape"), (row.dtypes, "dtype")):
        if argument not in table:
            raise TPUKernelError(f"the row does not state the {what} of {argument!r}")
    try:
        dtype = jnp.dtype(row.dtypes[argument])
    except (TypeError, ValueError, SyntaxError) as error:
        raise TPUKernelError(
            f"{row.dtypes[argument]!r}, the dtype of {argument!r}, is not a dtype of jax"
        ) from error
    return jax.ShapeDtypeStruct(row.shapes[argument], dtype)


def group_sizes_of(row: MeasuredRow, shape: jax.ShapeDtypeStruct) -> np.ndarray:
    """Return the group sizes of a row, which decide how often a grouped kernel's loop runs.

    Raises:
        TPUKernelError: The row does not state them, or not for every group.
    """
    if row.group_sizes is None:
        raise TPUKernelError("the row does not state its group sizes")
    if shape.shape != (len(row.group_sizes.values),):
        raise TPUKernelError(
            f"the row has {len(row.group_sizes.values)} group sizes for group_sizes of shape "
            f"{list(shape.shape)}"
        )
    if max(row.group_sizes.values, default=0) > np.iinfo(np.int32).max:
        raise TPUKernelError("a group of the row does not fit in an int32")
    return np.asarray(row.group_sizes.values, np.int32)


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
# The op of tpukit whose measurements give the rates of such a kernel.
_KINDS = {
    "attention_fwd": "flash_attention",
    "attention_bwd": "flash_attention_backward",
    "ragged_dot": "grouped_matmul",
    "linear_softmax_cross_entropy_fwd": "cross_entropy",
    "linear_softmax_cross_entropy_bwd": "cross_entropy_backward",
}
_ACTIVATIONS = ("gelu", "relu", "sigmoid", "silu", "swish", "tanh")
# Arguments whose default is not None.
_DEFAULTS: Mapping[str, Any] = {
    "dropout_rate": 0.0,
    "normalize_output": True,
    "return_residuals": False,
    "scale_offset": 0.0,
}
# Presets that attention takes on a TPU for a precision.
_PRESETS_ON_TPU = {
    "DEFAULT": "BF16_BF16_F32",
    "HIGH": "BF16_BF16_F32_X3",
    "HIGHEST": "BF16_BF16_F32_X6",
}
# Arguments of later versions, with the value that this version always has.
_ALWAYS = ("zero_initialize",)
# Since then, kernels for the gradient of rows name their tiles after the forward matmul.
_TILES_RENAMED = "2026-05"
_LANES = 128


def tokamax_program(row: MeasuredRow) -> MeasuredProgram:
    """Return the program of a row that tokamax measured.

    Raises:
        TPUKernelError: The row is incomplete, or has arguments that this tokamax lacks.
        MissingExtraError: tokamax is not installed.
    """
    operation = _operation(*TOKAMAX_OPS[row.op, row.impl])
    parameters = list(inspect.signature(operation._fwd).parameters)
    keywords = _keywords(row, parameters)
    config = _config(row, operation)
    names = list(row.shapes)
    for name in names:
        if name.partition(".")[0] not in parameters:
            raise TPUKernelError(f"{name!r} is not an argument of tokamax's {row.op}")
    arguments: list[Any] = [shape_of(row, name) for name in names]
    if row.mask_kind not in (None, "none", "causal", "bool_mask"):
        raise TPUKernelError(f"its mask kind {row.mask_kind!r} is unknown")
    if row.op == "ragged_dot":
        if "float8" in " ".join(row.dtypes.values()):
            raise TPUKernelError(
                "its arrays are quantized, but the row does not state their scales"
            )
        place = names.index("group_sizes") if "group_sizes" in names else None
        if place is None:
            raise TPUKernelError("the row does not state the shape of group_sizes")
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
    module = import_module(f"tokamax._src.ops.{name}")
    flags: Any = import_module("absl.flags").FLAGS
    if not flags.is_parsed():  # or tokamax would read options from tpukit's command line
        flags.mark_as_parsed()
    return module


def _traced_on(device: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it is traced as if on such a device, which the kernels look up."""
    chip = get_chip(device)
    kind = jax.sharding.AbstractDevice(chip.device_kinds[0], chip.cores_per_device, "tpu")

    @wraps(function)
    def traced(*arrays: Any) -> Any:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
            return function(*arrays)

    return traced


def _keywords(row: MeasuredRow, parameters: list[str]) -> dict[str, Any]:
    """Return the arguments that are not arrays."""
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
        raise TPUKernelError(f"{name} {value!r} is unknown") from error
    if isinstance(value, (list, dict)):
        raise TPUKernelError(f"{name!r} has the value {value!r}, which is not supported")
    return value


def _precision(row: MeasuredRow, value: Any) -> Any:
    """Return a precision as each op takes it: a preset, or a pair."""
    if isinstance(value, str):
        return jax.lax.DotAlgorithmPreset[value]
    if row.op.startswith("attention"):
        both = [item if isinstance(item, str) else item[0] for item in value]
        return tuple(jax.lax.DotAlgorithmPreset[_PRESETS_ON_TPU.get(item, item)] for item in both)
    return tuple(jax.lax.Precision[item] for item in value)


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
    """Return arrays by argument: "residuals.0" is in a tuple, "mask.bool_mask" a field."""
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
    """Return the block sizes as this tokamax names them; None for plain XLA."""
    if not row.is_pallas:
        return None
    if not row.config:
        raise TPUKernelError("the row does not state its block sizes")
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
    """Return the tiles over m, k and n of the row's own matmul."""
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
        raise TPUKernelError(f"the row does not state {name}")
    return value


BACKWARD = "_backward"


def program_of(row: MeasuredRow) -> MeasuredProgram:
    """Rebuild the program of a row, and check that jax can trace it.

    Raises:
        TPUKernelError: With the reason why it cannot be rebuilt.
        SliceError: There is no such generation.
        MissingExtraError: The row needs tokamax, which is not installed.
    """
    chip = get_chip(row.device)
    if row.num_devices > 1:
        raise TPUKernelError(f"it ran on {row.num_devices} devices; only one is supported")
    if row.on_host_clock:
        raise TPUKernelError(
            f"its time may count the host's dispatch (timed by {row.timing_method!r})"
        )
    try:
        program = _write(row)
        with target_chip(chip.name):
            jax.eval_shape(program.function, *program.arguments)
    except TPUError:
        raise
    except Exception as error:  # a user's function may raise anything
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TPUKernelError(f"it cannot be traced: {said}") from error
    return program


def _write(row: MeasuredRow) -> MeasuredProgram:
    own = row.op.removesuffix(BACKWARD)
    if (row.op, row.impl) in TOKAMAX_OPS:
        return tokamax_program(row)
    if row.impl == "xla" and row.op in _PLAIN:
        return _PLAIN[row.op](row)
    if own in builtin_ops() and row.impl in get_tpu_op(own).implementations:
        return _own_program(row, own)
    raise TPUKernelError(UNDETERMINED.get((row.op, row.impl), "its source is not available"))


def _matmul(row: MeasuredRow) -> MeasuredProgram:
    """Return one matmul of the two arrays that a row names."""
    names = [name for name in row.shapes if name != "out"][:2]
    out = row.dtypes.get("out")

    def matmul(a: Any, b: Any) -> Any:
        return jnp.dot(a, b, preferred_element_type=jnp.dtype(out) if out else None)

    return MeasuredProgram(matmul, [shape_of(row, name) for name in names])


def _hbm_copy(row: MeasuredRow) -> MeasuredProgram:
    """Return a copy of that many bytes; sources do not state their type, which does not matter."""
    elements, odd = divmod(math.prod(next(iter(row.shapes.values()), ())), 4)
    if odd:
        raise TPUKernelError("its bytes are not a multiple of 32-bit words")

    def hbm_copy(x: Any) -> Any:
        return jnp.copy(x)

    return MeasuredProgram(hbm_copy, [jax.ShapeDtypeStruct((elements,), jnp.float32)])


_PLAIN: dict[str, Callable[[MeasuredRow], MeasuredProgram]] = {
    "matmul": _matmul,
    "hbm_copy": _hbm_copy,
}


def _own_program(row: MeasuredRow, name: str) -> MeasuredProgram:
    """Return an op of tpukit: `static_args` are its options, `config` the blocks that differ."""
    op = get_tpu_op(name)
    shapes = tuple(shape_of(row, argument) for argument in row.shapes)
    case = KernelCase(
        row.id, shapes, {key: value for key, value in row.static_args.items() if value is not None}
    )
    direction: Direction = "backward" if row.op.endswith(BACKWARD) else "forward"
    find_implementation(op.name, op.implementations, row.impl)
    blocks = None
    if row.config:
        default: Any = op.default_blocks(case, row.chip)
        try:
            blocks = replace(default, **row.config)
        except TypeError as error:
            raise TPUKernelError(
                f"its config has sizes that {op.name} does not have; it has "
                f"{', '.join(default.to_dict())}"
            ) from error
    arguments: list[Any] = list(shapes)
    if "group_sizes" in row.shapes:
        place = list(row.shapes).index("group_sizes")
        arguments[place] = group_sizes_of(row, shapes[place])
    function = op.bind(case, implementation=row.impl, blocks=blocks, direction=direction)
    return MeasuredProgram(
        function, arguments, kind_of(op, direction) if row.impl == PALLAS_TPU else None
    )
