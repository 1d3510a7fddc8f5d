"""Checks documents by schemas that others publish, so that a mistake of tpukit's cannot hide here.

JobSets are read by the models that Kubeflow generates from JobSet's resource definition
(`kubeflow-trainer-api`). Kinds of Kubernetes itself, and the Jobs inside a JobSet, are checked by
Kubernetes's own schemas (`kubernetes-validate`). No package publishes Kueue's schemas, so fields of
Kueue's kinds are not checked.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

from tpukit.errors import did_you_mean

KUBERNETES = "1.34.0"
"""Version of the schemas, which is also the version that JobSet 0.10 was built with."""
_CORE = {
    **dict.fromkeys(("Pod", "ConfigMap", "Secret", "Service", "ResourceQuota"), "v1"),
    "Job": "batch-v1",
}
_TEMPLATE = "template"


@dataclass(frozen=True)
class FieldError:
    """What is wrong with one field.

    Attributes:
        path: From the top of the document, as in `spec.replicatedJobs[0].replicas`.
    """

    path: str
    problem: Literal["unknown", "invalid"]
    message: str


def field_errors(document: Mapping[str, Any]) -> list[FieldError]:
    """Return every field that is unknown, missing or of a wrong type; kinds without schema pass."""
    kind = str(document.get("kind"))
    if kind == "JobSet":
        return [*_jobset_errors(document), *_job_errors(document)]
    if kind in _CORE:
        return list(_schema_errors(kind, document, ()))
    return []


def _jobset_errors(document: Mapping[str, Any]) -> Iterator[FieldError]:
    """Yield errors outside of Job templates."""
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
    from pydantic import ValidationError

    outside = _without_templates(document)
    try:
        read = JobsetV1alpha2JobSet.model_validate(outside)
    except ValidationError as error:
        for problem in error.errors():
            yield FieldError(_path(problem["loc"]), "invalid", problem["msg"])
        return
    known = read.model_dump(by_alias=True, exclude_unset=True)
    for path in _unread(outside, known, ()):
        yield FieldError(_path(path), "unknown", f"there is no field {path[-1]!r} here.")


def _without_templates(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JobSet with empty Job templates, which Kubernetes's own schema checks better."""
    spec: Any = document.get("spec")
    jobs: Any = spec.get("replicatedJobs") if isinstance(spec, dict) else None
    if not isinstance(jobs, list):
        return dict(document)
    empty = {"spec": {"template": {}}}
    short = [
        {**job, _TEMPLATE: empty} if isinstance(job, dict) and job.get(_TEMPLATE) else job
        for job in cast("list[Any]", jobs)
    ]
    return {**document, "spec": {**spec, "replicatedJobs": short}}


def _unread(given: object, known: object, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of fields that the model has left out."""
    if isinstance(given, dict) and isinstance(known, dict):
        fields, kept = cast("dict[str, Any]", given), cast("dict[str, Any]", known)
        for key, value in fields.items():
            if key in kept:
                yield from _unread(value, kept[key], (*path, key))
            elif value is not None:
                yield (*path, key)
    elif isinstance(given, list) and isinstance(known, list):
        pairs = zip(cast("list[Any]", given), cast("list[Any]", known), strict=False)
        for index, (value, kept) in enumerate(pairs):
            yield from _unread(value, kept, (*path, index))


def _job_errors(document: Mapping[str, Any]) -> Iterator[FieldError]:
    """Yield errors in the Job templates of a JobSet."""
    spec: Any = document.get("spec")
    jobs: Any = spec.get("replicatedJobs") if isinstance(spec, dict) else None
    for index, job in enumerate(cast("list[Any]", jobs) if isinstance(jobs, list) else []):
        template: Any = cast("Mapping[str, Any]", job).get(_TEMPLATE)
        if isinstance(template, dict):
            whole = {**template, "apiVersion": "batch/v1", "kind": "Job"}
            yield from _schema_errors("Job", whole, ("spec", "replicatedJobs", index, _TEMPLATE))


def _schema_errors(
    kind: str, document: Mapping[str, Any], at: tuple[Any, ...]
) -> Iterator[FieldError]:
    for error in _validator(kind).iter_errors(document):
        path = (*at, *error.absolute_path)
        if error.validator == "additionalProperties":
            known: Any = error.schema.get("properties", {})
            for key in sorted(set(error.instance) - set(known)):
                hint = did_you_mean(key, known)
                message = f"there is no field {key!r} here.{hint}"
                yield FieldError(_path((*path, key)), "unknown", message)
        else:
            yield FieldError(_path(path), "invalid", error.message)


@cache
def _validator(kind: str) -> Any:
    from jsonschema.validators import Draft202012Validator
    from kubernetes_validate.utils import schema_contents
    from referencing import Registry, Resource

    folder = f"kubernetes-json-schema/v{KUBERNETES}-local-strict"
    schema = schema_contents(f"{folder}/{kind.lower()}-{_CORE[kind]}.json", KUBERNETES)
    definitions = schema_contents(f"{folder}/_definitions.json", KUBERNETES)
    registry: Any = Resource.from_contents(schema) @ Registry()
    registry = Resource.from_contents(definitions) @ registry
    return Draft202012Validator(schema, registry=registry)


def _path(parts: tuple[Any, ...]) -> str:
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "."
