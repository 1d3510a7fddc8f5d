"""`tpukit generate`: text from a run's newest checkpoint, or from a Hugging Face folder."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import TPUValidationError
from ..runtime.ranges import COUNT, SEED, SHARE, WEIGHT
from . import job_options as options
from .export import Step
from .values import within

if TYPE_CHECKING:
    from ..models.generation import Generation
    from ..training.data.tokenizer import Tokenizer
    from ..training.trained_model import TrainedModel

Source = Annotated[str, typer.Argument(help="A run directory, a checkpoint, or a HF folder.")]
Prompt = Annotated[str, typer.Option(help="What to continue.")]
TokenizerName = Annotated[str | None, typer.Option(help="bytes, or a tokenizer.json.")]
NewTokens = Annotated[
    int | None,
    typer.Option(help="At most; 200, or what the model takes.", callback=within(COUNT)),
]
Temperature = Annotated[
    float, typer.Option(help="0 takes the likeliest token.", callback=within(WEIGHT))
]
TopK = Annotated[
    int | None, typer.Option(help="Draw from so many of the likeliest.", callback=within(COUNT))
]
TopP = Annotated[
    float | None,
    typer.Option(help="Draw from this share of the probability.", callback=within(SHARE)),
]
Seed = Annotated[int, typer.Option(help="The same gives the same text.", callback=within(SEED))]

DEFAULT_NEW_TOKENS = 200


def generate(
    source: Source,
    prompt: Prompt = "",
    tokenizer: TokenizerName = None,
    max_new_tokens: NewTokens = None,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = 0,
    step: Step = None,
    json: options.Json = False,
) -> None:
    """Continue a prompt; the text goes to standard output as it is made."""
    from ..runtime.environment import configure_tpu_environment

    configure_tpu_environment()
    from ..models.generation import Generator, Sampling
    from ..training.trained_model import load_trained
    from .output import show

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    model = load_trained(source, step=step)
    words = _tokenizer(model, tokenizer)
    start = _encoded(prompt, words, model)
    end = words.end_of_document
    wanted = max_new_tokens or min(DEFAULT_NEW_TOKENS, model.config.max_seq_len - len(start))
    text = _Text(words, prompt, silent=json)
    last = None
    for last in Generator(model.config, model.params).stream(
        [start], max_new_tokens=wanted, sampling=sampling, eos=end
    ):
        text.show(last.tokens[0])
    if last is not None:
        text.finish(last.tokens[0])
        generated = GeneratedText(prompt=prompt, text=text.shown, model=model, generation=last)
        if json:
            show(generated, json=True)
        else:
            typer.echo(generated.headline(), err=True)


@dataclass(frozen=True, kw_only=True)
class GeneratedText:
    """A prompt, its continuation, and where it comes from."""

    prompt: str
    text: str
    model: "TrainedModel"
    generation: "Generation"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "prompt": self.prompt,
            "text": self.text,
            "model": self.model.config.name,
            "source": self.model.source,
            "step": self.model.step,
            **self.generation.to_dict(),
        }

    def headline(self) -> str:
        """One line about model and speed."""
        about, found = self.model, self.generation
        at = "" if about.step is None else f" at step {about.step}"
        step = found.step_time_s
        speed = "" if step is None else f", {1 / step:,.0f} tokens/s"
        return (
            f"{about.config.name}{at}: {len(found.tokens[0])} tokens, prompt read in "
            f"{found.prompt_s * 1e3:,.0f} ms{speed} (measured, after {found.compile_s:.1f} s of "
            "compiling)"
        )

    def __rich__(self) -> str:
        return f"{self.prompt}{self.text}"


class _Text:
    """Writes text as it grows, holding back a character whose bytes have not all come yet."""

    def __init__(self, tokenizer: "Tokenizer", prompt: str, *, silent: bool) -> None:
        self._tokenizer, self._silent, self.shown = tokenizer, silent, ""
        self._prompt = prompt

    def show(self, tokens: tuple[int, ...]) -> None:
        """Write what is new and certain."""
        text = self._tokenizer.decode(tokens)
        if not text.endswith("�"):
            self._add(text)

    def finish(self, tokens: tuple[int, ...]) -> None:
        """Write the rest as it is."""
        self._add(self._tokenizer.decode(tokens))
        self._write("\n")

    def _add(self, text: str) -> None:
        # Not before there is something to add: an error would stand beside half a sentence.
        self._write(self._prompt + text[len(self.shown) :])
        self._prompt = ""
        self.shown = text

    def _write(self, text: str) -> None:
        if not self._silent:
            typer.echo(text, nl=False)


def _tokenizer(model: "TrainedModel", given: str | None) -> "Tokenizer":
    from ..training.data.tokenizer import load_tokenizer

    if given is None and model.tokenizer is None and model.step is None:
        raise TPUValidationError(
            f"{model.source} holds no tokenizer.json; give --tokenizer bytes, or the path of one."
        )
    return load_tokenizer(given or model.tokenizer or "bytes")


def _encoded(prompt: str, tokenizer: "Tokenizer", model: "TrainedModel") -> list[int]:
    """The prompt's tokens; without one, a document begins where the last one ended."""
    tokens = [int(token) for token in tokenizer.encode_batch([prompt])[0]]
    end = tokenizer.end_of_document
    if not tokens and end is not None and end < model.config.vocab_size:
        tokens = [end]
    if not tokens:
        raise TPUValidationError(
            "there is nothing to continue, and the model knows no token that begins a document; "
            'give --prompt "…".'
        )
    return tokens
