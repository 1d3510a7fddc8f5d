"""What the model says: as it was trained, and quantized, from the same prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...hardware.figure import seconds_text
from ...models.generation import Generation, Generator, Sampling, TextPart, stream_text
from ...training.data.tokenizer import load_tokenizer
from ...training.trained_model import TrainedModel, load_trained
from ..beside import Beside
from ..scene import Scene
from .quantize import FORMAT, Quantize

PROMPT = "def "
NEW_TOKENS = 48
_SHOWN = 40


@dataclass(frozen=True)
class Generate:
    """Two texts that continue one prompt."""

    prompt: str
    trained: TextPart
    quantized: TextPart

    is_good = True

    @property
    def sentence(self) -> str:
        """What the small model says, and how fast."""
        said = self.quantized.text[:_SHOWN]
        return (
            f"{self.prompt!r} goes on as {said!r}; {_speed(self.trained.generation)} as trained, "
            f"{_speed(self.quantized.generation)} in {FORMAT} (measured on this CPU)"
        )

    def beside(self) -> Sequence[Beside]:
        """No speed was predicted for this machine."""
        return ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "prompt": self.prompt,
            "trained": {"text": self.trained.text, **self.trained.generation.to_dict()},
            "quantized": {"text": self.quantized.text, **self.quantized.generation.to_dict()},
        }


class GenerateStage:
    """Lets both models speak."""

    name: ClassVar[str] = "generate"
    question: ClassVar[str] = "What does it say?"

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
    for _ in range(2):  # the first time some tokens wait for what is set up once
        parts += stream_text(
            generator,
            words,
            start,
            max_new_tokens=min(NEW_TOKENS, model.config.max_seq_len - len(start)),
            sampling=Sampling(temperature=0.0),
        )
    return parts[-1]


def _speed(found: Generation) -> str:
    step = found.step_time_s
    return "one token" if step is None else f"{seconds_text(step)} a token"
