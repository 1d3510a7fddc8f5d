"""What happens to an object before it is stored: defaults, checks, and what webhooks add.

JobSet's webhook fills in defaults and checks names; Kueue's suspends what waits in a queue; GKE's
adds the variables of TPU workers; exclusive placement refuses Pods until their leader has a node.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any

from tpukit.pods.manifests.reading import JobSet, at, mapping, quantity, sequence

from . import well_known
from .kinds import JOB, JOBSET, NAMESPACE, NODE, POD, RESOURCE_QUOTA, Installed, Kind
from .refusal import Refusal, invalid, not_found
from .schema import field_errors
from .store import Object, Store

_DNS = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_IMMUTABLE = ("network", "successPolicy", "failurePolicy", "startupPolicy")
# Actions of failure-policy rules, which JobSet's resource definition lists.
_ACTIONS = (
    *("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
    *("RestartJob", "RestartJobAndIgnoreMaxRestarts"),
)
MESSAGE_PATTERNS_SINCE = (0, 10)
"""JobSet's first version with `onJobFailureMessagePatterns`."""
# While suspended, these parts of a pod template may change.
_MUTABLE_POD = ("nodeSelector", "tolerations", "schedulingGates")


class LeaderNotPlaced(Refusal):
    """A follower of exclusive placement is refused until its leader has a node."""

    def __init__(self) -> None:
        super().__init__(
            403,
            "admission webhook denied the request: leader pod not yet scheduled, not creating "
            "follower pod. this is an expected, transient error.",
        )


