"""Read damaged files one after another in this process, and report what was not one sentence.

    python tests/support/fuzzing/child.py '["job", "tokens"]' FIRST COUNT

One JSON line per failure goes to standard output. `… KIND SEED 1 --keep FOLDER` leaves the files of
one case in a folder, and shows its traceback.
"""

import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

MOST_CPU_S, MOST_MB = 5.0, 500
_SPARE = 3 << 30  # address space for jax's own threads and arenas, beyond what is there at first


class TooSlow(BaseException):
    """Raised where the alarm finds the reader."""


def run_kind(kind, first, count, folder, *, keep=False):
    """Yield how each seed ended."""
    sample = folder / "sample"
    sample.mkdir(parents=True)
    kind.write(sample)
    work = folder / "work"
    shutil.copytree(sample, work)
    os.chdir(work)
    for seed in range(len(kind.readers)):  # what is not damaged is read, and what is imported stays
        try:
            kind.read(seed)
        except SystemExit as ended:  # 1 is a verdict, 2 that the command is not typed right
            if ended.code not in (None, 0, 1):
                raise RuntimeError(f"{kind.name}: the sample is refused") from ended
        _restore(sample, work)
    for seed in range(first, first + count):
        changed = kind.damage(sample, work, random.Random(f"{kind.name} {seed}"), seed)
        problem, took = _problem_of(kind, seed)
        yield {"kind": kind.name, "seed": seed, "cpu_s": took, "problem": problem, "files": changed}
        if not keep:
            _restore(sample, work)


def _problem_of(kind, seed):
    """Return why a reader did not end as it should, or None, and its seconds."""
    _forget_peak()
    before, began = _peak_mb(), time.process_time()
    problem = None
    signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
    try:
        kind.read(seed)
    except TooSlow:
        problem = "took too long\n" + traceback.format_exc()
    except BaseException as error:  # noqa: BLE001  a reader may end with anything
        problem = unexpected(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    took, grown = time.process_time() - began, _peak_mb() - before
    if problem is None and took > MOST_CPU_S:
        problem = f"took {took:.1f} s of processor time"
    if problem is None and grown > MOST_MB:
        problem = f"took {grown:.0f} MB"
    return problem, took


def unexpected(error):
    """Return the traceback of an error that is no sentence for a user; None if it is one."""
    from tpukit.errors import TPUError

    if isinstance(error, SystemExit):
        return None
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return None  # as `tpukit.cli.main` has it
    if isinstance(error, TPUError) and len(str(error)) > 15:
        return None
    return "".join(traceback.format_exception(error))


def _restore(sample, work):
    os.chdir(work)
    known = {path.relative_to(sample) for path in sample.rglob("*")}
    for path in sorted(work.rglob("*"), reverse=True):
        if path.relative_to(work) in known:
            continue
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in sample.rglob("*"):
        if path.is_file():
            target = work / path.relative_to(sample)
            content = path.read_bytes()
            if not target.is_file() or target.read_bytes() != content:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)  # a reader may still have it mapped
                target.write_bytes(content)


def _forget_peak():
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident size begins anew


def _peak_mb():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise OSError("this kernel does not report VmHWM")


def _too_slow(*_):
    signal.setitimer(signal.ITIMER_PROF, 1.0)  # again, where something has swallowed the first
    raise TooSlow


def main(words):
    """Run kinds, and print their failures."""
    from fuzzing import KINDS

    names, first, count = json.loads(words[0]), int(words[1]), int(words[2])
    signal.signal(signal.SIGPROF, _too_slow)
    said = sys.stdout
    sys.stdout = sys.stderr  # what readers print is not the answer
    kept = Path(words[4]) if "--keep" in words else None
    with tempfile.TemporaryDirectory() as made:
        os.environ.update(TPUKIT_CACHE_DIR=f"{made}/cache", TPUKIT_STATE_DIR=f"{made}/state")
        for name in names:
            import jax  # noqa: F401  before the limit: its libraries are large

            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (size + _SPARE, hard))
            began = time.process_time()
            folder = (kept or Path(made)) / name
            slowest = 0.0, None
            for case in run_kind(KINDS[name], first, count, folder, keep=kept is not None):
                slowest = max(slowest, (case["cpu_s"], case["seed"]))
                if case["problem"]:
                    print(json.dumps(case), file=said, flush=True)
            seconds = time.process_time() - began
            done = {"kind": name, "done": count, "cpu_s": seconds, "slowest": slowest}
            print(json.dumps(done), file=said, flush=True)
        os.chdir("/")


if __name__ == "__main__":
    support = Path(__file__).parents[1]
    sys.path[:1] = [str(support), str(support.parents[1] / "benchmarks")]
    main(sys.argv[1:])
