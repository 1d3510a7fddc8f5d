"""Codebooks and quantized matrices on disk: safetensors with a description, never a pickle.

The header holds `format_version`, `kind` ("codebook" or "arrays"), `source` (whatever the writer
says they were made from), `digest` of all tensors, and what the arrays mean. A reader checks all of
it against the tensors before it makes anything of them.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ...errors import TPUCheckpointError, TPUValidationError
from ...plain_data import parse_json
from ...runtime.files import start_of_tensors, write_output
from ..codebooks.codebook import Codebook, FitReport, parse_metric
from ..vector_codes.vq_array import VQArray
from .described_arrays import array_from, describe, expect, sizes_in

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
MOST_BYTES = 256 * 2**30
"""The largest file that is read, unless the caller says otherwise."""
_MOST_HEADER = 64 * 2**20
_PICKLE_SUFFIXES = (".pkl", ".pickle", ".pt", ".pth", ".bin")


def save_codebook(path: str | Path, codebook: Codebook, *, source: str = "") -> Path:
    """Write a codebook.

    Args:
        path: Where; a name that ends like a pickle's gets safetensors too, and the log says so.
        codebook: What.
        source: What it was made from, for whoever reads it.

    Raises:
        TPUValidationError: It cannot be written there.
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
    """Read what `save_codebook` wrote.

    Raises:
        TPUCheckpointError: It is a pickle, of another kind or version, or damaged.
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
    """Write quantized matrices, and arrays that stayed as they were, by name.

    Raises:
        TPUValidationError: It cannot be written there, or a name is in both.
    """
    tensors: dict[str, np.ndarray] = {}
    about: dict[str, Any] = {}
    for name, array in arrays.items():
        parts, about[name] = describe(array)
        tensors |= {f"{name}.{part}": np.asarray(value) for part, value in parts.items()}
    for name, value in (others or {}).items():
        if name in tensors:
            raise TPUValidationError(f"{name!r} names an array and a part of a quantized one.")
        tensors[name] = np.asarray(value)
    return _write(Path(path), "arrays", tensors, {"arrays": json.dumps(about)}, source)


def load_arrays(
    path: str | Path, *, most_bytes: int = MOST_BYTES
) -> tuple[dict[str, VQArray], dict[str, jax.Array]]:
    """Read what `save_arrays` wrote: quantized matrices, and the other arrays.

    Raises:
        TPUCheckpointError: It is a pickle, of another kind or version, damaged, or too large.
    """
    place = Path(path)
    tensors, about = _read(place, "arrays", most_bytes)
    described = _plain(place, about.get("arrays", ""))
    if not isinstance(described, dict):
        raise TPUCheckpointError(f"{place} does not describe its arrays; write it again.")
    arrays: dict[str, VQArray] = {}
    for name, said in described.items():
        arrays[name] = array_from(place, name, said, tensors)
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
    whole = {name: np.asarray(value, order="C") for name, value in tensors.items()}
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TPUValidationError(
            f"{place.parent} cannot be made ({error.strerror}); choose another place."
        ) from None
    write_output(place, save(whole, header))
    logger.info("save kind=%s tensors=%d path=%s", kind, len(tensors), place)
    return place


def _read(place: Path, kind: str, most_bytes: int) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """All tensors and the header's text, checked as far as every kind shares it."""
    start = start_of_tensors(
        place, instead="Write it with save_codebook, which makes safetensors under any name."
    )
    size = place.stat().st_size
    if size > most_bytes:
        raise TPUCheckpointError(f"{place} has {size:,} bytes; at most {most_bytes:,} are read.")
    if len(start) < 9 or int.from_bytes(start[:8], "little") > min(size, _MOST_HEADER):
        raise TPUCheckpointError(f"{place} is no safetensors file: its header does not fit.")
    try:
        with safe_open(place, framework="np") as opened:
            about = opened.metadata() or {}
            _check_kind(place, about, kind)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  not a dict
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise TPUCheckpointError(f"{place} is no safetensors file ({error}).") from None
    if about.get("digest") != _digest(tensors):
        raise TPUCheckpointError(
            f"{place} is damaged: its tensors are not those it was written with. Fetch it again."
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
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        value = tensors[name]
        found.update(f"{name} {value.dtype} {value.shape}\n".encode())
        found.update(np.ascontiguousarray(value).view(np.uint8).data)
    return found.hexdigest()


def _fit_in(about: Mapping[str, str]) -> FitReport | None:
    """How it was fitted, where the header says it in the words of today; it is only told."""
    try:
        said = parse_json(about.get("fit", "null"))
        return FitReport.from_dict(said) if isinstance(said, dict) else None
    except (ValueError, TypeError):
        return None


def _plain(place: Path, text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        raise TPUCheckpointError(f"{place} has a description that is no JSON.") from None