class Admission:
    """Admits objects to a store.

    Args:
        installed: Versions of the extensions, whose webhooks and schemas apply.
    """

    def __init__(self, store: Store, installed: Installed) -> None:
        self._store, self._installed = store, installed

    def admit(self, kind: Kind, content: Object, *, strict: bool = False) -> Object:
        """Return a new object as it is to be stored.

        Raises:
            Refusal: It is not allowed.
        """
        one = copy.deepcopy(content)
        namespace = at(one, "metadata", "namespace")
        name = str(at(one, "metadata", "name") or at(one, "metadata", "generateName") or "")
        if kind.is_namespaced and self._store.find(NAMESPACE, "", str(namespace)) is None:
            raise not_found(NAMESPACE, str(namespace))
        self._check(kind, one, name, strict=strict)
        if kind is JOBSET:
            _default_jobset(one)
            _check_jobset(one)
        elif kind is POD:
            return self.admit_pod(one)
        if kind.has_status and kind is not RESOURCE_QUOTA:
            one.pop("status", None)
        return one

    def admit_change(
        self, kind: Kind, before: Object, after: Object, *, strict: bool = False
    ) -> None:
        """Check a change of an object's main part.

        Raises:
            Refusal: It is not allowed.
        """
        name = before["metadata"]["name"]
        self._check(kind, after, name, strict=strict)
        if kind is JOBSET:
            fixed = [
                field
                for field in _IMMUTABLE
                if at(before, "spec", field) != at(after, "spec", field)
            ]
            suspended = at(before, "spec", "suspend") is True
            if _frozen_jobs(before, suspended=suspended) != _frozen_jobs(
                after, suspended=suspended
            ):
                fixed.append("replicatedJobs")
            if fixed:
                raise invalid(
                    kind, name, [(f"spec.{field}", "field is immutable") for field in fixed]
                )
        is_fixed = kind is JOB and at(before, "spec", "suspend") is not True
        if is_fixed and at(before, "spec", "template") != at(after, "spec", "template"):
            raise invalid(kind, name, [("spec.template", "field is immutable")])
        if kind is POD and _frozen_pod(before) != _frozen_pod(after):
            raise invalid(kind, name, [("spec", "Forbidden: pod updates may not change this")])

    def admit_pod(self, one: Object, *, hosts: int = 0) -> Object:
        """Return a Pod as webhooks leave it; `hosts` is the parallelism of its Job.

        Raises:
            Refusal: Quota is exceeded, or the leader of its Job has no node yet.
        """
        self._check_quota(one)
        self._place_exclusively(one)
        _add_worker_variables(one, hosts)
        write_quantities(one["spec"])
        one.setdefault("status", {"phase": "Pending"})
        one["status"].setdefault("phase", "Pending")
        one["spec"].setdefault("restartPolicy", "Always")
        one["spec"].setdefault("terminationGracePeriodSeconds", 30)
        return one

    def _check(self, kind: Kind, one: Object, name: str, *, strict: bool) -> None:
        causes = [
            (f"metadata.labels.{key}", "a label has 63 characters of A-Z, a-z, 0-9, -, _ and .")
            for key, value in mapping(at(one, "metadata", "labels")).items()
            if not isinstance(value, str) or not _LABEL.fullmatch(value)
        ]
        if not _NAME.fullmatch(name):
            causes.append(("metadata.name", f"{name!r} is not a lowercase RFC 1123 name"))
        errors = field_errors(one | {"kind": kind.name, "apiVersion": kind.api_version})
        causes += [(error.path, error.message) for error in errors if error.problem == "invalid"]
        unknown = [error.path for error in errors if error.problem == "unknown"]
        if kind is JOBSET and self._installed.jobset < MESSAGE_PATTERNS_SINCE:
            unknown += _without_message_patterns(one)
        if strict and unknown:
            said = ", ".join(f'unknown field "{path}"' for path in unknown)
            raise Refusal(
                400, f"{kind.name} in version {kind.version!r} cannot be handled as a "
                f"{kind.name}: strict decoding error: {said}"
            )  # fmt: skip
        if causes:
            raise invalid(kind, name, causes)

    def _check_quota(self, pod: Object) -> None:
        """Hold the namespace's ResourceQuotas on chips."""
        namespace = pod["metadata"]["namespace"]
        for quota in self._store.items(RESOURCE_QUOTA, namespace):
            for resource in (f"requests.{well_known.CHIPS}", well_known.CHIPS):
                hard = quantity(at(quota, "spec", "hard", resource))
                if hard is None:
                    continue
                used = sum(
                    chips_of(other)
                    for other in self._store.items(POD, namespace)
                    if at(other, "status", "phase") not in ("Succeeded", "Failed")
                )
                if used + chips_of(pod) > hard:
                    raise Refusal(
                        403,
                        f'pods "{pod["metadata"]["name"]}" is forbidden: exceeded quota: '
                        f"{quota['metadata']['name']}, requested: {resource}={chips_of(pod)}, "
                        f"used: {resource}={used}, limited: {resource}={hard}",
                    )

    def _place_exclusively(self, pod: Object) -> None:
        metadata = pod["metadata"]
        domain = mapping(metadata.get("annotations")).get(well_known.EXCLUSIVE)
        labels = mapping(metadata.get("labels"))
        if not domain or labels.get(well_known.COMPLETION_INDEX) == "0":
            return
        job = next(iter(sequence(metadata.get("ownerReferences"))), {"uid": ""})
        leader = next(
            (
                other
                for other in self._store.dependents({"metadata": job}, POD)
                if at(other, "metadata", "labels", well_known.COMPLETION_INDEX) == "0"
                and not at(other, "metadata", "deletionTimestamp")
            ),
            None,
        )
        node_name = at(leader, "spec", "nodeName")
        node = self._store.find(NODE, "", str(node_name)) if node_name else None
        value = at(node, "metadata", "labels", domain)
        if value is None:
            raise LeaderNotPlaced
        pod["spec"]["nodeSelector"] = {**mapping(pod["spec"].get("nodeSelector")), domain: value}


def write_quantities(pod_spec: Object) -> None:
    """Write amounts as text, as the API does in kinds of its own (and not in JobSets)."""
    for container in sequence(pod_spec.get("containers")):
        for field in ("limits", "requests"):
            amounts = at(container, "resources", field)
            if isinstance(amounts, dict):
                container["resources"][field] = {key: str(one) for key, one in amounts.items()}


def chips_of(pod: Mapping[str, Any]) -> int:
    """Return the chips that a Pod asks for."""
    return sum(
        quantity(at(one, "resources", "limits", well_known.CHIPS))
        or quantity(at(one, "resources", "requests", well_known.CHIPS))
        or 0
        for one in sequence(at(pod, "spec", "containers"))
    )


