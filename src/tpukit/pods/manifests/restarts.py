"""Which failures restart a job without charge, by exit code and by condition.

A process that was told to stop (143), lost another one (201, or 134 when jax's coordination
service aborts it) or hung (200) is started again without charge: Kubernetes sees the survivors of
a preempted host fail first, so charging them would charge the preemption. Restarting for ever is
prevented by the supervisor outside. What is certain to happen again ends the job at once; all
else, such as 1 and 137, is charged to `maxRestarts`.
"""

from ...runtime.exit_codes import ExitCode
from .documents import Document

SIGABRT_STATUS, SIGKILL_STATUS, SIGTERM_STATUS = 128 + 6, 128 + 9, 128 + 15
RESTARTED_FREE = (SIGABRT_STATUS, SIGTERM_STATUS, int(ExitCode.HUNG), int(ExitCode.PEER_LOST))
PERMANENT = (int(ExitCode.BAD_INPUT), int(ExitCode.DIVERGED), int(ExitCode.OUT_OF_MEMORY))

FREE_RULE, PERMANENT_RULE = "disruption", "permanent"


def failure_policy(max_restarts: int) -> Document:
    """Return what a JobSet does when one of its Jobs fails; the first rule that matches counts."""
    codes = "|".join(str(code) for code in RESTARTED_FREE)
    return {
        "maxRestarts": max_restarts,
        # Nothing new starts before everything old is gone: old and new processes never mix.
        "restartStrategy": "BlockingRecreate",
        "rules": [
            {
                "name": FREE_RULE,
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": [
                    "condition DisruptionTarget",
                    f"exit code ({codes}) ",
                ],
            },
            {
                "name": PERMANENT_RULE,
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
            },
        ],
    }


def pod_failure_policy(container: str) -> Document:
    """Return when a Job fails with a reason that the JobSet's rules can read."""
    codes = sorted((*RESTARTED_FREE, *PERMANENT))
    return {
        "rules": [
            {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget"}]},
            {
                "action": "FailJob",
                "onExitCodes": {"containerName": container, "operator": "In", "values": codes},
            },
        ]
    }
