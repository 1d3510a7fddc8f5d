"""Reads documents that may be wrong in any way: what is not of its type counts as not there."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from . import names

_QUANTITY = re.compile(r"(\d{1,15})([kMGTPE]i?)?")
_SUFFIXES = {"": 1} | {
    f"{letter}{kind}": base ** (power + 1)
    for kind, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("kMGTPE")
}


def mapping(value: object) -> Mapping[str, Any]:
    """Return an object's fields; none where it is no object."""
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def sequence(value: object) -> Sequence[Any]:
    """Return a list's entries; none where it is no list."""
    return cast("list[Any]", value) if isinstance(value, list) else ()


def at(value: object, *keys: str) -> Any:
    """Return what lies under these keys, or None."""
    for key in keys:
        value = mapping(value).get(key)
    return value


def count(value: object, default: int) -> int:
    """Return a whole number, or `default` where there is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def quantity(value: object) -> int | None:
    """Return a whole quantity (4, "4", "2Gi"), or None."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    return int(found[1]) * _SUFFIXES[found[2] or ""] if found else None


def texts(value: object) -> dict[str, str]:
    """Return the entries of an object that are text."""
    entries: Mapping[Any, Any] = mapping(value)
    return {
        key: one for key, one in entries.items() if isinstance(key, str) and isinstance(one, str)
    }


@dataclass(frozen=True)
class ReplicatedJob:
    """One entry of a JobSet's `replicatedJobs`."""

    jobset: "JobSet"
    index: int
    fields: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.fields.get("name", ""))

    @property
    def path(self) -> str:
        """Where it stands, for messages."""
        return f"{self.jobset} spec.replicatedJobs[{self.index}]"

    @property
    def replicas(self) -> int:
        """How many Jobs, one a slice."""
        return count(self.fields.get("replicas"), 1)

    @property
    def job(self) -> Mapping[str, Any]:
        """The spec of each Job."""
        return mapping(at(self.fields, "template", "spec"))

    @property
    def template(self) -> Mapping[str, Any]:
        """The template of each Pod."""
        return mapping(self.job.get("template"))

    @property
    def pod(self) -> Mapping[str, Any]:
        """The spec of each Pod."""
        return mapping(self.template.get("spec"))

    @property
    def annotations(self) -> dict[str, str]:
        """Of each Pod."""
        return texts(at(self.template, "metadata", "annotations"))

    @property
    def parallelism(self) -> int:
        """How many Pods run together, one a host."""
        return count(self.job.get("parallelism"), 1)

    @property
    def completions(self) -> int:
        """How many Pods must succeed."""
        return count(self.job.get("completions"), self.parallelism)

    @property
    def selector(self) -> dict[str, str]:
        """Labels that a node must have."""
        return texts(self.pod.get("nodeSelector"))

    @property
    def containers(self) -> Sequence[Mapping[str, Any]]:
        """The containers of each Pod."""
        return [mapping(one) for one in sequence(self.pod.get("containers"))]

    @cached_property
    def requests(self) -> dict[str, int]:
        """What each Pod asks for, by resource; a limit counts where no request is stated."""
        total: dict[str, int] = {}
        for container in self.containers:
            asked = {
                **mapping(at(container, "resources", "limits")),
                **mapping(at(container, "resources", "requests")),
            }
            for resource, amount in asked.items():
                if (number := quantity(amount)) is not None:
                    total[resource] = total.get(resource, 0) + number
        return total

    @property
    def chips(self) -> int:
        """Chips of each Pod."""
        return self.requests.get(names.CHIPS, 0)

    @property
    def is_tpu(self) -> bool:
        """Whether it asks for TPUs, by their number or by a selector."""
        return bool(self.chips or names.ACCELERATOR in self.selector)


@dataclass(frozen=True)
class JobSet:
    """A JobSet document."""

    fields: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its name."""
        return str(at(self.fields, "metadata", "name") or "")

    @property
    def namespace(self) -> str:
        """Where it is made."""
        return str(at(self.fields, "metadata", "namespace") or "default")

    @property
    def labels(self) -> dict[str, str]:
        """Its labels."""
        return texts(at(self.fields, "metadata", "labels"))

    @property
    def annotations(self) -> dict[str, str]:
        """Its annotations."""
        return texts(at(self.fields, "metadata", "annotations"))

    @property
    def spec(self) -> Mapping[str, Any]:
        """Its spec."""
        return mapping(self.fields.get("spec"))

    @property
    def queue(self) -> str | None:
        """The Kueue queue it waits in."""
        return self.labels.get(names.QUEUE)

    @property
    def jobs(self) -> list[ReplicatedJob]:
        """Its replicated Jobs."""
        found = sequence(self.spec.get("replicatedJobs"))
        return [ReplicatedJob(self, index, mapping(one)) for index, one in enumerate(found)]

    @property
    def tpu_jobs(self) -> list[ReplicatedJob]:
        """Those that ask for TPUs."""
        return [job for job in self.jobs if job.is_tpu]

    def __str__(self) -> str:
        return f"JobSet {self.name or '(no name)'}"


def jobsets(documents: Sequence[Mapping[str, Any]]) -> Iterator[JobSet]:
    """Return the JobSets among documents."""
    return (JobSet(one) for one in documents if one.get("kind") == "JobSet")
