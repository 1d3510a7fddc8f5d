"""Check manifests of tpukit or of others before they are applied, without a cluster.

Only mistakes that a server's dry run accepts are reported. The server itself checks fields and
types.

```python
report = lint_files("job.yaml", "queues.yaml")
rich.print(report)
```
"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...errors import did_you_mean
from ...runtime.doctor.finding import DoctorFinding
from ...runtime.secrets import is_secret_name
from . import names
from .checks.queues import check_placement, check_queues
from .checks.restarts import check_restarts
from .checks.slices import check_slices, check_super_slices
from .documents import Fields, read_files
from .findings import LintReport, finding
from .reading import JobSet, NodePool, at, count, jobsets, mapping, sequence

_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
# Kinds that the checks read. A misspelled one would pass unchecked.
_KINDS = (
    *("JobSet", "Job", "Pod", "ConfigMap", "Secret", "ResourceFlavor", "ClusterQueue"),
    *("LocalQueue", "WorkloadPriorityClass", "AdmissionCheck", "Topology"),
)


def check_kinds(documents: Sequence[Fields]) -> Iterator[DoctorFinding]:
    """Yield documents whose kind is missing or misspelled, because no other check reads them."""
    for document in documents:
        kind = str(document.get("kind"))
        hint = "" if kind in _KINDS else did_you_mean(kind, _KINDS)
        if hint or "kind" not in document:
            yield finding(
                "manifest.kind",
                "error",
                at(document, "metadata", "name") or "(no name)",
                f"kind is {document.get('kind')!r}.{hint}",
                "Write the kind as the API spells it.",
            )


def check_names(documents: Sequence[Fields]) -> Iterator[DoctorFinding]:
    """Yield names that JobSet would make too long, wrong coordinators and secret values."""
    for jobset in jobsets(documents):
        if jobset.name and not _DNS_LABEL.fullmatch(jobset.name):
            yield finding(
                "jobset.name",
                "error",
                jobset,
                "expected a name of a-z, 0-9 and '-', beginning with a letter.",
                "Rename the JobSet.",
            )
        for job in jobset.jobs:
            last = f"{jobset.name}-{job.name}-{max(job.replicas - 1, 0)}"
            pod = f"{last}-{max(job.completions - 1, 0)}{names.RANDOM_SUFFIX}"
            if len(pod) > names.LONGEST_NAME:
                yield finding(
                    "jobset.name",
                    "error",
                    job.path,
                    f"its Pods would be called {pod}, {len(pod)} characters; "
                    f"{names.LONGEST_NAME} are allowed.",
                    f"Shorten the names by {len(pod) - names.LONGEST_NAME}.",
                )
            yield from _check_secrets(job.path, job.containers)
        yield from _check_coordinator(jobset)


def _check_coordinator(jobset: JobSet) -> Iterator[DoctorFinding]:
    coordinator = mapping(jobset.spec.get("coordinator"))
    if not coordinator:
        return
    target = str(coordinator.get("replicatedJob"))
    job = next((job for job in jobset.jobs if job.name == target), None)
    if job is None:
        hint = did_you_mean(target, [job.name for job in jobset.jobs])
        yield finding(
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
        yield finding(
            "jobset.coordinator",
            "error",
            f"{jobset} spec.coordinator",
            f"its address {label} becomes a label, and has {len(label)} characters of "
            f"{names.LONGEST_NAME}.",
            "Shorten the JobSet's name or its subdomain, or state the address as a variable.",
        )


def _check_secrets(where: str, containers: Sequence[Fields]) -> Iterator[DoctorFinding]:
    for container in containers:
        for variable in sequence(container.get("env")):
            name, value = str(at(variable, "name")), at(variable, "value")
            if value and is_secret_name(name):
                yield finding(
                    "manifest.secret",
                    "warning",
                    where,
                    f"the manifest contains the value of {name}.",
                    "Put it into a Secret and refer to it by valueFrom.secretKeyRef.",
                )


# Each takes all documents and yields findings.
CHECKS = (
    check_kinds,
    check_names,
    check_slices,
    check_super_slices,
    check_restarts,
    check_queues,
)


def lint(documents: Sequence[Fields], *, pools: Sequence[NodePool] | None = None) -> LintReport:
    """Report jobs that would be refused, never admitted, never placed, or lost at a failure.

    Args:
        documents: JobSets and Kueue's objects together; a queue is checked if it is among them.
        pools: The cluster's node pools; None skips the placement check.
    """
    findings = [finding for check in CHECKS for finding in check(documents)]
    if pools is not None:
        findings += check_placement(documents, pools)
    return LintReport.of(findings)


def lint_files(
    *paths: str | os.PathLike[str], pools: Sequence[NodePool] | None = None
) -> LintReport:
    """Check the manifests in files and folders.

    Raises:
        ConfigError: A file cannot be read, or is not a manifest.
    """
    return lint(read_files(*(Path(path) for path in paths)), pools=pools)
