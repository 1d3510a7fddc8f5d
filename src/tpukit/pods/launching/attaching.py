"""Follow a job that its cluster runs, from any machine that may read the cluster.

Nothing of the machine that launched the job is needed: labels and annotations of the JobSet name
run, attempt and slice. Nothing is changed in the cluster.
"""

from collections.abc import Callable

from ...errors import ConfigError, TPUValidationError, did_you_mean
from ..causes import Ending
from ..pod import Pod
from ..providers.protocol import Command, Ended, GangEvent, Provider

WAIT_S = 0.5


def find_job(provider: Provider, name: str) -> Pod:
    """Return the newest pod of a run, or the pod of that name, whoever launched it.

    Raises:
        ConfigError: The provider does not run jobs itself.
        TPUValidationError: There is no such run.
        ProviderError: The provider cannot be reached, or rejects the credentials.
    """
    if not provider.capabilities.runs_gangs:
        raise ConfigError(
            f"Provider '{provider.name}' does not run jobs itself, so only the machine that "
            f"launched {name!r} can follow it: tpukit pods logs {name}."
        )
    pods = provider.list()
    found = [pod for pod in pods if name in (pod.name, pod.labels.get("job"))]
    if not found:
        known = sorted({pod.labels.get("job", pod.name) for pod in pods})
        raise TPUValidationError(
            f"There is no job {name!r} in this namespace; there are {', '.join(known) or 'none'}."
            + did_you_mean(name, known)
        )
    return max(found, key=lambda pod: pod.created_at or 0.0)


def follow_job(provider: Provider, pod: Pod, tell: Callable[[GangEvent], None]) -> Ending:
    """Report what a job does until it has ended, and return how.

    Args:
        provider: The provider that runs it.
        pod: Its pod.
        tell: Called with every event, from the first line of the processes that run now.
    """
    attempt = pod.labels.get("attempt", "")
    gang = provider.start(pod, Command(argv=()), attempt=int(attempt) if attempt.isdigit() else 1)
    try:
        while True:
            for event in gang.wait(WAIT_S):
                tell(event)
                if isinstance(event, Ended):
                    return event.ending
    finally:
        gang.close()