def _default_jobset(one: Object) -> None:
    spec = one.setdefault("spec", {})
    spec.setdefault("successPolicy", {"operator": "All"})
    spec.setdefault("startupPolicy", {"startupPolicyOrder": "AnyOrder"})
    network = spec.setdefault("network", {})
    network.setdefault("enableDNSHostnames", True)
    network.setdefault("publishNotReadyAddresses", True)
    for index, rule in enumerate(sequence(at(spec, "failurePolicy", "rules"))):
        rule.setdefault("name", f"failurePolicyRule{index}")
    if policy := spec.get("failurePolicy"):
        policy.setdefault("restartStrategy", "Recreate")
    for job in sequence(spec.get("replicatedJobs")):
        job.setdefault("replicas", 1)
        inner = job["template"].setdefault("spec", {})
        inner.setdefault("completionMode", "Indexed")
        inner["template"].setdefault("spec", {}).setdefault("restartPolicy", "OnFailure")
    if mapping(at(one, "metadata", "labels")).get(well_known.QUEUE):
        spec["suspend"] = True
    spec.setdefault("suspend", False)


def _check_jobset(one: Object) -> None:
    jobset, causes = JobSet(one), []
    for job in jobset.jobs:
        last = f"{jobset.name}-{job.name}-{max(job.replicas - 1, 0)}"
        pod = f"{last}-{max(job.completions - 1, 0)}{well_known.RANDOM_SUFFIX}"
        if len(pod) > well_known.LONGEST_NAME or not _DNS.fullmatch(last):
            causes.append(("spec.replicatedJobs", f"{pod} is no valid name of a pod"))
        policy = job.job.get("podFailurePolicy")
        if policy and job.pod.get("restartPolicy") != "Never":
            said = "podFailurePolicy needs restartPolicy Never"
            causes.append((f"spec.replicatedJobs[{job.index}]", said))
    for index, rule in enumerate(sequence(at(one, "spec", "failurePolicy", "rules"))):
        if at(rule, "action") not in _ACTIONS:
            said = f'Unsupported value: "{at(rule, "action")}"'
            causes.append((f"spec.failurePolicy.rules[{index}].action", said))
    if causes:
        raise invalid(JOBSET, jobset.name, causes)


def _without_message_patterns(one: Object) -> list[str]:
    """Remove a field that old versions of JobSet do not have, and return its paths."""
    return [
        f"spec.failurePolicy.rules[{index}].onJobFailureMessagePatterns"
        for index, rule in enumerate(sequence(at(one, "spec", "failurePolicy", "rules")))
        if rule.pop("onJobFailureMessagePatterns", None) is not None
    ]


def _frozen_jobs(jobset: Object, *, suspended: bool) -> Any:
    """Return what may not change of replicatedJobs."""
    jobs = copy.deepcopy(at(jobset, "spec", "replicatedJobs"))
    if suspended:
        for job in JobSet({"spec": {"replicatedJobs": jobs}}).jobs:
            template = at(job.fields, "template", "spec", "template") or {}
            template.pop("metadata", None)
            for field in _MUTABLE_POD:
                template.get("spec", {}).pop(field, None)
    return jobs


def _frozen_pod(pod: Object) -> Any:
    free = ("tolerations", "activeDeadlineSeconds", "schedulingGates", "nodeName")
    return {key: value for key, value in mapping(pod.get("spec")).items() if key not in free}


def _add_worker_variables(pod: Object, hosts: int) -> None:
    """Add what GKE's webhook adds to the Pods of an indexed Job with a subdomain and chips."""
    labels = mapping(pod["metadata"].get("labels"))
    subdomain, index = at(pod, "spec", "subdomain"), labels.get(well_known.COMPLETION_INDEX)
    if not subdomain or index is None or not chips_of(pod) or hosts < 2:
        return
    job = labels[well_known.JOB_NAME]
    own = {
        "TPU_WORKER_ID": index,
        "TPU_WORKER_HOSTNAMES": ",".join(f"{job}-{one}.{subdomain}" for one in range(hosts)),
    }
    for container in pod["spec"]["containers"]:
        stated = {one["name"] for one in container.setdefault("env", [])}
        container["env"] += [
            {"name": key, "value": value} for key, value in own.items() if key not in stated
        ]
