"""Damaged files of every kind end in one sentence, within 5 s and 500 MB.

`tests/support/fuzzing` has the kinds. A failure names its kind and seed; this leaves the
files of that case in a folder, and shows the traceback:

    python tests/support/fuzzing/child.py '["job"]' 17 1 --keep /tmp/case
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzzing import KINDS

CHILD = Path(__file__).parent / "support" / "fuzzing" / "child.py"
QUICK, ALL, SHARES = 12, 2000, 2


def failures_of(kinds, count, *, timeout_s):
    """Have one child process read `count` damaged inputs of each kind; return its failures."""
    words = [sys.executable, str(CHILD), json.dumps(kinds), "0", str(count)]
    environment = {**os.environ, "XLA_FLAGS": "", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, capture_output=True, env=environment, timeout=timeout_s)
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    done = [line["kind"] for line in lines if "done" in line]
    assert (ended.returncode, done) == (0, kinds), ended.stderr[-3000:].decode(errors="replace")
    return [line for line in lines if "done" not in line]


def shown(failures):
    return "\n\n".join(f"{one['kind']}, seed {one['seed']}: {one['problem']}" for one in failures)


# A child takes some seconds to start, so that it reads several kinds.
@pytest.mark.parametrize("share", range(SHARES))
def test_a_share_of_the_damage_is_one_sentence(share):
    failures = failures_of(list(KINDS)[share::SHARES], QUICK, timeout_s=600)
    assert not failures, shown(failures)


@pytest.mark.slow
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("kind", KINDS)
def test_all_damage_is_one_sentence(kind):
    failures = failures_of([kind], ALL, timeout_s=1800)
    assert not failures, shown(failures[:5])
