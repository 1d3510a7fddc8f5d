"""`tpukit quantize`: convert a checkpoint to fewer bits, and measure the loss."""

from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ..errors import TPUValidationError
from ..exit_codes import ExitCode
from ..models.defaults import SERVING_CONTEXT
from ..runtime.ranges import COUNT, INDEX, SEED, SHARE, Range
from . import job_options as options
from .export import Step
from .values import output_file, output_folder, refuse, refuse_all_but, within

if TYPE_CHECKING:
    from ..quantization import QuantizationResult
    from ..training.trained_model import TrainedModel


BITS = Range(1, 16)
Source = Annotated[str, typer.Argument(help="A run directory, a checkpoint, or a HF folder.")]
Calibration = Annotated[
    str | None,
    typer.Option(help="Text or tokens for calibration, as for `tpukit train`, such as data.jsonl."),
]
Target = Annotated[
    float | None,
    typer.Option(
        "--target-retention",
        help="Minimum retained perplexity, such as 0.98, with confidence; finds "
        "the smallest such model. With --kv: retained tokens.",
        callback=within(SHARE),
    ),
]
Bits = Annotated[
    float | None,
    typer.Option(help="Maximum bits per weight; finds the best such model.", callback=within(BITS)),
]
Format = Annotated[
    str | None,
    typer.Option(help="One format for all matrices: int8, int4, fp8, vq2, vq3.5, vq4 or bf16."),
]
Rule = Annotated[
    list[str] | None,
    typer.Option(
        "--rule",
        help="PATTERN=FORMAT (or PATTERN=skip) for matrices whose name matches; repeatable.",
    ),
]
Candidate = Annotated[
    list[str] | None,
    typer.Option("--candidate", help="Format that the search may choose; repeatable."),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Folder to create for the quantized model.", callback=output_folder
    ),
]
Html = Annotated[
    Path | None, typer.Option(help="File for an HTML page with charts.", callback=output_file)
]
TokenizerName = Annotated[str | None, typer.Option(help="'bytes', or a tokenizer.json file.")]
Batches = Annotated[
    int,
    typer.Option(
        help="Number of batches; the last quarter measures the result.", callback=within(COUNT)
    ),
]
Rows = Annotated[int, typer.Option("--batch-size", help="Rows per batch.", callback=within(COUNT))]
Tokens = Annotated[
    int | None,
    typer.Option(
        "--sequence-length", help="Tokens per row. [default: 256]", callback=within(COUNT)
    ),
]
Kv = Annotated[
    list[str] | None,
    typer.Option(
        "--kv", help="Measure formats of the KV cache instead, in order of preference: int4, pq4, …"
    ),
]
Int8 = Annotated[bool, typer.Option("--int8-activations", help="Also round activations to int8.")]
Mesh = Annotated[str | None, typer.Option(help="Mesh for calibration: data=8, or fsdp=8.")]
Tune = Annotated[
    int,
    typer.Option(
        help="Steps that train codebook entries, scales and unquantized weights, such as 300.",
        callback=within(INDEX),
    ),
]
FixedCodes = Annotated[
    bool,
    typer.Option(
        "--fixed-codes", help="With --tune: keep vector codes fixed, which takes less memory."
    ),
]
Seed = Annotated[
    int, typer.Option(help="Random seed of codebooks and data order.", callback=within(SEED))
]
Verdict = Annotated[
    bool, typer.Option("--verdict", help="Report how chips run a published quantized checkpoint.")
]
On = Annotated[
    str | None,
    typer.Option(help="Chip to estimate the speed for; with --verdict: chips, such as v5e,v6e,7x."),
]
Serve = Annotated[
    int, typer.Option(help="With --verdict: concurrent sequences.", callback=within(COUNT))
]
Context = Annotated[
    int, typer.Option(help="With --verdict: tokens per sequence.", callback=within(COUNT))
]

DEFAULT_SEQUENCE = 256
OF_VERDICT = ("source", "verdict", "on", "serve", "context", "json")
OF_CACHE = (
    *("source", "calibration", "target", "output", "tokenizer", "batches", "batch_size"),
    *("sequence_length", "kv", "seed", "step", "json"),
)


