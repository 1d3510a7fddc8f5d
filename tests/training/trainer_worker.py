"""One process of a training run, for tests that kill it: losses go to the run's metrics.jsonl.

Usage: trainer_worker.py RUN_DIR TOKENS STEPS [NUM_HOSTS HOST_ID ADDRESS]

STORAGE_FAILS=full:4:8 fills the disk of RUN_DIR between these steps; readonly:4:8 makes its
checkpoints a folder that cannot be written. Both need a mount namespace of their own.
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import typer

from tpukit.runtime.multihost import MultiHostConfig

VOCABULARY = 32


class Slow:
    """Leaves the test some time to send a signal between two steps."""

    def on_start(self, run_dir, identity):
        pass

    def on_record(self, record):
        time.sleep(float(os.environ.get("SLOW_S", "0.02")))

    def on_end(self, result):
        pass


class FailingStorage:
    """Makes the storage fail between two steps."""

    def __init__(self, how, first, last):
        self.how, self.first, self.last = how, int(first), int(last)

    def on_start(self, run_dir, identity):
        self.ballast, self.checkpoints = run_dir / "ballast", run_dir / "checkpoints"

    def on_record(self, record):
        if record["step"] == self.first:
            self.await_save()
            self.fill() if self.how == "full" else self.protect()
        elif record["step"] == self.last:
            self.ballast.unlink() if self.how == "full" else self.run("umount", self.checkpoints)

    def on_end(self, result):
        pass

    def await_save(self):
        deadline = time.monotonic() + 60
        while not list(self.checkpoints.glob("*/tpukit/*.json")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)  # the other processes' records

    def fill(self):
        with contextlib.suppress(OSError), self.ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))

    def protect(self):
        self.run("mount", "--bind", self.checkpoints, self.checkpoints)
        self.run("mount", "-o", "remount,ro,bind", self.checkpoints)

    def run(self, *words):
        subprocess.run(words, check=True)


def main():
    run_dir, tokens, steps, *hosts = sys.argv[1:]
    group = contextlib.nullcontext()
    if hosts:
        num_hosts, host_id, address = hosts
        group = MultiHostConfig(int(num_hosts), int(host_id), address, timeout_s=120)
    failures = contextlib.nullcontext()
    if "STORAGE_FAILS" in os.environ:
        from tpukit.cli.train import _failures_as_exit_codes

        failures = _failures_as_exit_codes(bool(hosts))
    with group, failures:
        import jax

        from tpukit.job import TrainingSettings
        from tpukit.training import TPUTrainer

        def init(rng):
            return {"table": 0.1 * jax.random.normal(rng, (VOCABULARY, VOCABULARY))}

        def apply(params, batch):
            return params["table"][batch["inputs"]]

        settings = TrainingSettings(
            learning_rate=0.1,
            checkpoint_every=3,
            run_dir=run_dir,
            save_patience_s=float(os.environ.get("PATIENCE_S", "600")),
        )
        hooks = [Slow()]
        if (trouble := os.environ.get("STORAGE_FAILS")) and jax.process_index() == 0:
            hooks.append(FailingStorage(*trouble.split(":")))
        trainer = TPUTrainer(
            model=(init, apply), use_bf16=False, settings=settings, hooks=hooks, progress=False
        )
        result = trainer.train(tokens, int(steps), batch_size=8, sequence_length=16)
        sys.stdout.write(f"{result.stopped} {result.steps} {sorted(result.failed_saves)}\n")
        if jax.process_index() == 0 and "://" not in run_dir:
            kept = sorted(int(path.name) for path in Path(run_dir, "checkpoints").glob("[0-9]*"))
            sys.stdout.write(f"kept {kept}\n{Path(run_dir, 'metrics.jsonl').read_text()}")
            sys.stdout.write(Path(run_dir, "train.log").read_text())


if __name__ == "__main__":
    try:
        main()
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
