"""The one way every command reads a job: a name or a file, the environment, what was typed."""

import logging
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from ..errors import MeshError
from ..hardware import Slice
from ..hardware.mesh_sizes import fit_mesh, read_mesh, refill_mesh, write_mesh
from .config.tpu import TPUConfig
from .document import Document, Origin
from .hidden import warn_of_literal_secrets
from .job import Job, new_document
from .model_source import refuse_unknown_model
from .torch_source import PREFIX, is_torch_source

logger = logging.getLogger(__name__)


def is_job_file(target: str) -> bool:
    """Tell whether a command's target names a YAML file."""
    return target.endswith((".yaml", ".yml"))


def read_job(
    target: str,
    changes: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> Job:
    """Read the job that `target` and everything beside it describe; each wins over those before.

    Args:
        target: A job file, a preset's name, a Hugging Face config.json, or "module:function".
        changes: What was typed, by key or dotted path.
        environment: `TPUKIT_<SETTING>` variables; `os.environ` by default.

    Raises:
        ConfigError: A key is unknown or a value wrong; the message says where it came from.
        TPUValidationError: No model goes by that name.
    """
    job = Job.from_document(read_document(target, changes, environment=environment))
    refuse_unknown_model(job.model)
    warn_of_literal_secrets(job)
    return job


def read_document(
    target: str | None,
    changes: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> Document:
    """Collect what `read_job` checks; without a target only environment and changes."""
    document = new_document()
    if target is not None and is_job_file(target):
        document.add_file(target)
        _find_beside(document, Path(target))
    elif target is not None:
        document.add({"model": target}, Origin("argument"))
    named = TPUConfig.model_fields
    document.add_environment(os.environ if environment is None else environment, named)
    document.add(changes or {}, Origin("argument"))
    if "on" in (changes or {}):
        _follow_slice(document)
    return document


def _find_beside(document: Document, file: Path) -> None:
    """Let a job file name a model that lies beside it, whatever folder a command is called in."""
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


def _follow_slice(document: Document) -> None:
    """Let a file's mesh follow a slice that was named beside it, where it is made for another."""
    if document.values["on"] is None or "mesh" not in document.values:
        return
    if document.origins["mesh"].kind != "file":
        return
    slice_, mesh = Slice.parse(document.values["on"]), read_mesh(document.values["mesh"])
    try:
        fitted = fit_mesh(mesh, slice_.devices)
    except MeshError:
        return  # told with its place, as whatever else is wrong in a job
    if any(size not in (-1, fitted[axis]) for axis, size in mesh.items()):
        # A -1 lets it follow yet another slice.
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