def quantize(
    called: typer.Context,
    source: Source,
    calibration: Calibration = None,
    target: Target = None,
    bits: Bits = None,
    format: Format = None,
    rule: Rule = None,
    candidate: Candidate = None,
    output: Output = None,
    html: Html = None,
    tokenizer: TokenizerName = None,
    batches: Batches = 16,
    batch_size: Rows = 8,
    sequence_length: Tokens = None,
    int8_activations: Int8 = False,
    kv: Kv = None,
    tune: Tune = 0,
    fixed_codes: FixedCodes = False,
    mesh: Mesh = None,
    seed: Seed = 0,
    step: Step = None,
    verdict: Verdict = False,
    on: On = None,
    serve: Serve = 32,
    context: Context = SERVING_CONTEXT,
    json: options.Json = False,
) -> None:
    """Quantize a trained model and measure the loss; exit 1 if a target is missed."""
    if verdict:
        why = "is of quantizing, and --verdict reads what was quantized; leave it out."
        refuse_all_but(called, OF_VERDICT, why)
        show_verdict(Path(source), on, serve, context, json=json)
        return
    refuse(called, ("serve", "context"), "is of --verdict; add that, or leave it out.")
    if kv:
        why = "is of the weights, and --kv measures a cache, on one device; leave one of both out."
        refuse_all_but(called, OF_CACHE, why)
    if calibration is None:
        raise TPUValidationError(
            "quantizing needs text to calibrate with and to measure on: --calibration data.jsonl."
        )
    from ..quantization.plan import check_format, parse_rules

    rules = parse_rules(rule or ())
    formats = [check_format(name) for name in candidate or ()]
    if format is not None:
        check_format(format)
    from ..errors import TargetNotReached
    from ..runtime.environment import configure_tpu_environment

    configure_tpu_environment()
    from ..quantization import quantize_model
    from ..quantization.search.search import CANDIDATES
    from ..training.trained_model import load_trained
    from .output import Announcer

    shared = None if mesh is None else options.mesh_here(mesh)
    model = load_trained(source, step=step, mesh=shared)
    words = tokenizer or model.tokenizer or "bytes"
    length = min(sequence_length or DEFAULT_SEQUENCE, model.config.max_seq_len)
    data = _data(calibration, words, model.config.vocab_size, length, batch_size, seed)
    if kv:
        return choose(
            model, data, kv, target=target, batches=batches, output=output, seed=seed, json=json
        )
    missed = False
    try:
        result = quantize_model(
            model.config,
            data,
            params=model.params,
            format=format,
            rules=rules,
            target_accuracy_retention=target,
            bits=bits,
            candidates=formats or CANDIDATES,
            num_calibration_batches=batches,
            activations="int8" if int8_activations else "wide",
            tune=tune,
            tune_codes=not fixed_codes,
            seed=seed,
            chip=on,
            mesh=shared,
            progress=Announcer(),
        )
    except TargetNotReached as error:
        typer.secho(f"NOT REACHED {error}", fg=typer.colors.RED, err=True)
        result, missed = cast("QuantizationResult", error.best), True
    _deliver(result, output, html, words, title=model.config.name, json=json)
    if missed:
        raise typer.Exit(ExitCode.FAILED)


def _data(source: str, tokenizer: str, vocabulary: int, length: int, rows: int, seed: int) -> Any:
    """Return batches of tokens, once through the data."""
    from ..training.data.opening import open_data

    data = open_data(
        source,
        sequence_length=length,
        batch_size=rows,
        vocab_size=vocabulary,
        tokenizer=tokenizer,
        seed=seed,
        num_epochs=1,
    )
    with closing(data.stream()) as stream:
        for batch in stream:
            yield {"inputs": batch["inputs"], "targets": batch["targets"]}


def _deliver(
    result: "QuantizationResult",
    output: Path | None,
    html: Path | None,
    tokenizer: str,
    *,
    title: str,
    json: bool,
) -> None:
    from ..quantization.files.model_files import save_quantized
    from ..quantization.report import write_report
    from ..training.data.tokenizer import keep_tokenizer
    from .output import Announcer, show

    say = Announcer()
    show(result, json=json)
    if output is not None:
        save_quantized(result.model, output, report=result.report, tokenizer=tokenizer)
        keep_tokenizer(tokenizer, output)
        say(
            f"wrote {output}: tpukit generate {output} --prompt … opens it, as do check, train and "
            f"load_quantized; for transformers and others, tpukit export {output} wide/ widens it"
        )
    if html is not None:
        write_report(result.report, html, title=title)
        say(f"wrote {html}")


def choose(
    model: "TrainedModel",
    data: Any,
    formats: Sequence[str],
    *,
    target: float | None,
    batches: int,
    output: Path | None,
    seed: int,
    json: bool,
) -> None:
    """Measure caches, write the first that reaches the target, and exit 1 if none does."""
    import numpy as np

    from ..quantization.cache.codebooks import save_cache
    from ..quantization.cache.retention import DEFAULT_TARGET, choose_cache
    from .output import Announcer, show

    parts = [np.asarray(batch["inputs"]) for batch in islice(data, batches)]
    rows = np.concatenate(parts) if parts else np.zeros((0, 1), np.int32)
    found = choose_cache(
        model.config,
        model.params,
        rows,
        formats=formats,
        target=DEFAULT_TARGET if target is None else target,
        seed=seed,
        progress=Announcer(),
    )
    if found.spec is not None and output is not None:
        save_cache(found.spec, output)
    show(found, json=json)
    if found.spec is None:
        best = max(found.reports, key=lambda one: one.free.value)
        typer.secho(f"NOT REACHED {best.verdict()}", fg=typer.colors.RED, err=True)
        raise typer.Exit(ExitCode.FAILED)


def show_verdict(source: Path, on: str | None, batch: int, context: int, *, json: bool) -> None:
    """Show for each chip whether it multiplies the checkpoint's format, and an alternative."""
    from ..planner.published_verdict import CHIPS, quantization_verdict
    from .output import show

    chips = [word.strip() for word in on.split(",")] if on else CHIPS
    show(quantization_verdict(source, on=chips, batch=batch, context=context), json=json)
