"""Run pytest in a process of its own, forked from one that has already imported what tests need."""

import multiprocessing
import os
import resource
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# The real TPU compiler takes minutes; what it alone would notice stands under no test here.
QUICK = "not slow and not tpu and not libtpu and not browser"
ALWAYS = ["-q", "-n", "0", "-p", "no:cacheprovider", "--assert=plain", "--hypothesis-seed=0",
          "-m", QUICK]  # fmt: skip
MOST_BYTES = 12 * 2**30  # a changed size may ask for all the memory of the machine
MOST_WAITING_S = 900.0  # for one that sleeps; processor time bounds the others
NOTHING_RAN = 5

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["preloaded"])


@dataclass(frozen=True)
class Ended:
    """How a run of pytest ended.

    Attributes:
        passed: Whether every test passed.
        too_slow: Whether it was ended because it took too long.
        failed: The first test that failed, or the file that could not be collected.
        said: The end of its output.
    """

    passed: bool
    too_slow: bool
    failed: str | None
    said: str


def run_pytest(
    root: Path, arguments: list[str], *, limit_s: float | None = None, lines_of: list[Path] = ()
) -> tuple[Ended, Any]:
    """Run pytest in a copy of the repository.

    Args:
        root: The copy.
        arguments: More arguments of pytest.
        limit_s: Seconds of processor time, so that a busy machine makes no test fail.
        lines_of: Files whose lines are watched.

    Returns:
        How it ended, and what `lines_by_test.Watch` found.
    """
    ours, theirs = FORKS.Pipe(duplex=False)
    child = FORKS.Process(target=_in_child, args=(theirs, root, arguments, limit_s, lines_of))
    child.start()
    theirs.close()
    failed, lines = None, None
    try:
        if ours.poll(MOST_WAITING_S):
            failed, lines = ours.recv()
    except EOFError:  # it was killed
        pass
    child.join(10)
    slow = child.exitcode in (None, -signal.SIGXCPU)
    if child.exitcode is None:
        child.kill()
        child.join()
    said = (root / "said.txt").read_text("utf-8", errors="replace")[-2000:]
    return Ended(child.exitcode in (0, NOTHING_RAN), slow, failed, said), lines


def _in_child(
    to: Connection, root: Path, arguments: list[str], limit_s: float | None, lines_of: list[Path]
) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    if limit_s is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s) + 5))
    os.chdir(root)
    said = os.open("said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.path.insert(0, str(root / "src"))
    os.environ["PYTHONPATH"] = str(root / "src")  # for the processes that tests start
    # The bytecode of the unchanged copy is of use; that of a changed file is not.
    sys.dont_write_bytecode = not lines_of
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    _find_without_polishing()

    import pytest
    from lines_by_test import Watch

    first = _FirstFailure()
    watch = Watch(root, lines_of) if lines_of else None
    code = pytest.main([*ALWAYS, *arguments], plugins=[first, *([watch] if watch else [])])
    to.send((first.name, watch.found() if watch else None))
    to.close()
    sys.stdout.flush()
    os._exit(code)  # what jax would tidy up at exit takes longer than many a test


def _find_without_polishing() -> None:
    """Keep hypothesis from shrinking what it found, and from failing on a slow machine."""
    from hypothesis import HealthCheck, Phase, settings

    settings.register_profile(
        "mutants",
        phases=(Phase.explicit, Phase.generate),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("mutants")


class _FirstFailure:
    """A pytest plugin that remembers what failed first."""

    name: str | None = None

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.name = self.name or report.nodeid

    pytest_collectreport = pytest_runtest_logreport
