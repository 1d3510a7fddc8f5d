"""The trained model in fewer bits: how small it gets, and what it loses, measured."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from ...hardware import parse_format
from ...hardware.figure import Figure, bytes_text
from ...job.job import Job
from ...quantization import quantize_model
from ...quantization.files.model_files import save_quantized
from ...quantization.plan import SKIP
from ...quantization.report import QuantReport
from ...training.data.opening import open_data
from ...training.trained_model import TrainedModel, load_trained
from ..beside import Beside, measured
from ..scene import Scene
from ..stage import LeftOut
from ..stand_in import config_of
from .preempt import Preempt

FORMAT, BITS = "int8", 8
BATCHES = 8


@dataclass(frozen=True)
class Quantize:
    """A model in eight bits.

    Attributes:
        folder: Where it was written.
        model: The one it was made of.
        parameters: Counted in its arrays.
        file_bytes: Of all files of the small one.
    """

    report: QuantReport
    folder: Path
    model: TrainedModel
    parameters: int
    file_bytes: int

    is_good = True

    @property
    def sentence(self) -> str:
        """How small, and what it lost."""
        kept = self.report.evaluation.retention
        return (
            f"{FORMAT}: {self.report.bits_per_weight:.3g} bits a weight, "
            f"{bytes_text(self.file_bytes)} of files, keeps {kept.value:.2%} of the perplexity "
            f"({kept.low:.2%} to {kept.high:.2%}, measured)"
        )

    def beside(self) -> Sequence[Beside]:
        """Sizes by arithmetic, beside those of the files."""
        rows = [row for row in self.report.matrices if row.format != SKIP]
        weights = sum(row.shape[0] * row.shape[1] for row in rows)
        wide = parse_format(self.model.config.param_dtype).itemsize
        predicted = weights * BITS // 8 + (self.report.parameters - weights) * wide
        counted = self.model.config.parameter_count().total
        return (
            Beside(
                what="parameters",
                predicted=Figure(counted, "", "model", "the model's configuration"),
                predicted_of="any machine",
                measured=measured(self.parameters, "", "arrays of the newest checkpoint"),
                is_comparable=True,
            ),
            Beside(
                what=f"model in {FORMAT}",
                predicted=Figure(predicted, "B", "model", f"{BITS} bits a weight, the rest as is"),
                predicted_of="any machine",
                measured=measured(self.file_bytes, "B", "files of the quantized model"),
                is_comparable=True,
                remark="scales and headers come on top",
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"format": FORMAT, "file_bytes": self.file_bytes, "report": self.report.to_dict()}


class QuantizeStage:
    """Quantizes what the preempted run learnt."""

    name: ClassVar[str] = "quantize"
    question: ClassVar[str] = "How small does the trained model get, and what does it lose?"

    def run(self, scene: Scene) -> Quantize:
        """Quantize, measure on held-out text, and write it."""
        import jax

        run = scene.find(Preempt).run
        if config_of(run.job) is None:
            raise LeftOut(
                "left out: a model of one's own is loaded by its own code; "
                "tpukit.quantization.quantize_model takes it"
            )
        model = load_trained(run.folder)
        result = quantize_model(
            model.config,
            list(_batches(run.job)),
            params=model.params,
            format=FORMAT,
            num_calibration_batches=BATCHES,
            progress=scene.progress,
        )
        folder = scene.folder / "quantized"
        save_quantized(
            result.model, folder, report=result.report, tokenizer=model.tokenizer or "bytes"
        )
        count = sum(leaf.size for leaf in jax.tree.leaves(model.params))
        size = sum(file.stat().st_size for file in folder.iterdir())
        return Quantize(result.report, folder, model, count, size)


def _batches(job: Job) -> Iterator[dict[str, Any]]:
    """Batches of the run's own data, to calibrate with and to measure on."""
    config = config_of(job)
    assert config is not None
    data = open_data(
        job.train.data or "",
        sequence_length=job.tokens_per_example,
        batch_size=job.examples,
        vocab_size=config.vocab_size,
        tokenizer=job.train.tokenizer,
        seed=job.train.seed + 1,
        num_epochs=1,
    )
    with closing(data.stream()) as stream:
        for batch in islice(stream, BATCHES):
            yield {"inputs": batch["inputs"], "targets": batch["targets"]}
