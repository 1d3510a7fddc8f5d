"""Which cases are slow, and shares of them that take equally long: `--share 3/8`."""

import argparse
import heapq
import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import pytest
from recorded_times import plain, read_times

TESTS = Path(__file__).parents[1]
# Cases of tests that have quicker ones too, by the processor time they took.
LISTED = frozenset((TESTS / "slow_cases.txt").read_text().splitlines())
TIMES = TESTS / "slow_times.txt"  # written by `make slow-times`
# Rough guesses for cases of files where none was measured: most that are listed take few seconds,
# and those that are marked in the code take longer.
LISTED_S, MARKED_S = 4.0, 30.0


def share(text):
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if found is None or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"expected a share such as 3/8, got {text!r}")
    return int(found[1]), int(found[2])


def pytest_addoption(parser):
    group = parser.getgroup("tpukit")
    group.addoption("--share", type=share, metavar="K/N", help="run one of N equal shares")
    group.addoption(
        "--recorded", action="store_true", help="of a share: only cases that `make slow-times` has"
    )


def pytest_configure(config):
    config.pluginmanager.register(SlowCases())
    if (asked := config.getoption("share")) is not None:
        config.pluginmanager.register(Share(*asked, recorded=config.getoption("recorded")))


class SlowCases:
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        for item in items:
            if plain(item.nodeid) in LISTED:
                item.add_marker(pytest.mark.slow)


class Share:
    def __init__(self, number, count, *, recorded=False):
        self.number, self.count, self.recorded = number, count, recorded

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        """Keep a share of what the other options have left."""
        times = read_times(TIMES)
        names = [plain(item.nodeid) for item in items]
        if self.recorded:
            names = [name for name in names if name in times]
        kept = split(names, times, self.count)[self.number - 1]
        left_out = [item for item in items if plain(item.nodeid) not in kept]
        items[:] = [item for item in items if plain(item.nodeid) in kept]
        config.hook.pytest_deselected(items=left_out)


def split(cases, seconds, count):
    """Deal cases out to `count` sets, the longest first, each to the set with the least work.

    The cases of a file stay together, because they share what its fixtures make, unless the file
    takes more than half of a share.
    """
    files = defaultdict(list)
    for case, estimate in estimates(cases, seconds).items():
        files[case.partition("::")[0]].append((estimate, case))
    half = sum(estimate for of_file in files.values() for estimate, _ in of_file) / count / 2
    dealt = []
    for of_file in files.values():
        whole = sum(estimate for estimate, _ in of_file) <= half
        dealt += [of_file] if whole else [[one] for one in of_file]
    dealt.sort(key=lambda part: (-sum(estimate for estimate, _ in part), part[0][1]))
    loads = [(0.0, number) for number in range(count)]
    shares = [set() for _ in range(count)]
    for part in dealt:
        load, number = heapq.heappop(loads)
        shares[number].update(case for _, case in part)
        heapq.heappush(loads, (load + sum(estimate for estimate, _ in part), number))
    return shares


def estimates(cases, seconds):
    """Return the seconds of each case: its own, else the mean of its function, else of its file."""
    known = defaultdict(list)
    for case, taken in seconds.items():
        for name in names_of(case):
            known[name].append(taken)
    found = {}
    for case in cases:
        measured = (fmean(known[name]) for name in names_of(case) if name in known)
        found[case] = next(measured, LISTED_S if case in LISTED else MARKED_S)
    return found


def names_of(case):
    """Return the names of a case, of its function and of its file."""
    return case, case.partition("[")[0], case.partition("::")[0]
