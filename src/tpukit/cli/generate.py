"""`tpukit generate`: text from a run's newest checkpoint, or from a Hugging Face folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import TPUValidationError
from ..exit_codes import ExitCode
from ..runtime.ranges import COUNT, PART, SEED, SHARE, WEIGHT
from ..shown import Facts, Shown
from . import job_options as options
from .export import Step
from .values import within

if TYPE_CHECKING:
    from pathlib import Path

    from jax.sharding import Mesh

    from ..models.generation import CacheSpec, Generation, Sampling, TextPart
    from ..training.data.tokenizer import Tokenizer
    from ..training.trained_model import TrainedModel


Source = Annotated[str, typer.Argument(help="A run directory, a checkpoint, or a HF folder.")]
Prompt = Annotated[str, typer.Option(help="Text to continue.")]
TokenizerName = Annotated[str | None, typer.Option(help="'bytes', or a tokenizer.json file.")]
NewTokens = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of new tokens. [default: 200, or as many as the "
        "model's context allows]",
        callback=within(COUNT),
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        help="Sampling temperature; 0 always takes the likeliest token.", callback=within(WEIGHT)
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        help="Sample only from this many of the likeliest tokens.", callback=within(COUNT)
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample only from the likeliest tokens with this total probability.",
        callback=within(SHARE),
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="Text that ends the generation and is not printed; repeatable."),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat", help="Treat the prompt as a chat message and apply the folder's chat template."
    ),
]
System = Annotated[str | None, typer.Option(help="With --chat: the system message.")]
Kv = Annotated[
    str | None,
    typer.Option(
        help="Format of the KV cache: bf16, fp8, int8, int4, or a folder from `quantize --kv`."
    ),
]
KvTarget = Annotated[
    float,
    typer.Option(
        help="With --kv: minimum share of tokens that equal those of a bf16 "
        "cache; 0 skips the comparison.",
        callback=within(PART),
    ),
]
Seed = Annotated[
    int, typer.Option(help="Random seed; equal seeds give equal texts.", callback=within(SEED))
]

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
    """Continue a prompt; the text is printed to standard output as it is generated.

    With --kv, exit 1 if too many tokens differ from those of a full cache.
    """
    if system is not None and not chat:
        raise TPUValidationError("--system is part of a conversation; add --chat.")
    from ..runtime.environment import configure_tpu_environment

    configure_tpu_environment()
    from ..models.generation import Generator, Sampling, stream_text
    from ..training.trained_model import load_trained
    from .output import show

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    model = load_trained(source, step=step, mesh=_mesh(mesh))
    words = _tokenizer(model, tokenizer)
    asked = _conversation(tokenizer or model.tokenizer, prompt, system) if chat else prompt
    start = _encoded(asked, words, model, chat=chat)
    wanted = max_new_tokens or min(DEFAULT_NEW_TOKENS, model.config.max_seq_len - len(start))
    spec = None if kv is None else cache_spec(kv, model)
    generator = Generator(model.config, model.params, kv=spec)
    # Only when there is text, because an error would otherwise follow half a sentence.
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
        raise typer.Exit(ExitCode.FAILED)


@dataclass(frozen=True, kw_only=True)
class GeneratedText(Shown):
    """A prompt, its continuation, and their source."""

    prompt: str
    part: "TextPart"
    model: "TrainedModel"
    cache: "CacheUse | None" = None
    _facts = (
        "prompt text=part.text stop=part.stop model=model.config.name source=model.source "
        "step=model.step kv=cache **part.generation"
    )

    def headline(self) -> str:
        """One line on model and speed, and one on the cache."""
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
    """Return the mesh that was typed, or one with the first device."""
    import jax

    from ..parallel import create_mesh

    if text is not None:
        return options.mesh_here(text)
    return create_mesh(mesh_shape=(1,), axis_names=("tensor",), devices=jax.devices()[:1])


def _conversation(tokenizer: str | None, prompt: str, system: str | None) -> str:
    """Return the prompt in the chat template of the tokenizer's folder."""
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
    """Return every token that ends a text, from the model's files or the given tokenizer."""
    from ..models.huggingface.config import read_generation_config
    from ..training.data.tokenizer import text_ends

    if given is None:
        return text_ends(words, model.generation)
    folder = _folder_of(given)
    return text_ends(words, {} if folder is None else read_generation_config(folder))


def _folder_of(tokenizer: str | None) -> "Path | None":
    """Return the folder of a tokenizer; None for bytes."""
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
    """Return the prompt's tokens, with begin-of-document tokens unless a chat template has them."""
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


@dataclass(frozen=True, kw_only=True)
class CacheUse(Facts):
    """The effect of a narrow cache on one text (origin: measured).

    Attributes:
        format: Format of the cache.
        bits: Bits per value, at the length of this text.
        kept: Share of tokens that a full cache would have chosen too, with the same seed; None if
            not measured.
        target: Required share.
    """

    format: str
    bits: float
    kept: float | None
    target: float
    _facts = "format bits choices_kept=kept target reached"

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached; None if not measured."""
        return None if self.kept is None else self.kept >= self.target

    def line(self) -> str:
        """One sentence on the cache."""
        about = f"KV cache in {self.format} ({self.bits:.2f} bits a value): "
        if self.kept is None:
            return about + "what it changed was not measured"
        said = "yes" if self.reached else "no"
        return about + (
            f"{said}, {self.kept:.1%} of the tokens are those that a full cache would have chosen "
            f"after the same text (measured; asked for is {self.target:.0%})"
        )


def cache_spec(name: str, model: "TrainedModel") -> "CacheSpec":
    """Return the cache of a format, or of a folder from `tpukit quantize --kv … -o`."""
    from ..models.generation import CacheSpec
    from ..quantization.cache.codebooks import is_cache_folder, load_cache

    folder = Path(name).expanduser()
    return load_cache(folder, model.config) if is_cache_folder(folder) else CacheSpec.of(name)


def measure_use(
    model: "TrainedModel",
    spec: "CacheSpec",
    prompt: Sequence[int],
    found: "Generation",
    sampling: "Sampling",
    target: float,
) -> CacheUse:
    """Score the text with a full cache; a target of 0 measures nothing."""
    from ..models.generation import Generator
    from ..quantization.cache.retention import cache_bits, share_kept

    kept = None
    if target > 0:
        full = Generator(model.config, model.params)
        kept = share_kept(full, [prompt], found, sampling)
    length = len(prompt) + len(found.tokens[0])
    bits = cache_bits(model.config, spec.format, length)
    return CacheUse(format=spec.format.name, bits=bits, kept=kept, target=target)
