"""What watching costs: a screen of `tpukit top`, a metrics file of 10⁷ lines, records of steps.

CPU seconds are counted beside wall time: they do not depend on who else uses the machine.

Usage: python benchmarks/observe_top.py [--lines 10000000] [--runs 7]
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from claims import Claim, report

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from recorded_run import write_run

from tpukit.observe import Run
from tpukit.records.attempt_recorder import AttemptRecorder
from tpukit.records.ledger import Ledger

TOP_S = 1.0
STEPS = 200_000


def screen(folder: Path, *words: str, runs: int) -> tuple[float, float]:
    """Return (median wall, median CPU) seconds of one screen in a fresh process."""
    command = [sys.executable, "-m", "tpukit", "top", "--once", *words]
    walls, cpus = [], []
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
        walls.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(walls), statistics.median(cpus)


def record(step: int, dice: random.Random) -> str:
    """Return a line as the trainer writes it."""
    values = {
        "step": step,
        "loss": 2 + dice.random(),
        "grad_norm": dice.random(),
        "learning_rate": 1e-4 * dice.random(),
        "step_time_s": dice.random(),
        "input_stall_s": 1e-4 * dice.random(),
        "tokens_per_s_per_chip": 1e4 * dice.random(),
        "mfu": dice.random(),
        "time": 1.7e9 + step * 0.5,
    }
    return json.dumps(values) + "\n"


def reading(folder: Path, lines: int) -> list[Claim]:
    """Read a long file once, then poll it as a dashboard does."""
    (folder / "run.json").write_text("{}")
    dice = random.Random(0)
    block = [record(step, dice) for step in range(10_000)]
    with (folder / "metrics.jsonl").open("w") as file:
        for begin in range(0, lines, len(block)):
            file.writelines(
                line.replace('"step": ', f'"step": {begin // len(block) + 1}', 1)
                for line in block[: lines - begin]
            )
    run = Run(folder)
    cpu = time.process_time()
    series = run.series("loss")
    once = time.process_time() - cpu
    assert series.total == lines
    assert len(series) <= 1000
    polls, thinned = [], []
    for step in range(20):
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(record(lines + step, dice))
        cpu = time.process_time()
        run.summary()
        polls.append(time.process_time() - cpu)
        cpu = time.process_time()
        assert run.series("mfu").total == lines + step + 1
        thinned.append(time.process_time() - cpu)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    size = f"{lines:.0e}".replace("e+0", "e")
    return [
        Claim(f"{size} lines read once, CPU", once, "s"),
        Claim("the same by line", once / lines * 1e6, "µs"),
        Claim("summary of that run after a new line, CPU", statistics.median(polls) * 1e3, "ms"),
        Claim("new line and a series of 1,000 points, CPU", statistics.median(thinned) * 1e3, "ms"),
        Claim("most memory of the reader", peak, "GiB"),
    ]


def recording(folder: Path) -> Claim:
    """Return what a step pays for its records."""
    ledger = Ledger()
    recorder = AttemptRecorder(folder, process=0, ledger=ledger)
    recorder.start(step=0)
    seconds = {"step_time_s": 0.5, "input_s": 0.001, "input_stall_s": 0.0}
    seconds |= {"checkpoint_s": 0.0, "dispatch_s": 0.0012}
    cpu = time.thread_time()
    for step in range(1, STEPS + 1):
        recorder.stepped(step, **seconds)
    cost = (time.thread_time() - cpu) / STEPS
    recorder.close()
    assert (folder / "hosts" / "0" / "steps.jsonl").read_bytes().count(b"\n") == STEPS
    # Of a step of a tenth of a second, which is short for a chip that is worth watching.
    return Claim("records of a step, CPU", cost * 1e6, "µs", at_most=0.1 * 0.001 * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, default=10_000_000)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        claims = [recording(folder / "recorded")]
        (folder / "empty").mkdir()
        wall, cpu = screen(folder / "empty", runs=options.runs)
        claims += [
            Claim("tpukit top --once, no run", wall, "s", at_most=TOP_S),
            Claim("the same, CPU", cpu, "s", at_most=TOP_S),
        ]
        for hosts in (2, 64):
            run = write_run(folder / f"run-{hosts}", hosts, now=time.time())
            words = (str(run), "--hosts", str(run))
            wall, cpu = screen(folder, *words, runs=options.runs)
            claims += [
                Claim(f"tpukit top --once, a run of {hosts} hosts", wall, "s", at_most=TOP_S),
                Claim("the same, CPU", cpu, "s", at_most=TOP_S),
            ]
        report(*claims)
        (folder / "long").mkdir()
        report(*reading(folder / "long", options.lines))


if __name__ == "__main__":
    main()
