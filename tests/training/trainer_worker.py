"""One process of a training run, for tests that kill it: losses go to the run's metrics.jsonl.

Usage: trainer_worker.py RUN_DIR TOKENS STEPS [NUM_HOSTS HOST_ID ADDRESS]
"""

import contextlib
import sys
import time

from tpukit.runtime.multihost import MultiHostConfig

VOCABULARY = 32


class Slow:
    """Leaves the test some time to send a signal between two steps."""

    def on_start(self, run_dir, identity):
        pass

    def on_record(self, record):
        time.sleep(0.02)

    def on_end(self, result):
        pass


def main():
    run_dir, tokens, steps, *hosts = sys.argv[1:]
    group = contextlib.nullcontext()
    if hosts:
        num_hosts, host_id, address = hosts
        group = MultiHostConfig(int(num_hosts), int(host_id), address, timeout_s=120)
    with group:
        import jax

        from tpukit.job import TrainingSettings
        from tpukit.training import TPUTrainer

        def init(rng):
            return {"table": 0.1 * jax.random.normal(rng, (VOCABULARY, VOCABULARY))}

        def apply(params, batch):
            return params["table"][batch["inputs"]]

        settings = TrainingSettings(learning_rate=0.1, checkpoint_every=3, run_dir=run_dir)
        trainer = TPUTrainer(
            model=(init, apply), use_bf16=False, settings=settings, hooks=[Slow()], progress=False
        )
        result = trainer.train(tokens, int(steps), batch_size=8, sequence_length=16)
        sys.stdout.write(f"{result.stopped} {result.steps}\n")


if __name__ == "__main__":
    main()
