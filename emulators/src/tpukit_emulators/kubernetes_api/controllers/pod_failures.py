"""What a Job makes of failed Pods: its podFailurePolicy."""

from tpukit.pods.manifests.reading import at, mapping, sequence

from ..store import Object


def failure_rule(job: Object, pod: Object) -> tuple[str | None, str]:
    """Return the action of the first rule that a failed Pod matches, and what to say of it.

    Only Pods of phase Failed are tested.
    """
    name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    for index, one in enumerate(sequence(at(job, "spec", "podFailurePolicy", "rules"))):
        rule = mapping(one)
        action = str(rule.get("action"))
        ending = f"matching {action} rule at index {index}"
        for condition in sequence(rule.get("onPodConditions")):
            wanted = (at(condition, "type"), at(condition, "status") or "True")
            for has in sequence(at(pod, "status", "conditions")):
                if (has["type"], has["status"]) == wanted:
                    return action, f"Pod {name} has condition {wanted[0]} {ending}"
        codes = mapping(rule.get("onExitCodes"))
        for status in sequence(at(pod, "status", "containerStatuses")) if codes else ():
            code = at(status, "state", "terminated", "exitCode")
            if code in (None, 0) or codes.get("containerName", status["name"]) != status["name"]:
                continue
            if (code in sequence(codes.get("values"))) == (codes.get("operator") == "In"):
                return action, (
                    f"Container {status['name']} for pod {name} failed with exit code {code} "
                    f"{ending}"
                )
    return None, ""
