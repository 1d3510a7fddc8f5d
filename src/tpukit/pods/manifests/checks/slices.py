"""Check node selectors, topology, chips and hosts against the chip catalog."""

import math
from collections.abc import Generator, Iterator, Sequence

from ....errors import SliceError, did_you_mean
from ....hardware import Slice, list_chips
from ....hardware.catalog import Chip
from ....hardware.topology import format_shape, parse_shape
from ....runtime.doctor.finding import DoctorFinding
from .. import names
from ..documents import Fields
from ..findings import finding
from ..jobset import SPOT_GRACE_S
from ..reading import ReplicatedJob, count, jobsets, sequence, tolerates

EDGE = 4
MOST_CUBES = 144
LONGEST_WORKLOAD_NAME = 28
HOSTS_PER_CUBE = 16


def check_super_slices(documents: Sequence[Fields]) -> Iterator[DoctorFinding]:
    """Yield super-slice annotations that contradict each other or the hardware."""
    for jobset in jobsets(documents):
        for job in jobset.jobs:
            if names.SLICE_SIZE in job.annotations:
                yield from _check_count(job)
            if names.SLICE_TOPOLOGY in job.annotations:
                yield from _check_cubes(job)


def _check_count(job: ReplicatedJob) -> Iterator[DoctorFinding]:
    text = job.annotations[names.SLICE_SIZE]
    size = int(text) if text.isascii() and text.isdigit() else 0
    total = job.replicas * job.parallelism
    if size < 1 or total % size:
        yield finding(
            "super_slice.count",
            "error",
            job.path,
            f"{names.SLICE_SIZE} is {text!r}, but the {total} Pods are not a multiple of it.",
            "Make the number of Pods a multiple of the slice size.",
        )
    if names.SLICE_REQUIRED_TOPOLOGY not in job.annotations:
        yield finding(
            "super_slice.level",
            "error",
            job.path,
            f"{names.SLICE_SIZE} without {names.SLICE_REQUIRED_TOPOLOGY}.",
            f"Name the level, such as {names.CUBE}.",
        )


def _check_cubes(job: ReplicatedJob) -> Iterator[DoctorFinding]:
    text = job.annotations[names.SLICE_TOPOLOGY]
    try:
        shape = parse_shape(text)
    except SliceError as error:
        yield finding("super_slice.topology", "error", job.path, str(error), "Write it as 4x4x8.")
        return
    cubes = math.prod(shape) // EDGE**3
    is_legal = (
        len(shape) == 3
        and all(length % EDGE == 0 for length in shape)
        and list(shape) == sorted(shape)
        and cubes <= MOST_CUBES
    )
    if not is_legal:
        yield finding(
            "super_slice.topology",
            "error",
            job.path,
            f"{text} is not a super-slice: expected three multiples of {EDGE} in ascending order, "
            f"with at most {MOST_CUBES} cubes.",
            "Write for example 4x4x8 or 8x8x16.",
        )
        return
    hosts = cubes * HOSTS_PER_CUBE
    if job.parallelism != hosts:
        yield finding(
            "super_slice.hosts",
            "error",
            job.path,
            f"parallelism is {job.parallelism}; {text} has {hosts} hosts.",
            f"Set parallelism and completions to {hosts}.",
        )
    if job.jobset.queue and len(job.jobset.name) > LONGEST_WORKLOAD_NAME:
        yield finding(
            "super_slice.name",
            "error",
            job.jobset,
            f"the name has {len(job.jobset.name)} characters; the slice controller allows "
            f"{LONGEST_WORKLOAD_NAME}.",
            "Shorten the name.",
        )
    if not job.jobset.queue and job.jobset.annotations.get(names.EXCLUSIVE) != names.SUPER_SLICE:
        yield finding(
            "super_slice.exclusive",
            "error",
            job.jobset,
            "without Kueue, nothing keeps the Pods on one super-slice.",
            f"Annotate the JobSet with {names.EXCLUSIVE}: {names.SUPER_SLICE}.",
        )


_TAINT = {"key": names.CHIPS, "value": "present", "effect": "NoSchedule"}


def check_slices(documents: Sequence[Fields]) -> Iterator[DoctorFinding]:
    """Yield JobSets whose Pods do not match the hosts of an existing slice."""
    for jobset in jobsets(documents):
        for job in jobset.tpu_jobs:
            yield from _check_job(job)
        several = any(job.replicas > 1 for job in jobset.tpu_jobs) or len(jobset.tpu_jobs) > 1
        if several and names.EXCLUSIVE not in jobset.annotations and not jobset.queue:
            yield finding(
                "slice.exclusive",
                "warning",
                jobset,
                "nothing keeps the Pods of one slice together: Pods of two slices may share a "
                "node pool, and neither starts.",
                f"Annotate the JobSet with {names.EXCLUSIVE}: {names.NODE_POOL}.",
            )


