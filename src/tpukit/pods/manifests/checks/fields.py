"""Fields, versions and names: what the API server or JobSet's webhook would refuse."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....errors import did_you_mean
from ....runtime.doctor.finding import DoctorFinding
from ....runtime.secrets import is_secret_name
from .. import names
from ..findings import found
from ..reading import JobSet, at, count, jobsets, mapping, sequence
from ..schema import KINDS, field_errors

_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def check_fields(documents: Sequence[Mapping[str, Any]]) -> Iterator[DoctorFinding]:
    """Say which fields are unknown, missing or of another type, and which version is wrong."""
    for document in documents:
        where = _name_of(document)
        yield from _check_version(document, where)
        for error in field_errors(document):
            yield found(
                f"manifest.{error.problem}",
                "error",
                f"{where} {error.path}",
                error.message,
                "kubectl refuses the document, or the server drops the field: correct it.",
            )
        if not at(document, "metadata", "name") and not at(document, "metadata", "generateName"):
            yield found(
                "manifest.name", "error", where, "metadata.name is missing.", "Name the object."
            )


def check_names(documents: Sequence[Mapping[str, Any]]) -> Iterator[DoctorFinding]:
    """Say which names JobSet would make too long, and which values are secret."""
    for jobset in jobsets(documents):
        if jobset.name and not _DNS_LABEL.fullmatch(jobset.name):
            yield found(
                "jobset.name",
                "error",
                jobset,
                "the name is not of a-z, 0-9 and '-', beginning with a letter.",
                "Rename the JobSet.",
            )
        for job in jobset.jobs:
            last = f"{jobset.name}-{job.name}-{max(job.replicas - 1, 0)}"
            pod = f"{last}-{max(job.completions - 1, 0)}{names.RANDOM_SUFFIX}"
            if len(pod) > names.LONGEST_NAME:
                yield found(
                    "jobset.name",
                    "error",
                    job.path,
                    f"its Pods would be called {pod}, {len(pod)} characters; "
                    f"{names.LONGEST_NAME} are allowed.",
                    f"Shorten the names by {len(pod) - names.LONGEST_NAME}.",
                )
            yield from _check_secrets(job.path, job.containers)
        yield from _check_coordinator(jobset)


def _check_version(document: Mapping[str, Any], where: str) -> Iterator[DoctorFinding]:
    kind, version = str(document.get("kind")), str(document.get("apiVersion"))
    expected = KINDS.get(kind)
    if not expected:
        hint = did_you_mean(kind, KINDS) if "kind" in document else ""
        if hint or "kind" not in document:
            yield found(
                "manifest.kind",
                "error",
                where,
                f"kind is {document.get('kind')!r}.{hint}",
                "Write the kind as the API spells it.",
            )
    elif version not in expected:
        yield found(
            "manifest.version",
            "error",
            where,
            f"apiVersion is {version}; a {kind} is {expected[0]}.",
            f"Write apiVersion: {expected[0]}.",
        )
    elif version != expected[0]:
        yield found(
            "manifest.version",
            "warning",
            where,
            f"apiVersion {version} is deprecated.",
            f"Write apiVersion: {expected[0]}; its fields differ.",
        )


def _check_coordinator(jobset: JobSet) -> Iterator[DoctorFinding]:
    coordinator = mapping(jobset.spec.get("coordinator"))
    if not coordinator:
        return
    target = str(coordinator.get("replicatedJob"))
    job = next((one for one in jobset.jobs if one.name == target), None)
    if job is None:
        hint = did_you_mean(target, [one.name for one in jobset.jobs])
        yield found(
            "jobset.coordinator",
            "error",
            f"{jobset} spec.coordinator",
            f"there is no replicated Job {target!r}.{hint}",
            "Name one of the JobSet's replicated Jobs.",
        )
        return
    subdomain = at(jobset.spec, "network", "subdomain") or jobset.name
    indices = [count(coordinator.get(key), 0) for key in ("jobIndex", "podIndex")]
    label = f"{jobset.name}-{target}-{indices[0]}-{indices[1]}.{subdomain}"
    if len(label) > names.LONGEST_NAME:
        yield found(
            "jobset.coordinator",
            "error",
            f"{jobset} spec.coordinator",
            f"its address {label} becomes a label, and has {len(label)} characters of "
            f"{names.LONGEST_NAME}.",
            "Shorten the JobSet's name or its subdomain, or state the address as a variable.",
        )


def _check_secrets(where: str, containers: Sequence[Mapping[str, Any]]) -> Iterator[DoctorFinding]:
    for container in containers:
        for variable in sequence(container.get("env")):
            name, value = str(at(variable, "name")), at(variable, "value")
            if value and is_secret_name(name):
                yield found(
                    "manifest.secret",
                    "warning",
                    where,
                    f"the value of {name} stands in the manifest.",
                    "Put it into a Secret and refer to it by valueFrom.secretKeyRef.",
                )


def _name_of(document: Mapping[str, Any]) -> str:
    kind = str(document.get("kind") or "(no kind)")
    return f"{kind} {at(document, 'metadata', 'name') or '(no name)'}"
