"""A client that keeps so many requests at a server until all are answered, by the server's times.

Published throughput is that of a whole run: requests of random lengths, and an end in which fewer
and fewer of them are left. A step that adds tokens takes as long as its number of sequences says.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class ClientRun:
    """What a client measures.

    Attributes:
        tokens_per_s: New tokens over the time of the whole run.
        token_s: Time per output token after the first, in the mean over requests.
    """

    tokens_per_s: float
    token_s: float


@dataclass(frozen=True, kw_only=True)
class Requests:
    """What a client sends.

    Attributes:
        count: Of requests.
        prompt: The longest prompt.
        new: The longest answer.
        shortest: The shortest of both over the longest; lengths between are as likely.
    """

    count: int
    prompt: int
    new: int
    shortest: float = 1.0

    def lengths(self) -> list[tuple[int, int]]:
        """Tokens of each prompt and answer, the same in every run."""
        random = np.random.default_rng(0)
        sides = (
            random.integers(max(1, int(longest * self.shortest)), longest + 1, self.count)
            for longest in (self.prompt, self.new)
        )
        return [(int(prompt), int(new)) for prompt, new in zip(*sides, strict=True)]


@dataclass
class _Sequence:
    left: int
    new: int
    began_s: float


def run_client(
    requests: Requests,
    *,
    at_once: int,
    step_s: Callable[[int], float],
    prompt_s: Callable[[int], float],
) -> ClientRun:
    """Send all requests, `at_once` at a time.

    Args:
        requests: What is sent.
        at_once: Sequences that the server works on.
        step_s: Seconds of a step, by the number of sequences.
        prompt_s: Seconds of a prompt, by its tokens; no sequence goes on meanwhile.
    """
    waiting = deque(requests.lengths())
    total = sum(new for _, new in waiting)
    active: list[_Sequence] = []
    now, tokens_s = 0.0, []
    while waiting or active:
        while waiting and len(active) < at_once:
            prompt, new = waiting.popleft()
            now += prompt_s(prompt)  # gives the first token as well
            active.append(_Sequence(new - 1, new, now))
        steps = min(one.left for one in active)
        now += steps * step_s(len(active))
        for one in active:
            one.left -= steps
            if not one.left and one.new > 1:
                tokens_s.append((now - one.began_s) / (one.new - 1))
        active = [one for one in active if one.left]
    return ClientRun(tokens_per_s=total / now, token_s=float(np.mean(tokens_s)))
