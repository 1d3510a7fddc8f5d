"""Check how a JobSet reacts to a failure, a preemption and an eviction."""

import re
import warnings
from collections.abc import Iterator, Sequence

from ....runtime.doctor.finding import DoctorFinding
from ..documents import Fields
from ..findings import finding
from ..jobset import RESTARTED_FREE
from ..reading import JobSet, ReplicatedJob, at, count, jobsets, mapping, sequence

IGNORES_BUDGET = ("RestartJobSetAndIgnoreMaxRestarts", "RestartJobAndIgnoreMaxRestarts")
UNLIMITED = 2147483647


def check_restarts(documents: Sequence[Fields]) -> Iterator[DoctorFinding]:
    """Yield failures that would not restart a job, and preemptions that would be charged to it."""
    for jobset in jobsets(documents):
        yield from _check_policy(jobset)
        yield from _check_rules(jobset)
        for job in jobset.tpu_jobs:
            yield from _check_job(job)
            yield from _check_pod_failure_policy(job)
        yield from _check_disruption(jobset)


def _check_policy(jobset: JobSet) -> Iterator[DoctorFinding]:
    policy = mapping(jobset.spec.get("failurePolicy"))
    if not count(policy.get("maxRestarts"), 0):
        free = [rule for rule in _rules(jobset) if rule.get("action") in IGNORES_BUDGET]
        severity = "info" if free else "warning"
        yield finding(
            "restarts.none",
            severity,
            jobset,
            "failurePolicy.maxRestarts is 0 or not set: the first failure that no rule excuses "
            "ends the job.",
            "Set failurePolicy.maxRestarts, for example to 10.",
        )
    strategy = policy.get("restartStrategy", "Recreate")
    if policy and strategy == "Recreate" and any(job.parallelism > 1 for job in jobset.tpu_jobs):
        yield finding(
            "restarts.mixed",
            "warning",
            jobset,
            "restartStrategy is Recreate: new Pods start while old ones still run, so that two "
            "attempts share one coordinator.",
            "Write restartStrategy: BlockingRecreate.",
        )
    if strategy == "InPlaceRestart":
        for job in jobset.jobs:
            if job.job.get("backoffLimit") != UNLIMITED or job.completions != job.parallelism:
                yield finding(
                    "restarts.in_place",
                    "error",
                    job.path,
                    f"InPlaceRestart wants backoffLimit {UNLIMITED}, podReplacementPolicy Failed "
                    "and completions equal to parallelism (and is off by default).",
                    "Write restartStrategy: BlockingRecreate.",
                )


def _check_rules(jobset: JobSet) -> Iterator[DoctorFinding]:
    seen_all = False
    for index, rule in enumerate(_rules(jobset)):
        where = f"{jobset} spec.failurePolicy.rules[{index}]"
        if seen_all:
            yield finding(
                "restarts.shadowed",
                "warning",
                where,
                "an earlier rule matches every failure, so this one never applies.",
                "Put the general rule last.",
            )
        patterns = sequence(rule.get("onJobFailureMessagePatterns"))
        seen_all = seen_all or not (
            patterns or rule.get("onJobFailureReasons") or rule.get("targetReplicatedJobs")
        )
        for pattern in patterns:
            if isinstance(pattern, str) and (error := _pattern_error(pattern)):
                yield finding(
                    "restarts.pattern",
                    "error",
                    where,
                    f"{pattern!r} is not a regular expression: {error}.",
                    "Correct the pattern (RE2).",
                )


def _pattern_error(pattern: str) -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            return str(error)
    return None


def _check_job(job: ReplicatedJob) -> Iterator[DoctorFinding]:
    policy = job.pod.get("restartPolicy", "OnFailure")
    has_pod_policy = bool(mapping(job.job.get("podFailurePolicy")))
    if policy != "Never":
        stated = "restartPolicy" in job.pod
        text = f"restartPolicy is {policy}" + ("" if stated else " (JobSet's default)")
        why = (
            "podFailurePolicy needs Never, otherwise the Job is refused."
            if has_pod_policy
            else "a process that dies starts again alone, while the others wait for the old one."
        )
        severity = "error" if has_pod_policy else "warning"
        yield finding("restarts.alone", severity, job.path, f"{text}: {why}", "Write Never.")
    if count(job.job.get("backoffLimit"), 6) > 0 and policy == "Never":
        shown = job.job.get("backoffLimit", "6 (the default)")
        yield finding(
            "restarts.backoff",
            "warning",
            job.path,
            f"backoffLimit is {shown}: a Pod that fails is replaced alone, and JobSet does not "
            "restart the others until the limit is reached.",
            "Write backoffLimit: 0.",
        )
    if has_pod_policy and job.job.get("podReplacementPolicy", "Failed") != "Failed":
        yield finding(
            "restarts.replacement",
            "error",
            job.path,
            "with podFailurePolicy the only podReplacementPolicy is Failed.",
            "Leave podReplacementPolicy out.",
        )


