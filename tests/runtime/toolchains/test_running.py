"""A command of this very source with another interpreter, and what it is told of this process."""

import json
import sys
from pathlib import Path

from tpukit.runtime.toolchains import run_followed, run_tpukit


def test_lines_are_passed_on_as_they_come_and_all_is_kept():
    told = []
    program = "import sys; print('out'); print('a\\nb', file=sys.stderr); sys.exit(3)"
    ended = run_followed([sys.executable, "-c", program], progress=told.append)
    assert (ended.code, ended.output, ended.errors, told) == (3, "out\n", "a\nb\n", ["a", "b"])


def test_the_same_tpukit_runs_in_the_other_interpreter():
    ended = run_tpukit(Path(sys.executable), ["slice", "v6e-4", "--json"])
    assert ended.code == 0, ended.errors
    assert json.loads(ended.output)["name"] == "v6e-4"


def test_flags_of_this_process_do_not_reach_a_jaxlib_that_may_not_know_them(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_another_version=1")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_of_another_version=1")
    program = "import os; print({'XLA_FLAGS', 'LIBTPU_INIT_ARGS'} & set(os.environ))"
    assert run_followed([sys.executable, "-c", program]).output == "set()\n"
