"""Arrays, `VQArray`s and codebooks in safetensors files, with a description that is checked.

The header holds `format_version`, `kind` ("codebook" or "arrays"), `source` (origin of the data, as
free text), `digest` of all tensors, and a description of the arrays. A reader checks the header
against the tensors before it builds arrays. Pickles are never read.
"""

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ...errors import TPUCheckpointError, TPUValidationError
from ...plain_data import JsonMapping, JsonObject, parse_json
from ...runtime.files import start_of_tensors, write_output
from ..codebooks.codebook import Codebook, FitReport, code_dtype, parse_metric
from ..formats import TRELLIS_BITS, CodeLayout, VQFormat
from ..vector_codes.trellis import padded_width
from ..vector_codes.vq_array import VQArray

_MOST = 2**40


def describe(array: VQArray) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Return the tensors of an array by their names in a file, and their description."""
    format = array.format
    parts = {"indices": array.codes, "codebook": array.entries, "scale": array.scales}
    if array.signs is not None:
        parts["signs"] = array.signs
    return parts, {
        "shape": list(array.shape),
        "layout": array.layout,
        "length": format.length,
        "entries": format.entries,
        "stages": format.stages,
        "leading": list(array.codes.shape[:-3]),
        "rotated": array.signs is not None,
    }


def array_from(place: Path, name: str, description: Any, tensors: dict[str, np.ndarray]) -> VQArray:
    """Build an array from its description; its tensors are removed from `tensors`.

    Raises:
        TPUCheckpointError: Description and tensors contradict each other.
    """
    where = Path(f"{place}: {name}")
    if not isinstance(description, dict):
        raise TPUCheckpointError(f"{where} has no description.")
    shape = _sizes(where, description.get("shape"))
    leading = _sizes(where, description.get("leading", []))
    layouts = get_args(CodeLayout)
    layout = next((layout for layout in layouts if layout == description.get("layout")), None)
    if len(shape) != 2 or layout is None or not isinstance(description.get("rotated"), bool):
        raise TPUCheckpointError(
            f"{where} has shape {shape} and layout {description.get('layout')!r}; expected "
            f"(in, out) and one of {', '.join(layouts)}."
        )
    stages, entries, length = sizes_in(where, description, ("stages", "entries", "length"))
    bits = TRELLIS_BITS.get(layout, 0)
    try:
        format = VQFormat(length=length, entries=entries, stages=stages, trellis=bits)
    except TPUValidationError as error:
        raise TPUCheckpointError(f"{where}: {error}") from None
    if format.layout != layout:
        raise TPUCheckpointError(f"{where} has layout {layout}; {format.name} is {format.layout}.")
    width = padded_width(shape[1]) * bits // 8 if bits else shape[1]
    kind = "uint8" if bits else np.dtype(code_dtype(entries)).name
    tall = -(-shape[0] // length)

    def part(key: str, dtype: str, sizes: tuple[int, ...]) -> np.ndarray:
        full = f"{name}.{key}"
        tensor = expect(place, tensors, full, (dtype,), (*leading, *sizes))
        del tensors[full]
        return tensor

    codes = part("indices", kind, (stages, tall, width))
    if not bits and codes.size and int(codes.max()) >= entries:
        raise TPUCheckpointError(
            f"{where} has index {int(codes.max())}; its codebook has {entries} entries."
        )
    table = part("codebook", "int8", (stages, entries, length))
    scales = part("scale", "bfloat16", (shape[1],))
    signs = part("signs", "int8", (shape[0],)) if description["rotated"] else None
    if not np.isfinite(scales.astype(np.float32)).all():
        raise TPUCheckpointError(f"{where} has scales that are not finite.")
    if signs is not None and not (np.abs(signs.astype(np.int32)) == 1).all():
        raise TPUCheckpointError(f"{where} has signs that are neither 1 nor -1.")
    return VQArray(
        jnp.asarray(codes),
        jnp.asarray(table),
        jnp.asarray(scales),
        None if signs is None else jnp.asarray(signs),
        (shape[0], shape[1]),
        layout,
    )


def expect(
    place: Path,
    tensors: Mapping[str, np.ndarray],
    name: str,
    dtypes: tuple[str, ...],
    shape: tuple[int, ...],
) -> np.ndarray:
    """Remove a tensor from those of a file, and return it.

    Raises:
        TPUCheckpointError: It is missing, or has another dtype or shape.
    """
    tensor = tensors.get(name)
    if tensor is None:
        raise TPUCheckpointError(f"{place} has no tensor {name!r}.")
    if tensor.dtype.name not in dtypes or tensor.shape != shape:
        raise TPUCheckpointError(
            f"{place} has {name} as {tensor.dtype}{list(tensor.shape)}; expected "
            f"{' or '.join(dtypes)}{list(shape)}."
        )
    return tensor


def sizes_in(place: Path, description: JsonMapping, names: tuple[str, ...]) -> list[int]:
    """Return the sizes that a description lists by name.

    Raises:
        TPUCheckpointError: A size is missing or is no whole number in range.
    """
    sizes: list[int] = []
    for name in names:
        value = description.get(name)
        if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 16:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**20:
            raise TPUCheckpointError(f"{place} gives {name}={value!r:.40}; expected a size.")
        sizes.append(value)
    return sizes


def _sizes(place: Path, sizes: Any) -> tuple[int, ...]:
    is_shape = isinstance(sizes, list) and len(sizes) <= 4
    if not is_shape or not all(type(size) is int and 0 < size <= _MOST for size in sizes):
        raise TPUCheckpointError(f"{place} gives sizes {sizes!r:.60}; expected whole numbers.")
    if math.prod(sizes) > _MOST:
        raise TPUCheckpointError(
            f"{place} describes {math.prod(sizes):,} values, which is too many; it is damaged."
        )
    return tuple(sizes)


logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
MOST_BYTES = 256 * 2**30
"""The largest file that is read, unless the caller says otherwise."""
_MOST_HEADER = 64 * 2**20
_PICKLE_SUFFIXES = (".pkl", ".pickle", ".pt", ".pth", ".bin")


def save_codebook(path: str | Path, codebook: Codebook, *, source: str = "") -> Path:
    """Write a codebook as safetensors.

    Args:
        path: File to write. It is safetensors even with the suffix of a pickle, which is logged.
        codebook: The codebook to write.
        source: Origin of the data, as free text for readers.

    Raises:
        TPUValidationError: The file cannot be written.
    """
    about = {
        "metric": codebook.metric,
        "length": str(codebook.length),
        "entries": str(codebook.size),
        "stages": str(codebook.stages),
        "fit": json.dumps(None if codebook.fit is None else codebook.fit.to_dict()),
    }
    tensors = {"codebook": np.asarray(codebook.entries), "scale": np.asarray(codebook.scale)}
    return _write(Path(path), "codebook", tensors, about, source)


def load_codebook(path: str | Path) -> Codebook:
    """Read a file that `save_codebook` wrote.

    Raises:
        TPUCheckpointError: The file is a pickle, of another kind or version, or damaged.
    """
    place = Path(path)
    tensors, about = _read(place, "codebook", MOST_BYTES)
    try:
        metric = parse_metric(about.get("metric", ""))
    except TPUValidationError as error:
        raise TPUCheckpointError(f"{place}: {error}") from None
    stages, entries, length = sizes_in(place, about, ("stages", "entries", "length"))
    table = expect(place, tensors, "codebook", ("int8", "float32"), (stages, entries, length))
    scale = expect(place, tensors, "scale", ("float32",), ())
    if not np.isfinite(table.astype(np.float32)).all() or not np.isfinite(scale):
        raise TPUCheckpointError(f"{place} holds entries that are not finite.")
    return Codebook(jnp.asarray(table), jnp.asarray(scale), metric, _fit_in(about))


def save_arrays(
    path: str | Path,
    arrays: Mapping[str, VQArray],
    *,
    others: Mapping[str, jax.Array] | None = None,
    source: str = "",
) -> Path:
    """Write quantized matrices and plain arrays by name.

    Raises:
        TPUValidationError: The file cannot be written, or a name is used twice.
    """
    tensors: dict[str, np.ndarray] = {}
    about: JsonObject = {}
    for name, array in arrays.items():
        parts, about[name] = describe(array)
        tensors |= {f"{name}.{part}": np.asarray(value) for part, value in parts.items()}
    for name, value in (others or {}).items():
        if name in tensors:
            raise TPUValidationError(
                f"{name!r} is the name of a plain array and of a part of a quantized one; rename "
                "one."
            )
        tensors[name] = np.asarray(value)
    return _write(Path(path), "arrays", tensors, {"arrays": json.dumps(about)}, source)


def load_arrays(
    path: str | Path, *, most_bytes: int = MOST_BYTES
) -> tuple[dict[str, VQArray], dict[str, jax.Array]]:
    """Read a file that `save_arrays` wrote; return quantized matrices and plain arrays.

    Raises:
        TPUCheckpointError: The file is a pickle, of another kind or version, damaged, or too large.
    """
    place = Path(path)
    tensors, about = _read(place, "arrays", most_bytes)
    described = _plain(place, about.get("arrays", ""))
    if not isinstance(described, dict):
        raise TPUCheckpointError(
            f"{place} has no description of its arrays; write it again with save_arrays."
        )
    arrays: dict[str, VQArray] = {}
    for name, description in described.items():
        arrays[name] = array_from(place, name, description, tensors)
    return arrays, {name: jnp.asarray(value) for name, value in tensors.items()}


def _write(
    place: Path, kind: str, tensors: dict[str, np.ndarray], about: dict[str, str], source: str
) -> Path:
    if place.suffix in _PICKLE_SUFFIXES:
        logger.warning("%s is written as safetensors, not as a pickle, under that name", place.name)
    header = about | {
        "format_version": str(FORMAT_VERSION),
        "kind": kind,
        "source": source,
        "digest": _digest(tensors),
    }
    arrays = {name: np.asarray(value, order="C") for name, value in tensors.items()}
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TPUValidationError(
            f"{place.parent} cannot be made ({error.strerror}); choose another place."
        ) from None
    write_output(place, save(arrays, header))
    logger.info("save kind=%s tensors=%d path=%s", kind, len(tensors), place)
    return place


def _read(place: Path, kind: str, most_bytes: int) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return all tensors and the header, after the checks that all kinds share."""
    start = start_of_tensors(
        place, instead="Write it with save_codebook, which makes safetensors under any name."
    )
    size = place.stat().st_size
    if size > most_bytes:
        raise TPUCheckpointError(f"{place} has {size:,} bytes; at most {most_bytes:,} are read.")
    if len(start) < 9 or int.from_bytes(start[:8], "little") > min(size, _MOST_HEADER):
        raise TPUCheckpointError(f"{place} is no safetensors file: its header is not valid.")
    try:
        with safe_open(place, framework="np") as opened:
            about = opened.metadata() or {}
            _check_kind(place, about, kind)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  not a dict
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise TPUCheckpointError(f"{place} is no safetensors file ({error}).") from None
    if about.get("digest") != _digest(tensors):
        raise TPUCheckpointError(
            f"{place} is damaged: the digest of its tensors differs from the header's. Download "
            "or copy it again."
        )
    return tensors, about


def _check_kind(place: Path, about: Mapping[str, str], kind: str) -> None:
    version = about.get("format_version")
    if version != str(FORMAT_VERSION):
        raise TPUCheckpointError(
            f"{place} has format_version {version!r}; this tpukit reads {FORMAT_VERSION}. "
            + ("Update tpukit." if version else "It was not written by tpukit's quantization.")
        )
    if about.get("kind") != kind:
        raise TPUCheckpointError(
            f"{place} holds {about.get('kind')!r}, not {kind!r}; read it with "
            f"{'load_arrays' if kind == 'codebook' else 'load_codebook'}."
        )


def _digest(tensors: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
        digest.update(np.ascontiguousarray(value).view(np.uint8).data)
    return digest.hexdigest()


def _fit_in(about: Mapping[str, str]) -> FitReport | None:
    """Return the fit report of the header; None if it is missing or not readable."""
    try:
        fit = parse_json(about.get("fit", "null"))
        return FitReport.from_dict(fit) if isinstance(fit, dict) else None
    except (ValueError, TypeError):
        return None


def _plain(place: Path, text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        raise TPUCheckpointError(f"{place} has a description that is not valid JSON.") from None
