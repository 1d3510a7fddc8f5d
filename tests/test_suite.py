"""The suite itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from slow_cases import split

HERE = Path(__file__).parent


@pytest.mark.xdist_group("together")
def test_marked_tests_stay_on_one_worker(request):
    """Else what they share is made once a worker, and compilers fight for the same cores."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("one process runs everything")
    assert request.node.nodeid.endswith("@together")


def test_slow_cases_are_those_of_tests_that_exist():
    for case in (HERE / "slow_cases.txt").read_text().splitlines():
        file, *_, function = case.partition("[")[0].split("::")
        assert f"def {function}(" in (HERE.parent / file).read_text(), case


def test_no_test_fails_because_less_than_a_second_has_gone_by():
    """A busy machine takes longer; what is to be quick gets a benchmark, or seconds."""
    clock = re.compile(r"assert .*(monotonic|perf_counter|time)\(\) - \w+ <=? (0?\.\d+|1)\b")
    for path in HERE.rglob("*.py"):
        assert not (found := clock.search(path.read_text())), (path, found[0])


@pytest.fixture
def run_tests(tmp_path):
    """Run a file of tests in a process of its own, with the plugins of this suite."""

    def run(text, *options):
        (tmp_path / "test_it.py").write_text(text)
        plugins = ("leftovers", "recorded_times", "skips", "slow_cases")
        words = [*options, *(f"-p{name}" for name in plugins), "-pno:cacheprovider", "-rs"]
        return subprocess.run(
            [sys.executable, "-m", "pytest", *words, "test_it.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(HERE / "support")},
            capture_output=True,
            text=True,
        )

    return run


LEAVING = """
import pathlib, subprocess, leftovers

leftovers.DEVICES, leftovers.PATIENCE_S = [pathlib.Path("null")], 0.1

def test_that_replaces_a_device():
    pathlib.Path("null").touch()

def test_that_leaves_a_file():
    pathlib.Path.home().joinpath("left").touch()

def test_that_leaves_a_process():
    subprocess.Popen(["sh", "-c", "sleep 100 & sleep 0"]).wait()

def test_that_leaves_nothing():
    subprocess.run(["true"])
"""


def test_what_a_test_leaves_behind_is_an_error_that_names_it(run_tests):
    ended = run_tests(LEAVING)
    assert "4 passed, 3 errors" in ended.stdout, ended.stdout
    assert "this test left left in the home folder" in ended.stdout
    assert "this test changed null" in ended.stdout
    assert "test_that_leaves_a_process (call): sleep 100" in ended.stdout


@pytest.mark.parametrize(("reason", "code"), [("needs kubectl", 0), ("no torch", 1)])
def test_a_skip_that_is_not_expected_fails_a_strict_run(run_tests, reason, code):
    text = f"import pytest\ndef test_it():\n    pytest.skip({reason!r})\n"
    ended = run_tests(text, "--strict-skips")
    assert ended.returncode == code
    assert ("unexpected skips" in ended.stdout) == bool(code)


def test_times_are_kept_by_the_names_of_tests(run_tests, tmp_path):
    kept = tmp_path / "times.txt"
    kept.write_text("7.0 test_other.py::test_it\n")
    text = "import time\ndef test_it():\n    while time.process_time() < 3: pass\n"
    assert run_tests(text, "--times=times.txt").returncode == 0
    (measured, case), (other, _) = (line.split() for line in kept.read_text().splitlines())
    assert case == "test_it.py::test_it"
    assert float(measured) > 0
    assert other == "7.0"


def test_shares_are_even_whole_and_keep_small_files_together():
    seconds = {f"long.py::test[{number}]": 20.0 for number in range(16)}
    seconds |= {f"short_{file}.py::test[{one}]": 1.0 for file in range(30) for one in range(4)}
    unknown = ["long.py::test[new]", "new.py::test"]
    shares = split([*seconds, *unknown], seconds, 8)
    assert sorted(case for share in shares for case in share) == sorted([*seconds, *unknown])
    work = [sum(seconds.get(case, 20) for case in share) for share in shares]
    assert max(work) - min(work) <= 20
    for file in range(30):
        assert sum(f"short_{file}.py::test[0]" in share for share in shares) == 1
        together = {f"short_{file}.py::test[{one}]" for one in range(4)}
        assert any(together <= share for share in shares)


@pytest.mark.parametrize("name", ["tpukit", "checkout"])
def test_ci_runs_in_a_folder_named_like_the_package_and_commits_take_turns(tmp_path, name):
    """`make` is another program here, which says where it was called and with what."""
    make, clone = tmp_path / "bin" / "make", tmp_path / name
    for path, text in {
        make: '#!/bin/sh\necho "$(basename "$PWD") $*"\n',
        clone / ".ci/run": "",
    }.items():
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    (clone / ".ci" / "run").write_text((HERE.parent / ".ci" / "run").read_text())
    variables = {**os.environ, "PATH": f"{make.parent}:{os.environ['PATH']}"}
    variables.pop("SHARE", None)

    def say(*command):
        return subprocess.run(
            command, cwd=clone, env=variables, check=True, capture_output=True, text=True
        ).stdout

    git = ("git", "-c", "user.name=x", "-c", "user.email=x@example.com")
    say(*git, "init", "-q")
    for share in (2, 3):
        say(*git, "commit", "-q", "--allow-empty", "-m", "x")
        lint, test, slow = say(clone / ".ci" / "run").splitlines()
        assert lint == "tpukit lint"
        assert test.startswith("tpukit test OPTIONS=--strict-skips --durations=30")
        assert slow.startswith(f"tpukit test-slow SHARE={share}/8 OPTIONS=--strict-skips")


def test_a_share_that_is_none_is_refused(run_tests):
    ended = run_tests("", "--share=9/8")
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "expected a share such as 3/8, got '9/8'" in ended.stderr
