"""`tpukit plan`: slices and meshes for a model, tokens, a deadline and a budget."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError
from ..plain_data import JsonObject
from ..runtime.ranges import COUNT
from . import job_options as options
from .values import output_file, refuse, within

if TYPE_CHECKING:
    from ..job.job import Job
    from ..planner.cost.money import Preemption

MODEL_HELP = (
    "A preset, a config.json or a folder with one, or file.py:build (module:build) that returns a "
    "Workload or a model of your own."
)
Model = Annotated[str, typer.Argument(help=MODEL_HELP, autocompletion=options.presets_like)]
Tokens = Annotated[str | None, typer.Option(help="Tokens to train on: 15e12 or 15T.")]
Deadline = Annotated[str | None, typer.Option(help="Time limit for the training: 30d, 12h or 2w.")]
Budget = Annotated[str | None, typer.Option(help="Maximum cost in USD: 50000 or 50k.")]
Objective = Annotated[str | None, typer.Option(help="Ranking: cheapest, fastest or fewest-chips.")]
On = Annotated[str | None, typer.Option(help="Chip generations or slices: v6e,v5p or v6e-64.")]
Tier = Annotated[
    str | None, typer.Option(help="Price tier: on_demand, spot, or a tier of --rates.")
]
Region = Annotated[
    list[str] | None,
    typer.Option(
        help="Allowed region, such as us-east5, or a group such as us-east or europe; repeatable."
    ),
]
RatesFile = Annotated[Path | None, typer.Option(help="YAML file with your own prices.")]
Preemptions = Annotated[float | None, typer.Option(help="Preemptions of a spot slice per day.")]
RecoveryMinutes = Annotated[
    float | None, typer.Option(help="Time from a preemption to the next step.")
]
StoreRate = Annotated[
    float | None,
    typer.Option(help="For spot capacity: GB per second at which checkpoints are written."),
]
MaxChips = Annotated[int | None, typer.Option(help="Maximum number of chips, over all slices.")]
Headroom = Annotated[float, typer.Option(help="Fraction of HBM to keep free.")]
MultiSlice = Annotated[bool, typer.Option(help="Whether several slices may train one model.")]
BatchTokens = Annotated[
    str | None, typer.Option(help="Maximum tokens per step. [default: by model size]")
]
Precision = Annotated[
    str | None,
    typer.Option(
        help="Matmul formats, separated by commas: bf16, int8, fp8. [default: the model's]"
    ),
]
LoraRank = Annotated[
    int | None,
    typer.Option(help="Train only LoRA adapters of this rank.", callback=within(COUNT)),
]
LoraTargets = Annotated[
    str | None,
    typer.Option(help="With --lora-rank: adapted matrices, such as q_proj,v_proj. [default: all]"),
]
LoraBase = Annotated[
    str | None,
    typer.Option(help="With --lora-rank: format of the frozen weights: int8, int4 or fp8."),
]
Top = Annotated[int, typer.Option(help="Number of choices to show.")]
Verify = Annotated[
    bool | None,
    typer.Option(
        "--verify/--no-verify",
        help="Check the best choices with the compiler. [default: on; off with --serve]",
    ),
]
VerifyCount = Annotated[int, typer.Option(help="Number of choices that the compiler checks.")]
VerifySeconds = Annotated[float, typer.Option(help="Time after which no further compile starts.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="File for the best choice as a job.", callback=output_file),
]
Serve = Annotated[bool, typer.Option(help="Size a slice for serving instead of training.")]
Batch = Annotated[
    int, typer.Option("--batch", "--concurrency", help="With --serve: concurrent requests.")
]
Context = Annotated[
    int | None, typer.Option(help="With --serve: maximum tokens per request. [default: 8192]")
]
PromptTokens = Annotated[int | None, typer.Option(help="With --serve: prompt tokens per request.")]
NewTokens = Annotated[int | None, typer.Option(help="With --serve: generated tokens per request.")]
Weights = Annotated[
    str | None,
    typer.Option(
        help="With --serve: format of the weights: bf16, int8, fp8, int4, or vq "
        "(vector-quantized, 2 to 4 bits)."
    ),
]
Kv = Annotated[
    str,
    typer.Option(help="With --serve: format of the KV cache: bf16, fp8, int8, int4, pq4 or pq2."),
]
Activations = Annotated[
    str,
    typer.Option(
        help="With --serve: matmul format: bf16, or int8 or fp8 for weights of that format."
    ),
]
Page = Annotated[
    Path | None, typer.Option(help="File for the answer as an HTML page.", callback=output_file)
]


# Options of one kind of plan, which the other kind refuses.
OF_TRAINING = (
    *("tokens", "deadline", "budget", "objective", "preemptions_per_day", "recovery_minutes"),
    "store_gb_per_second",
    *("min_headroom", "multi_slice", "sequence", "max_batch_tokens", "precision", "optimizer"),
    *("moment_dtype", "lora_rank", "lora_targets", "lora_base", "top", "output"),
)
OF_SERVING = ("batch", "context", "prompt_tokens", "new_tokens", "weights", "kv", "activations")


def plan(
    called: typer.Context,
    model: Model,
    tokens: Tokens = None,
    deadline: Deadline = None,
    budget: Budget = None,
    objective: Objective = None,
    on: On = None,
    spot: Annotated[
        bool, typer.Option(help="Use spot prices, with the cost of preemptions.")
    ] = False,
    tier: Tier = None,
    region: Region = None,
    rates: RatesFile = None,
    preemptions_per_day: Preemptions = None,
    recovery_minutes: RecoveryMinutes = None,
    store_gb_per_second: StoreRate = None,
    max_chips: MaxChips = None,
    min_headroom: Headroom = 0.05,
    multi_slice: MultiSlice = True,
    sequence: options.Sequence = None,
    max_batch_tokens: BatchTokens = None,
    precision: Precision = None,
    optimizer: options.Optimizer = None,
    moment_dtype: options.MomentDtype = None,
    lora_rank: LoraRank = None,
    lora_targets: LoraTargets = None,
    lora_base: LoraBase = None,
    top: Top = 5,
    verify: Verify = None,
    verify_top: VerifyCount = 3,
    verify_seconds: VerifySeconds = 300.0,
    output: Output = None,
    html: Page = None,
    serve: Serve = False,
    batch: Batch = 1,
    context: Context = None,
    prompt_tokens: PromptTokens = None,
    new_tokens: NewTokens = None,
    weights: Weights = None,
    kv: Kv = "bf16",
    activations: Activations = "bf16",
    json: options.Json = False,
) -> None:
    """Find slice, mesh and batch for a run: exit 0 found, 3 nothing meets the limits."""
    from ..planner.cost.candidates import GENERATIONS
    from ..planner.planning import plan as find_plan
    from .output import Announcer, show

    say = Announcer()
    if serve:
        from ..planner.serving import USUAL_FORMATS, plan_serving

        refuse(called, OF_TRAINING, "is of training, and --serve sizes a server; leave it out.")
        served = plan_serving(
            model,
            batch=batch,
            context=context,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            formats=_words(weights) or USUAL_FORMATS,
            cache=kv,
            activations=activations,
            generations=_words(on) or None,
            max_chips=max_chips,
            spot=spot,
            tier=tier,
            regions=region or (),
            rates=rates,
            verify=verify_top if verify else 0,
            verify_seconds=verify_seconds,
            progress=say,
        )
        show(served, json=json)
        if html is not None:
            served.to_html(html)
            say(f"wrote {html}")
        return
    refuse(called, OF_SERVING, "is of serving; add --serve, or leave it out.")
    if tokens is None:
        raise ConfigError("how many tokens to train on? write --tokens 15e12, or 15T.")
    result = find_plan(
        model,
        tokens=tokens,
        deadline=deadline,
        budget=budget,
        objective=objective,
        on=on or GENERATIONS,
        spot=spot,
        tier=tier,
        regions=region or (),
        rates=rates,
        preemption=_preemption(preemptions_per_day, recovery_minutes, store_gb_per_second),
        max_chips=max_chips,
        min_headroom=min_headroom,
        multi_slice=multi_slice,
        sequence_length=sequence,
        max_batch_tokens=max_batch_tokens,
        precisions=_words(precision) or None,
        optimizer=optimizer or "adamw",
        moment_dtype=moment_dtype,
        lora=_lora(lora_rank, lora_targets, lora_base),
        top=top,
        verify=0 if verify is False else verify_top,
        verify_seconds=verify_seconds,
        progress=say,
    )
    best = result.best
    if output is not None and best is not None:
        result.to_yaml(output)
        result = replace(result, job_file=output)
        say(
            f"wrote {output}: tpukit check {output}, then tpukit train {output} --data FOLDER "
            f"(data is all that it leaves open){_launch_words(best.job)}"
        )
    show(result, json=json)
    if html is not None:
        result.to_html(html)
        say(f"wrote {html}")
    raise typer.Exit(result.exit_code)


def _launch_words(job: "Job") -> str:
    """Return a line on the capacity that a launch of the job would request."""
    launch = job.launch
    if not launch.zones:
        return ""
    tier = "spot" if launch.spot else "reserved" if launch.reserved else "on-demand"
    cap = launch.max_price_per_hour
    most = "" if cap is None else f", ${cap:,.2f} an hour at most"
    return f"; tpukit launch asks for {tier} capacity in {', '.join(launch.zones)}{most}"


def _lora(rank: int | None, targets: str | None, base: str | None) -> JsonObject | None:
    """Return the typed keys of `train: {lora: …}`; None if there are none."""
    if rank is None:
        if targets is not None or base is not None:
            raise ConfigError("--lora-targets and --lora-base are of adapters; add --lora-rank 16.")
        return None
    typed = {"rank": rank, "targets": _words(targets) or None, "base": base}
    return {name: value for name, value in typed.items() if value is not None}


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",")] if text else []


def _preemption(
    per_day: float | None, recovery_minutes: float | None, store_gb_per_second: float | None
) -> "Preemption | None":
    """Return the preemption rates, with those that the user typed."""
    from ..planner.cost.money import Preemption

    yours = "given by you"
    stated: JsonObject = {}
    if per_day is not None:
        stated |= {"per_slice_day": per_day, "source": yours}
    if recovery_minutes is not None:
        stated |= {"recovery_s": recovery_minutes * 60, "source": yours}
    if store_gb_per_second is not None:
        stated |= {"store_bytes_per_s": store_gb_per_second * 1e9, "store_source": yours}
    return Preemption(**stated) if stated else None
