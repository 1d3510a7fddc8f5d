"""One process of a run on several hosts, one of which is slow at its input.

Usage: slow_host_process.py RUN_DIR TOKENS STEPS HOSTS HOST ADDRESS SLOW_HOST SECONDS
"""

import sys
import time

from tpukit.runtime.multihost import MultiHostConfig

VOCABULARY = 32


def main():
    run_dir, tokens, steps, hosts, host, address, slow_host, seconds = sys.argv[1:]
    with MultiHostConfig(int(hosts), int(host), address, timeout_s=120):
        import jax

        from tpukit.job import TrainingSettings
        from tpukit.training import TPUTrainer
        from tpukit.training.batches import BatchSource

        if host == slow_host:
            draw = BatchSource.draw

            def draw_slowly(source):
                time.sleep(float(seconds))
                return draw(source)

            BatchSource.draw = draw_slowly

        def init(rng):
            return {"table": 0.1 * jax.random.normal(rng, (VOCABULARY, VOCABULARY))}

        def apply(params, batch):
            return params["table"][batch["inputs"]]

        settings = TrainingSettings(learning_rate=0.1, checkpoint_every=0, run_dir=run_dir)
        trainer = TPUTrainer(model=(init, apply), use_bf16=False, settings=settings, progress=False)
        trainer.train(tokens, int(steps), batch_size=8, sequence_length=16)


if __name__ == "__main__":
    main()
