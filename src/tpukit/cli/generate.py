"""`tpukit generate`: text from a run's newest checkpoint, or from a Hugging Face folder."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import TPUValidationError
from ..runtime.ranges import COUNT, PART, SEED, SHARE, WEIGHT
from ..shown import Shown
from . import job_options as options
from .export import Step
from .values import within

if TYPE_CHECKING:
    from pathlib import Path

    from jax.sharding import Mesh

    from ..models.generation import TextPart
    from ..training.data.tokenizer import Tokenizer
    from ..training.trained_model import TrainedModel
    from .generate_cache import CacheUse

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
Stop = Annotated[
    list[str] | None, typer.Option(help="A word that ends the text, and is left out; repeat.")
]
Chat = Annotated[
    bool, typer.Option("--chat", help="The prompt is a message: use the folder's chat template.")
]
System = Annotated[str | None, typer.Option(help="With --chat: what stands before the message.")]
Kv = Annotated[
    str | None,
    typer.Option(help="The cache in bf16, fp8, int8, int4, or a folder of `quantize --kv`."),
]
KvTarget = Annotated[
    float,
    typer.Option(
        help="With --kv: share of tokens that a full cache must choose too; 0 measures nothing.",
        callback=within(PART),
    ),
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
    stop: Stop = None,
    chat: Chat = False,
    system: System = None,
    mesh: options.Mesh = None,
    kv: Kv = None,
    kv_target: KvTarget = 0.95,
    step: Step = None,
    json: options.Json = False,
) -> None:
    """Continue a prompt; the text goes to standard output as it is made.

    With --kv, exit 1 where too many tokens are not those of a full cache.
    """
    if system is not None and not chat:
        raise TPUValidationError("--system is part of a conversation; add --chat.")
    from ..runtime.environment import configure_tpu_environment

    configure_tpu_environment()
    from ..models.generation import Generator, Sampling, stream_text
    from ..training.trained_model import load_trained
    from .generate_cache import cache_spec, measure_use
    from .output import show

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    model = load_trained(source, step=step, mesh=_mesh(mesh))
    words = _tokenizer(model, tokenizer)
    asked = _conversation(tokenizer or model.tokenizer, prompt, system) if chat else prompt
    start = _encoded(asked, words, model, chat=chat)
    wanted = max_new_tokens or min(DEFAULT_NEW_TOKENS, model.config.max_seq_len - len(start))
    spec = None if kv is None else cache_spec(kv, model)
    generator = Generator(model.config, model.params, kv=spec)
    # Not before there is something to add: an error would stand beside half a sentence.
    unsaid, last = "" if chat else prompt, None
    for last in stream_text(
        generator,
        words,
        start,
        stop=stop or (),
        max_new_tokens=wanted,
        sampling=sampling,
        eos=_ends(tokenizer, words, model),
    ):
        if not json:
            typer.echo(unsaid + last.new, nl=False)
        unsaid = ""
    if last is None:
        return
    use = None
    if spec is not None:
        use = measure_use(model, spec, start, last.generation, sampling, kv_target)
    generated = GeneratedText(prompt=asked, part=last, model=model, cache=use)
    if json:
        show(generated, json=True)
    else:
        typer.echo("")
        typer.echo(generated.headline(), err=True)
    if use is not None and use.reached is False:
        raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class GeneratedText(Shown):
    """A prompt, its continuation, and where it comes from."""

    prompt: str
    part: "TextPart"
    model: "TrainedModel"
    cache: "CacheUse | None" = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "prompt": self.prompt,
            "text": self.part.text,
            "stop": self.part.stop,
            "model": self.model.config.name,
            "source": self.model.source,
            "step": self.model.step,
            "kv": None if self.cache is None else self.cache.to_dict(),
            **self.part.generation.to_dict(),
        }

    def headline(self) -> str:
        """A line about model and speed, and one about the cache."""
        about, found = self.model, self.part.generation
        at = "" if about.step is None else f" at step {about.step}"
        step = found.step_time_s
        speed = "" if step is None else f", {1 / step:,.0f} tokens/s"
        cache = "" if self.cache is None else f"\n{self.cache.line()}"
        return (
            f"{about.config.name}{at}: {len(found.tokens[0])} tokens, prompt read in "
            f"{found.prompt_s * 1e3:,.0f} ms{speed} (measured, after {found.compile_s:.1f} s of "
            f"compiling){cache}"
        )

    def __rich__(self) -> str:
        return f"{self.prompt}{self.part.text}"


def _mesh(text: str | None) -> "Mesh":
    """The devices to use: those of a mesh that was typed, or the first."""
    import jax

    from ..parallel import create_mesh

    if text is not None:
        return options.mesh_here(text)
    return create_mesh(mesh_shape=(1,), axis_names=("tensor",), devices=jax.devices()[:1])


def _conversation(tokenizer: str | None, prompt: str, system: str | None) -> str:
    """The text that asks a model for an answer, by the template beside its tokenizer."""
    from ..models.huggingface.chat import load_chat_template

    said = [] if system is None else [{"role": "system", "content": system}]
    folder = _folder_of(tokenizer)
    if folder is None:
        raise TPUValidationError(
            "--chat needs the template that stands beside a tokenizer.json, and this model has "
            "none; give --tokenizer FOLDER, or leave --chat out."
        )
    return load_chat_template(folder).render([*said, {"role": "user", "content": prompt}])


def _ends(given: str | None, words: "Tokenizer", model: "TrainedModel") -> list[int]:
    """Every token that ends a text, by the model's files or those of a tokenizer that was given."""
    from ..models.huggingface.generation_config import read_generation_config
    from ..training.data.tokenizer_files import text_ends

    if given is None:
        return text_ends(words, model.generation)
    folder = _folder_of(given)
    return text_ends(words, {} if folder is None else read_generation_config(folder))


def _folder_of(tokenizer: str | None) -> "Path | None":
    """The folder that a tokenizer was read from; None for bytes."""
    from pathlib import Path

    if tokenizer is None or tokenizer == "bytes":
        return None
    path = Path(tokenizer).expanduser()
    return path if path.is_dir() else path.parent


def _tokenizer(model: "TrainedModel", given: str | None) -> "Tokenizer":
    from ..training.data.tokenizer import load_tokenizer

    if given is None and model.tokenizer is None and model.step is None:
        raise TPUValidationError(
            f"{model.source} holds no tokenizer.json; give --tokenizer bytes, or the path of one."
        )
    return load_tokenizer(given or model.tokenizer or "bytes")


def _encoded(
    prompt: str, tokenizer: "Tokenizer", model: "TrainedModel", *, chat: bool
) -> list[int]:
    """The prompt's tokens after those that begin a document; a chat template writes its own."""
    from ..training.data.tokenizer import start_of_document

    tokens = [int(token) for token in tokenizer.encode_batch([prompt])[0]]
    if not chat:
        tokens = [*start_of_document(tokenizer), *tokens]
    end = tokenizer.end_of_document
    if not tokens and end is not None and end < model.config.vocab_size:
        tokens = [end]  # a document begins where the last one ended
    if not tokens:
        raise TPUValidationError(
            "there is nothing to continue, and the model knows no token that begins a document; "
            'give --prompt "…".'
        )
    return tokens
