"""With `--strict-skips`, a skip for a reason that is not expected fails the run."""

import pytest

# How the reasons of expected skips begin.
EXPECTED = (
    # A part of the providers' conformance tests that the provider at hand does not have.
    "no reply of this provider travels",
    "this provider has no zones",
    # Programs and rights that a machine may lack; `make test` installs the first two where it can.
    "no browser",
    "no Prometheus server here",
    "needs kubectl",
    "this user may not mount a small file system",
    # The documents are kept beside the project, not in it.
    "the documents are not in this tree",
    # Environments of other versions of jax, which `make test-toolchains` makes.
    "no second toolchain here",
    # Frameworks of other people, which slow tests install with uv.
    "not installable here",
    "no environment with jax",
    "this machine has accelerators",
    "one process runs everything",
)


def pytest_addoption(parser):
    group = parser.getgroup("tpukit")
    group.addoption("--strict-skips", action="store_true", help="fail on unexpected skips")


def pytest_configure(config):
    if config.getoption("strict_skips") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(UnexpectedSkips())


class UnexpectedSkips:
    def __init__(self):
        self.found = {}

    def pytest_runtest_logreport(self, report):
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if not reason.startswith(EXPECTED):
                self.found[report.nodeid] = reason

    # A module that skips itself while it is collected.
    pytest_collectreport = pytest_runtest_logreport

    def pytest_sessionfinish(self, session):
        if self.found and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self.found:
            terminalreporter.section("unexpected skips", red=True)
        for name, reason in self.found.items():
            terminalreporter.line(f"{name}: {reason}")