def _check_job(job: ReplicatedJob) -> Iterator[DoctorFinding]:
    chip = yield from _check_accelerator(job)
    yield from _check_pod(job)
    if chip is None:
        return
    where = yield from _check_topology(job, chip)
    if where is None or names.SLICE_TOPOLOGY in job.annotations:
        return
    machines = sorted(_chips_of_machines(chip, where))
    if job.chips and job.chips not in machines:
        yield finding(
            "slice.chips",
            "error",
            job.path,
            f"a Pod requests {job.chips} chips, but hosts of {where} have "
            f"{' or '.join(str(chips) for chips in machines)}.",
            f"Set the limit {names.CHIPS} to {where.chips_per_host}: one Pod uses a whole host.",
        )
        return
    hosts = where.chips // (job.chips or where.chips_per_host)
    if job.parallelism != hosts:
        yield finding(
            "slice.hosts",
            "error",
            job.path,
            f"parallelism is {job.parallelism}; {where} has {hosts} hosts of "
            f"{where.chips // hosts} chips.",
            f"Set parallelism and completions to {hosts}.",
        )
    if job.replicas > 1 and hosts == 1:
        yield finding(
            "slice.multislice",
            "error",
            job.path,
            f"{job.replicas} slices of one host each; GKE joins only slices of several hosts.",
            "Take larger slices, or run independent jobs.",
        )


def _check_accelerator(job: ReplicatedJob) -> Generator[DoctorFinding, None, Chip | None]:
    """Return the selector's chip, and yield findings about it."""
    known = {chip.gke_accelerator: chip for chip in list_chips() if chip.gke_accelerator}
    wanted = job.selector.get(names.ACCELERATOR)
    if wanted is None:
        yield finding(
            "slice.accelerator",
            "error",
            job.path,
            f"Pods request {job.chips} chips, but of no particular generation.",
            f"Select {names.ACCELERATOR}, one of {', '.join(known)}.",
        )
        return None
    if wanted not in known:
        yield finding(
            "slice.accelerator",
            "error",
            job.path,
            f"{names.ACCELERATOR} is {wanted!r}, which no node has." + did_you_mean(wanted, known),
            f"Write one of {', '.join(known)}.",
        )
        return None
    return known[wanted]


def _check_topology(job: ReplicatedJob, chip: Chip) -> Generator[DoctorFinding, None, Slice | None]:
    """Return the selectors' slice, and yield findings about it."""
    wanted = job.selector.get(names.TOPOLOGY)
    if wanted is None:
        yield finding(
            "slice.topology",
            "error",
            job.path,
            f"Pods select {chip.title} and no topology, so they may be placed on any slice of it.",
            f"Select {names.TOPOLOGY}.",
        )
        return None
    try:
        where = Slice.of(chip.name, topology=wanted)
    except SliceError as error:
        yield finding("slice.topology", "error", job.path, str(error), "Select a legal topology.")
        return None
    if format_shape(where.topology) != wanted:
        yield finding(
            "slice.topology",
            "error",
            job.path,
            f"{names.TOPOLOGY} is {wanted!r}; but nodes spell it {format_shape(where.topology)!r}.",
            "Use the nodes' spelling.",
        )
        return None
    return where


def _check_pod(job: ReplicatedJob) -> Iterator[DoctorFinding]:
    if not job.chips:
        yield finding(
            "slice.chips",
            "error",
            job.path,
            f"Pods select TPU nodes but request no {names.CHIPS}, so they would see no chip.",
            f"Set the limit {names.CHIPS} to the chips of one host.",
        )
    if job.completions != job.parallelism:
        yield finding(
            "slice.completions",
            "error",
            job.path,
            f"completions is {job.completions} and parallelism {job.parallelism}: the hosts of a "
            "slice would not run together.",
            "Set both to the number of hosts.",
        )
    if job.job.get("completionMode") == "NonIndexed" and job.parallelism > 1:
        yield finding(
            "slice.indexed",
            "error",
            job.path,
            "completionMode is NonIndexed, so no host has a number.",
            "Write completionMode: Indexed.",
        )
    tolerations = sequence(job.pod.get("tolerations"))
    if not tolerates(tolerations, _TAINT):
        yield finding(
            "slice.toleration",
            "warning",
            job.path,
            f"Pods do not tolerate the taint {names.CHIPS} of TPU nodes; they run only where an "
            "admission plugin adds the toleration.",
            f"Tolerate key {names.CHIPS}, operator Exists, effect NoSchedule.",
        )
    if job.pod.get("hostNetwork") is True and job.pod.get("dnsPolicy") != "ClusterFirstWithHostNet":
        yield finding(
            "slice.dns",
            "error",
            job.path,
            "hostNetwork without dnsPolicy ClusterFirstWithHostNet: the names of other hosts do "
            "not resolve.",
            "Write dnsPolicy: ClusterFirstWithHostNet.",
        )
    grace = count(job.pod.get("terminationGracePeriodSeconds"), 30)
    if job.selector.get(names.SPOT) == "true" and grace > SPOT_GRACE_S:
        yield finding(
            "slice.grace",
            "info",
            job.path,
            f"terminationGracePeriodSeconds is {grace}; a spot node leaves {SPOT_GRACE_S} s.",
        )


def _chips_of_machines(chip: Chip, where: Slice) -> set[int]:
    """Return the possible numbers of chips per host of a slice."""
    sizes = {int(name.rpartition("-")[2].rstrip("t")) for name in chip.gke_machine_types}
    usual = chip.chips_per_host or where.chips_per_host
    fitting = {size for size in sizes if size == where.chips or size == usual < where.chips}
    return fitting | {where.chips_per_host}