def _check_pod_failure_policy(job: ReplicatedJob) -> Iterator[DoctorFinding]:
    containers = {str(container.get("name")) for container in job.containers}
    for index, rule in enumerate(sequence(at(job.job, "podFailurePolicy", "rules"))):
        where = f"{job.path} podFailurePolicy.rules[{index}]"
        codes = mapping(at(rule, "onExitCodes"))
        if codes and mapping(rule).get("onPodConditions"):
            yield finding(
                "restarts.rule",
                "error",
                where,
                "a rule has onExitCodes or onPodConditions, not both.",
                "Write two rules.",
            )
        if codes.get("operator") == "In" and 0 in sequence(codes.get("values")):
            yield finding(
                "restarts.rule", "error", where, "0 is not a failure.", "Take 0 out of the values."
            )
        named = codes.get("containerName")
        if isinstance(named, str) and named not in containers:
            yield finding(
                "restarts.rule",
                "error",
                where,
                f"no container is called {named!r}; there are {', '.join(sorted(containers))}.",
                "Name a container of the Pod.",
            )
        if at(rule, "action") == "Ignore" and not codes:
            yield finding(
                "restarts.ignored",
                "warning",
                where,
                "an evicted Pod is ignored: it is replaced alone, while the others wait for it.",
                "Write action: FailJob, and restart by a rule of the JobSet's failurePolicy.",
            )


def _check_disruption(jobset: JobSet) -> Iterator[DoctorFinding]:
    """Yield a finding if a preempted host would be charged to the job."""
    jobs = jobset.tpu_jobs
    if not jobs:
        return
    free = [rule for rule in _rules(jobset) if rule.get("action") in IGNORES_BUDGET]
    reasons = [sequence(rule.get("onJobFailureReasons")) for rule in free]
    excused = any(not stated or "PodFailurePolicy" in stated for stated in reasons)
    is_reported = all(_fails_on_disruption(job) for job in jobs)
    if not (excused and is_reported):
        yield finding(
            "restarts.charged",
            "warning",
            jobset,
            "a preemption is charged to maxRestarts: no podFailurePolicy fails the Job on the "
            "condition DisruptionTarget with a rule that restarts without charge.",
            "Add podFailurePolicy FailJob onPodConditions DisruptionTarget, and a failurePolicy "
            "rule RestartJobSetAndIgnoreMaxRestarts on PodFailurePolicy.",
        )
        return
    peers = all(_fails_on_codes(job) for job in jobs)
    if not peers and any(job.parallelism > 1 or job.replicas > 1 for job in jobs):
        queue = " When Kueue preempts, its Jobs are suspended one after another (jobset#1117)."
        codes = ", ".join(str(code) for code in RESTARTED_FREE)
        yield finding(
            "restarts.survivors",
            "warning",
            jobset,
            "the other hosts of a preempted one fail before it does, with an exit code that no "
            "rule excuses, so the preemption is charged to maxRestarts all the same."
            + (queue if jobset.queue else ""),
            f"End with a code of its own when a peer is lost, and add it (tpukit: {codes}) to "
            "podFailurePolicy onExitCodes and to the rule that restarts without charge.",
        )


def _fails_on_disruption(job: ReplicatedJob) -> bool:
    return any(
        at(rule, "action") == "FailJob" and at(condition, "type") == "DisruptionTarget"
        for rule in sequence(at(job.job, "podFailurePolicy", "rules"))
        for condition in sequence(at(rule, "onPodConditions"))
    )


def _fails_on_codes(job: ReplicatedJob) -> bool:
    return any(
        at(rule, "action") == "FailJob" and bool(mapping(at(rule, "onExitCodes")))
        for rule in sequence(at(job.job, "podFailurePolicy", "rules"))
    )


def _rules(jobset: JobSet) -> list[Fields]:
    return [mapping(rule) for rule in sequence(at(jobset.spec, "failurePolicy", "rules"))]
