"""Slices: node selectors, topology, chips and hosts, against the catalogue of chips."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from ....errors import SliceError, did_you_mean
from ....hardware import Slice, list_chips
from ....hardware.chip import Chip
from ....hardware.topology import format_shape
from ....runtime.doctor.finding import DoctorFinding
from .. import names
from ..findings import found
from ..jobset import SPOT_GRACE_S
from ..pools import tolerates
from ..reading import ReplicatedJob, count, jobsets, sequence

_TAINT = {"key": names.CHIPS, "value": "present", "effect": "NoSchedule"}


def check_slices(documents: Sequence[Mapping[str, Any]]) -> Iterator[DoctorFinding]:
    """Say where the Pods of a JobSet are not the hosts of a slice that exists."""
    for jobset in jobsets(documents):
        for job in jobset.tpu_jobs:
            yield from _check_job(job)
        several = any(job.replicas > 1 for job in jobset.tpu_jobs) or len(jobset.tpu_jobs) > 1
        if several and names.EXCLUSIVE not in jobset.annotations and not jobset.queue:
            yield found(
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
        yield found(
            "slice.chips",
            "error",
            job.path,
            f"a Pod asks for {job.chips} chips; hosts of {where} have "
            f"{' or '.join(str(one) for one in machines)}.",
            f"Set the limit {names.CHIPS} to {where.chips_per_host}: one Pod uses a whole host.",
        )
        return
    hosts = where.chips // (job.chips or where.chips_per_host)
    if job.parallelism != hosts:
        yield found(
            "slice.hosts",
            "error",
            job.path,
            f"parallelism is {job.parallelism}; {where} has {hosts} hosts of "
            f"{where.chips // hosts} chips.",
            f"Set parallelism and completions to {hosts}.",
        )
    if job.replicas > 1 and hosts == 1:
        yield found(
            "slice.multislice",
            "error",
            job.path,
            f"{job.replicas} slices of one host each; GKE joins only slices of several hosts.",
            "Take larger slices, or run independent jobs.",
        )


def _check_accelerator(job: ReplicatedJob) -> Generator[DoctorFinding, None, Chip | None]:
    """Return the chip that the selector names."""
    known = {chip.gke_accelerator: chip for chip in list_chips() if chip.gke_accelerator}
    wanted = job.selector.get(names.ACCELERATOR)
    if wanted is None:
        yield found(
            "slice.accelerator",
            "error",
            job.path,
            f"Pods ask for {job.chips} chips and do not say of which generation.",
            f"Select {names.ACCELERATOR}, one of {', '.join(known)}.",
        )
        return None
    if wanted not in known:
        yield found(
            "slice.accelerator",
            "error",
            job.path,
            f"{names.ACCELERATOR} is {wanted!r}, which no node has." + did_you_mean(wanted, known),
            f"Write one of {', '.join(known)}.",
        )
        return None
    return known[wanted]


def _check_topology(job: ReplicatedJob, chip: Chip) -> Generator[DoctorFinding, None, Slice | None]:
    """Return the slice that the selectors name."""
    wanted = job.selector.get(names.TOPOLOGY)
    if wanted is None:
        yield found(
            "slice.topology",
            "error",
            job.path,
            f"Pods select {chip.title} and no topology, so they may land on any slice of it.",
            f"Select {names.TOPOLOGY}.",
        )
        return None
    try:
        where = Slice.of(chip.name, topology=wanted)
    except SliceError as error:
        yield found("slice.topology", "error", job.path, str(error), "Select a legal topology.")
        return None
    if format_shape(where.topology) != wanted:
        yield found(
            "slice.topology",
            "error",
            job.path,
            f"{names.TOPOLOGY} is {wanted!r}; nodes spell it {format_shape(where.topology)!r}.",
            "Write it as nodes do.",
        )
        return None
    return where


def _check_pod(job: ReplicatedJob) -> Iterator[DoctorFinding]:
    if not job.chips:
        yield found(
            "slice.chips",
            "error",
            job.path,
            f"Pods select TPU nodes and ask for no {names.CHIPS}: they would see no chip.",
            f"Set the limit {names.CHIPS} to the chips of one host.",
        )
    if job.completions != job.parallelism:
        yield found(
            "slice.completions",
            "error",
            job.path,
            f"completions is {job.completions} and parallelism {job.parallelism}: the hosts of a "
            "slice would not run together.",
            "Set both to the number of hosts.",
        )
    if job.job.get("completionMode") == "NonIndexed" and job.parallelism > 1:
        yield found(
            "slice.indexed",
            "error",
            job.path,
            "completionMode is NonIndexed, so no host knows its number.",
            "Write completionMode: Indexed.",
        )
    tolerations = sequence(job.pod.get("tolerations"))
    if not tolerates(tolerations, _TAINT):
        yield found(
            "slice.toleration",
            "warning",
            job.path,
            f"Pods do not tolerate the taint {names.CHIPS} of TPU nodes; they run only where an "
            "admission plugin adds the toleration.",
            f"Tolerate key {names.CHIPS}, operator Exists, effect NoSchedule.",
        )
    if job.pod.get("hostNetwork") is True and job.pod.get("dnsPolicy") != "ClusterFirstWithHostNet":
        yield found(
            "slice.dns",
            "error",
            job.path,
            "hostNetwork without dnsPolicy ClusterFirstWithHostNet: the names of other hosts do "
            "not resolve.",
            "Write dnsPolicy: ClusterFirstWithHostNet.",
        )
    grace = count(job.pod.get("terminationGracePeriodSeconds"), 30)
    if job.selector.get(names.SPOT) == "true" and grace > SPOT_GRACE_S:
        yield found(
            "slice.grace",
            "info",
            job.path,
            f"terminationGracePeriodSeconds is {grace}; a spot node leaves {SPOT_GRACE_S} s.",
        )


def _chips_of_machines(chip: Chip, where: Slice) -> set[int]:
    """Chips that one host of a slice may have: several hosts have the usual number each."""
    sizes = {int(name.rpartition("-")[2].rstrip("t")) for name in chip.gke_machine_types}
    usual = chip.chips_per_host or where.chips_per_host
    fitting = {size for size in sizes if size == where.chips or size == usual < where.chips}
    return fitting | {where.chips_per_host}
