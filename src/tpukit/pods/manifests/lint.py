"""Check manifests of tpukit or of others for mistakes that cost chips and that no server reports.

A cluster's dry run checks fields, types, names and versions: `kubectl apply --dry-run=server
--validate=strict -f FILES`. It does not know which slices exist, which hosts belong to one slice,
or that a preemption ends a job.

```python
report = lint_files("job.yaml")
rich.print(report)
```
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ...errors import SliceError, did_you_mean
from ...hardware import Slice, list_chips
from ...hardware.catalog import Chip
from ...hardware.topology import format_shape
from ...runtime.doctor.finding import DoctorFinding
from . import names
from .documents import Fields, read_files
from .findings import LintReport, finding
from .reading import JobSet, NodePool, ReplicatedJob, at, count, jobsets, mapping, sequence

_DISRUPTION_REASONS = ("PodFailurePolicy",)
IGNORES_BUDGET = ("RestartJobSetAndIgnoreMaxRestarts", "RestartJobAndIgnoreMaxRestarts")


def lint(documents: Sequence[Fields], *, pools: Sequence[NodePool] | None = None) -> LintReport:
    """Report JobSets that would be placed wrongly or never, or lost at a preemption.

    Args:
        documents: JobSets; other kinds are left to the server.
        pools: The cluster's node pools; None skips the placement check.
    """
    findings: list[DoctorFinding] = []
    for jobset in jobsets(documents):
        findings += check_restarts(jobset)
        for job in jobset.tpu_jobs:
            findings += check_slice(job)
            findings += () if pools is None else check_placement(job, pools)
    return LintReport.of(findings)


def lint_files(
    *paths: str | os.PathLike[str], pools: Sequence[NodePool] | None = None
) -> LintReport:
    """Check the manifests in files and folders.

    Raises:
        ConfigError: A file cannot be read, or is not a manifest.
    """
    return lint(read_files(*(Path(path) for path in paths)), pools=pools)


def check_slice(job: ReplicatedJob) -> Iterator[DoctorFinding]:
    """Yield differences between the Pods of a replicated Job and the hosts of its slice."""
    where = _slice_of(job)
    if isinstance(where, DoctorFinding):
        yield where
        return
    if names.SLICE_TOPOLOGY in job.annotations:
        return  # a super-slice, which Kueue's slice controller makes from several
    machines = sorted(_chips_of_machines(where.chip, where))
    if job.chips not in machines:
        yield finding(
            "slice.chips",
            "error",
            job.path,
            f"a Pod requests {job.chips} chips, but hosts of {where} have "
            f"{' or '.join(str(chips) for chips in machines)}.",
            f"Set the limit {names.CHIPS} to {where.chips_per_host}: one Pod uses a whole host.",
        )
        return
    hosts = where.chips // job.chips
    if job.parallelism != hosts or job.completions != hosts:
        yield finding(
            "slice.hosts",
            "error",
            job.path,
            f"parallelism is {job.parallelism} and completions {job.completions}; {where} has "
            f"{hosts} hosts of {job.chips} chips.",
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


def _slice_of(job: ReplicatedJob) -> Slice | DoctorFinding:
    """Return the slice that the node selector names, or why there is none."""
    known = {chip.gke_accelerator: chip for chip in list_chips() if chip.gke_accelerator}
    accelerator = job.selector.get(names.ACCELERATOR, "")
    topology = job.selector.get(names.TOPOLOGY, "")
    if accelerator not in known:
        seen = f"{names.ACCELERATOR} is {accelerator!r}, which no node has."
        seen += did_you_mean(accelerator, known)
        fix = f"Select one of {', '.join(known)}."
        return finding("slice.accelerator", "error", job.path, seen, fix)
    try:
        where = Slice.of(known[accelerator].name, topology=topology)
    except SliceError as error:
        seen = f"{names.TOPOLOGY} is {topology!r}. {error}"
        return finding("slice.topology", "error", job.path, seen, "Select a legal topology.")
    if format_shape(where.topology) != topology:
        seen = f"{names.TOPOLOGY} is {topology!r}, but nodes spell it {where.gke_topology!r}."
        return finding("slice.topology", "error", job.path, seen, "Use the nodes' spelling.")
    return where


def _chips_of_machines(chip: Chip, where: Slice) -> set[int]:
    """Return the possible numbers of chips per host of a slice."""
    sizes = {int(name.rpartition("-")[2].rstrip("t")) for name in chip.gke_machine_types}
    usual = chip.chips_per_host or where.chips_per_host
    fitting = {size for size in sizes if size == where.chips or size == usual < where.chips}
    return fitting | {where.chips_per_host}


def check_restarts(jobset: JobSet) -> Iterator[DoctorFinding]:
    """Yield a finding if a preemption would end a job, or would use up its restarts."""
    jobs = jobset.tpu_jobs
    policy = mapping(jobset.spec.get("failurePolicy"))
    free = [
        rule
        for rule in sequence(policy.get("rules"))
        if at(rule, "action") in IGNORES_BUDGET
        and "PodFailurePolicy" in (sequence(at(rule, "onJobFailureReasons")) or _DISRUPTION_REASONS)
    ]
    if not jobs or (free and all(_fails_on_disruption(job) for job in jobs)):
        return
    restarts = count(policy.get("maxRestarts"), 0)
    yield finding(
        "restarts.charged" if restarts else "restarts.none",
        "warning",
        jobset,
        f"a preempted host is charged to failurePolicy.maxRestarts, which is {restarts}, so the "
        f"job ends at preemption {restarts + 1}.",
        "Add podFailurePolicy FailJob onPodConditions DisruptionTarget, and a failurePolicy rule "
        "RestartJobSetAndIgnoreMaxRestarts on PodFailurePolicy.",
    )


def _fails_on_disruption(job: ReplicatedJob) -> bool:
    return any(
        at(rule, "action") == "FailJob" and at(condition, "type") == "DisruptionTarget"
        for rule in sequence(at(job.job, "podFailurePolicy", "rules"))
        for condition in sequence(at(rule, "onPodConditions"))
    )


def check_placement(job: ReplicatedJob, pools: Sequence[NodePool]) -> Iterator[DoctorFinding]:
    """Yield why the Pods of a replicated Job can never all run on these nodes."""
    tolerations = sequence(job.pod.get("tolerations"))
    reasons: Mapping[str, str | None] = {
        pool.name: pool.why_not(job.selector, tolerations, job.chips) for pool in pools
    }
    matching = [pool for pool in pools if reasons[pool.name] is None]
    slots = sum(pool.nodes * (pool.chips // max(job.chips, 1)) for pool in matching)
    is_exclusive = job.jobset.annotations.get(names.EXCLUSIVE) == names.NODE_POOL
    large = [pool for pool in matching if pool.nodes >= job.parallelism]
    if not matching:
        shown = "; ".join(f"{name}: {why}" for name, why in sorted(reasons.items())[:4])
        why = f"no node pool matches ({shown or 'there is none'})"
    elif is_exclusive and len(large) < job.replicas:
        sizes = ", ".join(f"{pool.name} has {pool.nodes} nodes" for pool in matching)
        why = (
            f"{job.replicas} node pools of {job.parallelism} nodes are needed, one per slice, but "
            f"{len(large)} exist ({sizes})"
        )
    elif slots < job.replicas * job.parallelism:
        why = f"{job.replicas * job.parallelism} hosts are needed, but {slots} match"
    else:
        return
    yield finding(
        "slice.placement",
        "error",
        job.path,
        f"would never be placed: {why}.",
        "Add such a node pool, or select the labels of an existing one.",
    )
