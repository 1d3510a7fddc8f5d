"""Run every case of tests/conformance and write docs/conformance.md from what came of each."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from document_blocks import CASES, PAGE, PASSED, list_cases, write_page  # noqa: E402


class Recorder:
    """Keeps the worst outcome of each test, over its parameters and phases."""

    def __init__(self) -> None:
        self.statuses: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note an outcome."""
        file, test = report.nodeid.split("::", 1)
        name = f"{Path(file).name}::{test.partition('[')[0]}"
        outcome = PASSED if report.passed else "skipped" if report.skipped else "FAILS"
        if self.statuses.get(name, PASSED) == PASSED:
            self.statuses[name] = outcome


def main() -> int:
    """Run, write, and fail where a case did."""
    recorder = Recorder()
    code = pytest.main([str(CASES), "-m", "conforms", "-n", "0"], plugins=[recorder])
    statuses = {case.test: recorder.statuses.get(case.test, "not run") for case in list_cases()}
    PAGE.write_text(write_page(statuses))
    wrong = {test: status for test, status in statuses.items() if status != PASSED}
    for test, status in wrong.items():
        print(f"{test}: {status}")
    print(f"{PAGE.relative_to(ROOT)}: {len(statuses) - len(wrong)} of {len(statuses)} tests pass")
    return int(bool(wrong) or code not in (0, 1))


if __name__ == "__main__":
    sys.exit(main())
