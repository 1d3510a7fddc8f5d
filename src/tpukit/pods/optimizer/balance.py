"""Work divided among hosts by how fast each is."""

from collections.abc import Mapping

from ...errors import TPUValidationError


def balance_examples(
    step_times_s: Mapping[str, float], examples: int, *, now: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return how many examples each host should take so that all finish together.

    Each next example goes to the host that would finish it first, so that no other division into
    whole examples ends earlier. Weigh gradients by these numbers:
    `step_synchronized(gradients, weights=…)`.

    Args:
        step_times_s: A step of each host, with the examples it has now.
        examples: To divide.
        now: How many each host has now; by default the same for all.

    Raises:
        TPUValidationError: A time or a number is not above 0, or there are too few examples.
    """
    held = {host: 1 if now is None else now[host] for host in step_times_s}
    if any(seconds <= 0 for seconds in step_times_s.values()) or min(held.values()) <= 0:
        raise TPUValidationError("Every host needs a step time and a number of examples above 0.")
    if examples < len(held):
        raise TPUValidationError(
            f"{examples} examples are too few for {len(held)} hosts; each needs at least one."
        )
    each_s = {host: step_times_s[host] / held[host] for host in held}
    shares = dict.fromkeys(held, 1)
    left = examples - len(held)
    # Most by proportion, at once; the rest one by one.
    speed = sum(1 / seconds for seconds in each_s.values())
    for host, seconds in each_s.items():
        more = max(0, int(examples / (seconds * speed)) - 1)
        shares[host] += min(more, left)
        left -= min(more, left)
    for _ in range(left):
        first = min(shares, key=lambda host: (shares[host] + 1) * each_s[host])
        shares[first] += 1
    return shares
