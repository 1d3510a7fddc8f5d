"""Our side: `TPUTrainer` as a user calls it for a long run, with its products timed first."""

import json
import sys
import tempfile

import jax
import numpy as np
from initial_weights import config_of
from shapes import SEQUENCE, SHAPES

from tpukit.job.train import TrainingSettings
from tpukit.training import TPUTrainer


def main(name, tokens_path, warm):
    s = SHAPES[name]
    config = config_of(name)
    data = np.load(tokens_path).astype(np.int32)

    def batches():
        for rows in data:
            yield {"inputs": rows[:, :-1], "targets": rows[:, 1:]}

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingSettings(
            learning_rate=3e-4,
            schedule="constant",
            warmup_steps=0,
            weight_decay=0.1,
            no_decay=(),  # as in the other programs
            clip_norm=None,
            run_dir=folder + "/run",
            checkpoint_every=0,
            tune_products=True,
        )
        options = {"remat": "minimal" if s.experts else "none"}
        options["grad_norm"] = False  # the other programs measure none
        trainer = TPUTrainer(model=config, settings=settings, progress=False, **options)
        result = trainer.train(
            batches, num_steps=len(data), batch_size=s.batch, sequence_length=SEQUENCE
        )
        step_s = float(np.mean(result.step_times_s[warm:]))
    peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    report = {
        "step_s": step_s,
        "peak_bytes": peak,
        "losses": [float(x) for x in result.losses],
        "compile_s": result.compile_s,
        "goodput": str(result.goodput),
    }
    print("REPORT " + json.dumps(report))


main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
