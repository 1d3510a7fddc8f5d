"""The processor seconds of each test, kept in a file with `--times FILE`."""

import re
import resource
from pathlib import Path

import pytest

_GROUP = re.compile(r"@[\w.-]+$")  # what xdist adds to the name of a test in a group


def pytest_addoption(parser):
    group = parser.getgroup("tpukit")
    group.addoption(
        "--times", type=Path, metavar="FILE", help="write the processor seconds of tests"
    )


def pytest_configure(config):
    if config.getoption("times") is not None:
        config.pluginmanager.register(RecordedTimes(config))


class RecordedTimes:
    """Measures in every process, and writes in the one that collects their reports."""

    def __init__(self, config):
        self.file = None if hasattr(config, "workerinput") else config.getoption("times").absolute()
        self.started, self.found, self.bad = {}, {}, set()

    def pytest_runtest_logstart(self, nodeid):
        self.started[nodeid] = processor_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when == "teardown":
            seconds = processor_seconds() - self.started.pop(item.nodeid)
            report.user_properties.append(("processor_seconds", seconds))
        return report

    def pytest_runtest_logreport(self, report):
        if not report.passed:  # only times of cases that passed are kept
            self.bad.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self.bad:
            seconds = dict(report.user_properties)["processor_seconds"]
            self.found[plain(report.nodeid)] = seconds

    def pytest_sessionfinish(self):
        if self.file is not None:
            write_times(self.file, {**read_times(self.file), **self.found})


def plain(nodeid):
    """Return the name of a test without the group that xdist adds to it."""
    return _GROUP.sub("", nodeid)


def processor_seconds():
    """Return the processor time of this process and of its children that have ended."""
    both = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(sum(resource.getrusage(who)[:2]) for who in both)


def read_times(file):
    """Return the seconds of each test by its name; nothing if there is no such file."""
    if not file.exists():
        return {}
    lines = (line.partition(" ") for line in file.read_text().splitlines())
    return {case: float(seconds) for seconds, _, case in lines}


def write_times(file, seconds):
    file.write_text("".join(f"{seconds[case]:.1f} {case}\n" for case in sorted(seconds)))
