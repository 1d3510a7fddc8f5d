"""Super-slices: slices that Kueue's slice controller joins from whole cubes of 4x4x4 chips."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....errors import SliceError
from ....hardware.topology import parse_shape
from ....runtime.doctor.finding import DoctorFinding
from .. import names
from ..findings import found
from ..reading import ReplicatedJob, jobsets

EDGE = 4
MOST_CUBES = 144
LONGEST_WORKLOAD_NAME = 28
HOSTS_PER_CUBE = 16


def check_super_slices(documents: Sequence[Mapping[str, Any]]) -> Iterator[DoctorFinding]:
    """Say where the annotations of a super-slice contradict each other or the hardware."""
    for jobset in jobsets(documents):
        for job in jobset.jobs:
            if names.SLICE_SIZE in job.annotations:
                yield from _check_count(job)
            if names.SLICE_TOPOLOGY in job.annotations:
                yield from _check_topology(job)


def _check_count(job: ReplicatedJob) -> Iterator[DoctorFinding]:
    text = job.annotations[names.SLICE_SIZE]
    size = int(text) if text.isascii() and text.isdigit() else 0
    total = job.replicas * job.parallelism
    if size < 1 or total % size:
        yield found(
            "super_slice.count",
            "error",
            job.path,
            f"{names.SLICE_SIZE} is {text!r}, and there are {total} Pods: no multiple of it.",
            "Make the number of Pods a multiple of the slice size.",
        )
    if names.SLICE_REQUIRED_TOPOLOGY not in job.annotations:
        yield found(
            "super_slice.level",
            "error",
            job.path,
            f"{names.SLICE_SIZE} without {names.SLICE_REQUIRED_TOPOLOGY}.",
            f"Name the level, such as {names.CUBE}.",
        )


def _check_topology(job: ReplicatedJob) -> Iterator[DoctorFinding]:
    text = job.annotations[names.SLICE_TOPOLOGY]
    try:
        shape = parse_shape(text)
    except SliceError as error:
        yield found("super_slice.topology", "error", job.path, str(error), "Write it as 4x4x8.")
        return
    cubes = math.prod(shape) // EDGE**3
    is_legal = (
        len(shape) == 3
        and all(length % EDGE == 0 for length in shape)
        and list(shape) == sorted(shape)
        and cubes <= MOST_CUBES
    )
    if not is_legal:
        yield found(
            "super_slice.topology",
            "error",
            job.path,
            f"{text} is no super-slice: three multiples of {EDGE}, none smaller than the one "
            f"before, {MOST_CUBES} cubes at most.",
            "Write for example 4x4x8 or 8x8x16.",
        )
        return
    hosts = cubes * HOSTS_PER_CUBE
    if job.parallelism != hosts:
        yield found(
            "super_slice.hosts",
            "error",
            job.path,
            f"parallelism is {job.parallelism}; {text} has {hosts} hosts.",
            f"Set parallelism and completions to {hosts}.",
        )
    if job.jobset.queue and len(job.jobset.name) > LONGEST_WORKLOAD_NAME:
        yield found(
            "super_slice.name",
            "error",
            job.jobset,
            f"the name has {len(job.jobset.name)} characters; the slice controller takes "
            f"{LONGEST_WORKLOAD_NAME}.",
            "Shorten the name.",
        )
    if not job.jobset.queue and job.jobset.annotations.get(names.EXCLUSIVE) != names.SUPER_SLICE:
        yield found(
            "super_slice.exclusive",
            "error",
            job.jobset,
            "without Kueue, nothing keeps the Pods on one super-slice.",
            f"Annotate the JobSet with {names.EXCLUSIVE}: {names.SUPER_SLICE}.",
        )
