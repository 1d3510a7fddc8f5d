"""Quantize the trained model, and generate text with both."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import ClassVar

from ...hardware import parse_format
from ...hardware.figure import Figure, bytes_text, seconds_text
from ...job.job import Job
from ...models.generation import Generation, Generator, Sampling, TextPart, stream_text
from ...plain_data import JsonObject
from ...quantization import quantize_model
from ...quantization.files.model_files import save_quantized
from ...quantization.plan import SKIP
from ...quantization.report import QuantReport
from ...training.data.opening import open_data
from ...training.data.tokenizer import load_tokenizer
from ...training.trained_model import TrainedModel, load_trained
from ..stage import Beside, LeftOut, Scene, StageResult, measured
from ..stand_in import config_of
from .preempt import Preempt

FORMAT, BITS = "int8", 8
BATCHES = 8


@dataclass(frozen=True)
class Quantize(StageResult):
    """A quantized model.

    Attributes:
        folder: Its folder.
        model: The model it was made from.
        parameters: Number of parameters in its arrays.
        file_bytes: Bytes of its files.
    """

    report: QuantReport
    folder: Path
    model: TrainedModel
    parameters: int
    file_bytes: int
    format = FORMAT
    _facts = "format file_bytes report"

    @property
    def sentence(self) -> str:
        """Its size and its loss in quality."""
        kept = self.report.evaluation.retention
        return (
            f"{FORMAT}: {self.report.bits_per_weight:.3g} bits a weight, "
            f"{bytes_text(self.file_bytes)} of files, keeps {kept.value:.2%} of the perplexity "
            f"({kept.low:.2%} to {kept.high:.2%}, measured)"
        )

    def beside(self) -> Sequence[Beside]:
        """Return predicted sizes beside those of the files."""
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
                remark="scales and headers are extra",
            ),
        )


class QuantizeStage:
    """Quantizes the model of the preempted run."""

    name: ClassVar[str] = "quantize"
    question: ClassVar[str] = "How small does the trained model get, and what does it lose?"

    def run(self, scene: Scene) -> Quantize:
        """Quantize the model, measure it on held-out text, and write it."""
        import jax

        run = scene.find(Preempt).run
        if config_of(run.job) is None:
            raise LeftOut(
                "left out: a user's own model is loaded by its own code; "
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


def _batches(job: Job) -> Iterator[JsonObject]:
    """Return batches of the run's data, to calibrate and to measure."""
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


PROMPT = "def "
NEW_TOKENS = 48
_SHOWN = 40


@dataclass(frozen=True)
class Generate(StageResult):
    """The texts of both models for one prompt."""

    prompt: str
    trained: TextPart
    quantized: TextPart

    @property
    def sentence(self) -> str:
        """The quantized model's text and speed."""
        said = self.quantized.text[:_SHOWN]
        return (
            f"{self.prompt!r} goes on as {said!r}; {_speed(self.trained.generation)} as trained, "
            f"{_speed(self.quantized.generation)} in {FORMAT} (measured on this CPU)"
        )

    def to_dict(self) -> JsonObject:
        """Return the result as plain data."""
        return {
            "prompt": self.prompt,
            "trained": {"text": self.trained.text, **self.trained.generation.to_dict()},
            "quantized": {"text": self.quantized.text, **self.quantized.generation.to_dict()},
        }


class GenerateStage:
    """Generates text with both models."""

    name: ClassVar[str] = "generate"
    question: ClassVar[str] = "What does it generate?"

    def run(self, scene: Scene) -> Generate:
        """Continue the prompt greedily, so that the texts can be compared."""
        small = scene.find(Quantize)
        scene.progress("as trained")
        trained = _continue(small.model)
        scene.progress(f"in {FORMAT}")
        return Generate(PROMPT, trained, _continue(load_trained(small.folder)))


def _continue(model: TrainedModel) -> TextPart:
    words = load_tokenizer(model.tokenizer or "bytes")
    start = [int(token) for token in words.encode_batch([PROMPT])[0]]
    generator = Generator(model.config, model.params)
    parts: list[TextPart] = []
    for _ in range(2):  # the first tokens include one-time set-up
        parts += stream_text(
            generator,
            words,
            start,
            max_new_tokens=min(NEW_TOKENS, model.config.max_seq_len - len(start)),
            sampling=Sampling(temperature=0.0),
        )
    return parts[-1]


def _speed(generation: Generation) -> str:
    step = generation.step_time_s
    return "one token" if step is None else f"{seconds_text(step)} a token"
