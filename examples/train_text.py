"""Train a small language model on the text that ships with Python, plot it, let it write.

    python examples/train_text.py [--steps 250] [--out runs/text]

The text is Python's own help (`pydoc_data.topics`). A step takes 0.4 CPU-seconds (measured).
"""

import argparse
from collections import Counter
from math import log
from pathlib import Path
from pydoc_data.topics import topics

import tpukit
from tpukit.job import TrainingSettings
from tpukit.models import TransformerConfig
from tpukit.models.generation import generate
from tpukit.training import TPUTrainer

MODEL = TransformerConfig(
    name="pocket", n_layers=3, d_model=128, d_ff=352, n_heads=4, vocab_size=257, max_seq_len=512
)
PROMPT = "The following "


def write_text(folder: Path) -> tuple[Path, Path, float]:
    """Text to learn from and to be tested on, and the entropy of a byte whose past is unknown."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    cut = int(0.95 * len(text))
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "train.txt", folder / "test.txt"
    for file, part in zip(files, (text[:cut], text[cut:]), strict=True):
        file.write_text(part.decode(errors="ignore"))
    counts = Counter(text)
    return *files, -sum(n / len(text) * log(n / len(text)) for n in counts.values())


def plot(losses: list[float], test_loss: float, unigram: float, stem: Path) -> None:
    """Loss against step, beside what is known without learning: as PNG and as HTML."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="#3366cc", lw=1.2)
    right = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    for value, name, colour, up in (
        (log(257), "uniform over 257 tokens", "#999999", 4),
        (unigram, "entropy of single bytes", "#cc6633", 4),
        (test_loss, f"held-out text after training: {test_loss:.2f}", "#228833", -11),
    ):
        axes.axhline(value, color=colour, ls="--", lw=1)
        axes.annotate(name, (0.99, value), **right, xytext=(0, up), ha="right", color=colour)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", xlim=(0, len(losses)))
    axes.set_ylim(bottom=0)
    axes.set_title("A small transformer learns Python's help texts", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(stem.with_suffix(".png"), dpi=150)
    figure.savefig(stem.with_suffix(".svg"))
    drawing = stem.with_suffix(".svg").read_text()
    page = f"<!doctype html><title>loss</title><body>{drawing[drawing.index('<svg') :]}</body>"
    stem.with_suffix(".html").write_text(page)
    stem.with_suffix(".svg").unlink()


def main() -> None:
    """Train, plot, sample."""
    tpukit.configure_tpu_environment()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--out", type=Path, default=Path("runs/text"))
    options = parser.parse_args()
    train_file, test_file, unigram = write_text(options.out)
    trainer = TPUTrainer(
        model=MODEL,
        use_bf16=False,
        run_dir=options.out / "run",
        settings=TrainingSettings(
            tokenizer="bytes", learning_rate=3e-3, warmup_steps=20, log_every=10
        ),
    )
    result = trainer.train(
        train_file, options.steps, batch_size=16, sequence_length=128, eval_data=test_file
    )
    test_loss = result.evaluations[-1].loss
    plot(list(result.losses), test_loss, unigram, options.out / "loss")
    print(f"entropy of single bytes  {unigram:.3f} nats")
    print(f"loss on held-out text    {test_loss:.3f} nats after {result.steps} steps")
    print(f"plot                     {options.out / 'loss.png'} and .html")
    found = generate(
        trainer.workload,
        trainer.state.params,
        [list(PROMPT.encode())],
        max_new_tokens=200,
        temperature=0.7,
    )
    written = bytes(token for token in found.tokens[0] if token < 256).decode(errors="replace")
    print(f"sample:\n{PROMPT}{written}")


if __name__ == "__main__":
    main()
