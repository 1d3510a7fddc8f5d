"""Hide values that may be secret: the environment variables of a job's processes.

A field with `repr=False` is hidden. Reports show the names of its variables, references such as
`$NAME`, and "…" in place of each literal value.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel

from ..plain_data import JsonMapping, JsonObject
from ..runtime.secrets import looks_secret

if TYPE_CHECKING:
    from .job import Job

logger = logging.getLogger(__name__)

HIDDEN = "…"
_warned: set[tuple[str, str]] = set()


def shown_values(settings: BaseModel, **options: Any) -> JsonObject:
    """Return settings as plain data, with the literal values of hidden fields replaced.

    Args:
        settings: A section of a job.
        **options: Arguments of `model_dump`.
    """
    values = settings.model_dump(mode="json", **options)
    fields = type(settings).model_fields
    return {
        name: value if fields[name].repr else hide_values(value) for name, value in values.items()
    }


def hide_values(variables: Any) -> Any:
    """Return variables with "…" in place of each literal value."""
    if not isinstance(variables, Mapping):
        return variables if variables is None else HIDDEN
    named = cast("JsonMapping", variables)
    return {name: text if str(text).startswith("$") else HIDDEN for name, text in named.items()}


def hide_in_object(data: JsonObject) -> JsonObject:
    """Hide the variables of a job in place; an `object_hook` for JSON reports of any version."""
    launch = data.get("launch")
    if isinstance(launch, dict) and "environment" in launch:
        launch["environment"] = hide_values(cast("Any", launch["environment"]))
    return data


def is_hidden(path: str | Sequence[str | int], kind: type[BaseModel]) -> bool:
    """Whether a dotted path names a hidden field, or a key inside one."""
    inner: Any = kind
    for part in path.split(".") if isinstance(path, str) else path:
        field = inner.model_fields.get(part) if isinstance(inner, type) else None
        if field is None:
            return False
        if not field.repr:
            return True
        inner = field.annotation
    return False


def warn_of_literal_secrets(job: "Job") -> None:
    """Warn once about each variable whose literal value looks like a credential."""
    for name, value in job.launch.environment.items():
        origin = str(job.origin_of("launch.environment"))
        if value.startswith("$") or not looks_secret(name, value) or (name, origin) in _warned:
            continue
        _warned.add((name, origin))
        logger.warning(
            "launch.environment.%s (%s) looks like a secret; write %s: $%s and set the variable "
            "where you launch, so that no file contains it",
            *(name, origin, name, name),
        )
