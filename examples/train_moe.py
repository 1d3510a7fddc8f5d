"""Train a mixture of experts on the text that ships with Python, and see that all experts work.

python examples/train_moe.py [--steps 150] [--out runs/moe]
"""

import argparse
from collections import Counter
from math import log
from pathlib import Path
from pydoc_data.topics import topics

import tpukit
from tpukit.job import TrainingSettings
from tpukit.models import get_preset
from tpukit.records import read_metrics
from tpukit.training import TPUTrainer


def main() -> None:
    """Train and report."""
    tpukit.configure_tpu_environment()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("runs/moe"))
    options = parser.parse_args()
    text = "\n".join(topics[name] for name in sorted(topics))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "text.txt").write_text(text)
    counts = Counter(text.encode())
    total = counts.total()
    unigram = -sum(n / total * log(n / total) for n in counts.values())

    model = get_preset("tiny-moe", vocab_size=257)
    size = model.parameter_count()
    trainer = TPUTrainer(
        model=model,
        use_bf16=False,
        run_dir=options.out / "run",
        settings=TrainingSettings(tokenizer="bytes", learning_rate=5e-3, warmup_steps=10),
    )
    result = trainer.train(
        options.out / "text.txt", options.steps, batch_size=16, sequence_length=64
    )
    last = list(read_metrics(options.out / "run" / "metrics.jsonl"))[-1]
    print(f"parameters               {size.total:,}, of which a token uses {size.active:,}")
    print(f"entropy of single bytes  {unigram:.3f} nats")
    print(f"loss                     {result.losses[-1]:.3f} nats after {result.steps} steps")
    print(f"busiest expert           {last['router_imbalance']:.2f} x the mean (1 is even)")


if __name__ == "__main__":
    main()
