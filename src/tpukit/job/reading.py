"""`read_job`: the job of a command, from a name or file, the environment and its options."""

import logging
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path

from ..errors import MeshError
from ..hardware import Slice
from ..hardware.mesh_sizes import fit_mesh, read_mesh, refill_mesh, write_mesh
from ..plain_data import JsonMapping
from .config.tpu import TPUConfig
from .document import Document, Origin
from .hidden import warn_of_literal_secrets
from .job import Job, new_document
from .model_source import PREFIX, is_torch_source, refuse_unknown_model

logger = logging.getLogger(__name__)


def is_job_file(target: str) -> bool:
    """Whether a command's target is a YAML file."""
    return target.endswith((".yaml", ".yml"))


def read_job(
    target: str,
    changes: JsonMapping | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> Job:
    """Read a job; the environment overrides the target, and `changes` override both.

    Args:
        target: A job file, a preset, a Hugging Face config.json, or "module:function".
        changes: Options of the command, by key or dotted path.
        environment: `TPUKIT_<SETTING>` variables; `os.environ` by default.

    Raises:
        ConfigError: A key is unknown or a value is wrong; the message names its origin.
        TPUValidationError: There is no model of that name.
    """
    job = Job.from_document(read_document(target, changes, environment=environment))
    refuse_unknown_model(job.model)
    warn_of_literal_secrets(job)
    return job


def read_document(
    target: str | None,
    changes: JsonMapping | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> Document:
    """Collect the values of `read_job` without validating them; `target` may be None."""
    document = new_document()
    if target is not None and is_job_file(target):
        document.add_file(target)
        _resolve_model_path(document, Path(target))
    elif target is not None:
        document.add({"model": target}, Origin("argument"))
    known = TPUConfig.model_fields
    document.add_environment(os.environ if environment is None else environment, known)
    document.add(changes or {}, Origin("argument"))
    if "on" in (changes or {}):
        _fit_mesh_to_slice(document)
    return document


def _resolve_model_path(document: Document, file: Path) -> None:
    """Resolve the path of a model against the job file's folder if the working folder lacks it."""
    name = document.values.get("model")
    if not isinstance(name, str):
        return
    prefix = PREFIX if is_torch_source(name) else ""
    path, colon, function = name.removeprefix(prefix).rpartition(":")
    written = path if colon else name
    if not written.endswith((".py", ".json")) or os.path.exists(written):
        return
    if (beside := file.parent / written).is_file():
        document.values["model"] = f"{prefix}{beside}{colon}{function}" if colon else str(beside)


def _fit_mesh_to_slice(document: Document) -> None:
    """Fit a job file's mesh to the slice of the command line, which overrides the file's."""
    if document.values["on"] is None or "mesh" not in document.values:
        return
    if document.origins["mesh"].kind != "file":
        return
    slice_, mesh = Slice.parse(document.values["on"]), read_mesh(document.values["mesh"])
    try:
        fitted = fit_mesh(mesh, slice_.devices)
    except MeshError:
        return  # validation of the job reports it with its line
    if any(size not in (-1, fitted[axis]) for axis, size in mesh.items()):
        # With a -1 the mesh can be fitted to further slices.
        document.values["mesh"] = refill_mesh(mesh, slice_.devices) or fitted
        logger.warning(
            "the mesh %s of %s is for another number of devices; on %s it is %s",
            write_mesh(mesh),
            document.origins["mesh"].name,
            slice_,
            write_mesh(fitted),
        )
    if prod(document.values.get("dcn_mesh") or (slice_.num_slices,)) != slice_.num_slices:
        del document.values["dcn_mesh"]
