"""A pytest fixture for users: fail when a training step no longer fits, or gets slower.

A `conftest.py` enables it with `pytest_plugins = ["tpukit.pytest_plugin"]`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest


class StepCheck(Protocol):
    """The type of the fixture `tpukit_check`."""

    def __call__(
        self,
        job: Any,
        *,
        on: str,
        baseline: str | Path | None = None,
        slower: float = 0.05,
        **how: Any,
    ) -> Any:
        """Check a job, or a command given as a list of words; fail the test if it got worse."""
        ...


@pytest.fixture
def tpukit_check() -> StepCheck:
    """Return a function that checks a job or a command, and compares it with a baseline file.

    A baseline that does not exist is written, and the test fails once, so that the file is added on
    purpose.
    """

    def check(
        job: Any,
        *,
        on: str,
        baseline: str | Path | None = None,
        slower: float = 0.05,
        **how: Any,
    ) -> Any:
        import tpukit
        from tpukit.checker.report.comparison import find_regressions

        is_command = isinstance(job, Sequence) and not isinstance(job, str)
        result = (
            tpukit.check_program(list(job), on, **how)  # pyright: ignore[reportUnknownArgumentType]
            if is_command
            else tpukit.check(job, on=on, **how)
        )
        if baseline is None:
            assert result.fits, str(result.memory.refusal)
            return result
        path = Path(baseline)
        if not path.exists():
            path.write_text(json.dumps(result.to_dict()), encoding="utf-8")
            pytest.fail(f"{path} did not exist and was written; look at it, and commit it.")
        worse = find_regressions(result, path, slower=slower)
        assert not worse, "; ".join(worse)
        return result

    return check
