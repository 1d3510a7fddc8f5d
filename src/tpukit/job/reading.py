"""The one way every command reads a job: a name or a file, the environment, what was typed."""

import os
from collections.abc import Mapping
from typing import Any

from .config.tpu import TPUConfig
from .document import Document, Origin
from .job import Job, new_document
from .model_source import refuse_unknown_model


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
    elif target is not None:
        document.add({"model": target}, Origin("argument"))
    named = TPUConfig.model_fields
    document.add_environment(os.environ if environment is None else environment, named)
    document.add(changes or {}, Origin("argument"))
    return document
