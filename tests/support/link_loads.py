"""Loads of the links of a torus axis, counted pair by pair: the truth for models of exchanges."""

import itertools
from collections import Counter


def busiest_link(length, *, is_ring):
    """Parts of an all-to-all over the busiest link, one for each pair, by the shorter way."""
    links = Counter()
    for source, target in itertools.permutations(range(length), 2):
        up, down = (target - source) % length, (source - target) % length
        upwards = up < down or (up == down and source % 2 == 0) if is_ring else target > source
        step = 1 if upwards else -1
        for hop in range(min(up, down) if is_ring else abs(target - source)):
            links[(source + step * hop) % length, step] += 1
    return max(links.values())
