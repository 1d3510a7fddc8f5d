"""Options that several commands share, for jobs and for functions."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..plain_data import JsonObject
from ..runtime.ranges import COUNT, INDEX, SECONDS
from .values import within

if TYPE_CHECKING:
    from jax.sharding import Mesh as DeviceMesh

    from ..compiler import CompileRequest
    from ..runtime.progress import Progress


def presets_like(incomplete: str) -> list[str]:
    """Return presets that start with a word, for shell completion."""
    from ..models.presets import list_presets

    return [name for name in list_presets() if name.startswith(incomplete)]


def slices_like(incomplete: str) -> list[str]:
    """Return slices that start with a word, for shell completion; generations if it is empty."""
    from ..hardware import list_chips, list_slices

    known = [chip for chip in list_chips() if chip.rules is not None]
    if not incomplete:
        return [chip.name for chip in known]
    names = [str(one) for chip in known for one in list_slices(chip.name)]
    return [name for name in names if name.startswith(incomplete)]


TARGET_HELP = (
    "A preset, a job.yaml, a folder with a config.json, or file.py:build (module:build) that "
    "returns a Workload or a model of your own."
)
Target = Annotated[str, typer.Argument(help=TARGET_HELP, autocompletion=presets_like)]
MaybeTarget = Annotated[
    str | None,
    typer.Argument(help=TARGET_HELP, metavar="TARGET", autocompletion=presets_like),
]
Torch = Annotated[
    str | None,
    typer.Option(
        "--torch", help="Instead of TARGET: module:function that builds a PyTorch module."
    ),
]
On = Annotated[
    str | None, typer.Option(help="Slice, e.g. v6e-8 or 2xv6e-256.", autocompletion=slices_like)
]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        "--batch",
        help="Examples per step, over all devices.",
        callback=within(COUNT),
    ),
]
Sequence = Annotated[
    int | None,
    typer.Option(
        "--sequence-length", "--sequence", help="Tokens per example.", callback=within(COUNT)
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Tokens, text, .npz, a folder of them, a folder of images per "
        "class, gs://…, or file.py:function that yields batches."
    ),
]
Steps = Annotated[int | None, typer.Option(help="Total number of steps.", callback=within(COUNT))]
Mesh = Annotated[
    str | None,
    typer.Option(help="Mesh axes, such as fsdp=8,tensor=4; -1 takes the remaining devices."),
]
Strategy = Annotated[str | None, typer.Option(help="Sharding strategy: fsdp, fsdp+megatron, …")]
Remat = Annotated[
    str | None, typer.Option(help="Rematerialization policy: none, minimal, full, offload=…")
]
Optimizer = Annotated[str | None, typer.Option(help="Optimizer: adamw, lion, adafactor or sgd.")]
MomentDtype = Annotated[
    str | None, typer.Option(help="Format of the optimizer's moments: float32, bfloat16 or int8.")
]
Microbatches = Annotated[
    int | None, typer.Option(help="Microbatches per step.", callback=within(COUNT))
]
Attention = Annotated[str | None, typer.Option(help="Attention implementation.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Set any key of the job, such as train.z_loss=1e-4; repeatable."),
]
Arg = Annotated[
    list[str] | None,
    typer.Option(
        help="Argument of a function, such as bf16[8,128], or sharded: "
        "bf16[8@fsdp,128]; repeatable."
    ),
]
Donate = Annotated[
    list[int] | None,
    typer.Option(
        help="Index of a donated argument, whose memory results may reuse.", callback=within(INDEX)
    ),
]
Flags = Annotated[str, typer.Option(help="Compiler options: '--xla_tpu_...=true ...'.")]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Compile again, without the compile cache.")
]
Timeout = Annotated[
    float | None,
    typer.Option(
        help="Time limit of a compile in seconds. [default: the job's]", callback=within(SECONDS)
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def torch_or_target(target: str | None, torch: str | None) -> str:
    """Return the model to check: TARGET, or the module of --torch.

    Raises:
        ConfigError: Both were given, or neither.
    """
    from ..errors import ConfigError
    from ..job.model_source import PREFIX

    if (target is None) == (torch is None):
        seen = "both a TARGET and --torch" if target is not None else "nothing"
        raise ConfigError(
            f"{seen} to check; give a preset, a job.yaml or module:function, or "
            "--torch module:function for a builder of a PyTorch module."
        )
    return target if target is not None else f"{PREFIX}{torch}"


def changes(assignments: list[str] | None, **typed: Any) -> JsonObject:
    """Return the typed options by key of the job; an option overrides `--set`.

    Two underscores separate section and key: `train__optimizer` is `train.optimizer`.
    """
    from ..job.document import parse_assignments

    stated = {name.replace("__", "."): value for name, value in typed.items() if value is not None}
    return {**parse_assignments(assignments or ()), **stated}


# Options of a job that check, flags tune and train all have: parameter of the command -> job key.
_OF_JOB = {
    "on": "on",
    "batch": "batch_size",
    "sequence": "sequence_length",
    "mesh": "mesh",
    "strategy": "strategy",
    "remat": "remat",
    "optimizer": "train.optimizer",
    "moment_dtype": "train.moment_dtype",
    "microbatches": "microbatches",
    "attention": "attention",
}


def job_changes(called: typer.Context, **more: Any) -> JsonObject:
    """Return the changes to a job that a command has options for; `more` is as in `changes`."""
    typed = {key: called.params[name] for name, key in _OF_JOB.items()}
    return changes(called.params["set_"], **typed, **more)


def mesh_here(text: str) -> "DeviceMesh":
    """Return the mesh that was typed, over the devices of this process."""
    from ..hardware.mesh_sizes import parse_mesh
    from ..parallel import create_mesh

    sizes = parse_mesh(text)
    return create_mesh(mesh_shape=[*sizes.values()], axis_names=[*sizes])


def compiler_options(flags: str) -> JsonObject | None:
    """Return validated compiler options from a flag string; None if it is empty."""
    if not flags:
        return None
    from ..runtime.flags import as_compiler_options, parse_flags

    return dict(as_compiler_options(parse_flags(flags)))


def callable_of(target: str, found: Any) -> Any:
    """Return the function that a target names.

    Raises:
        ConfigError: It is a model, which takes no --arg.
    """
    from ..errors import ConfigError

    if hasattr(found, "jit_train_step") or not callable(found):
        raise ConfigError(
            f"{target} leads to a {type(found).__name__}, whose training step knows its own "
            "arguments; leave --arg out."
        )
    return found


def lower_function(
    target: str,
    asked: JsonObject,
    arg: list[str],
    donate: list[int] | None,
    *,
    progress: "Progress",
) -> "CompileRequest":
    """Lower a function for a slice.

    Raises:
        ConfigError: An option belongs to jobs only, the slice is missing, or there are too few
            arguments.
    """
    from ..compiler.program.entry import built, needed_arguments, sharded_arguments
    from ..compiler.program.request import make_request
    from ..errors import ConfigError
    from ..hardware import Slice
    from ..hardware.mesh_sizes import parse_mesh
    from ..runtime.environment import configure_tpu_environment

    only_for_jobs = [name for name in asked if name not in ("on", "options", "mesh")]
    if only_for_jobs or "on" not in asked:
        wrong = f"takes no {', '.join(only_for_jobs)}" if only_for_jobs else "needs --on"
        raise ConfigError(f"a function {wrong}; write --on SLICE and its arguments as --arg.")
    configure_tpu_environment()  # or jax would look for a TPU, slowly, in this process
    function = callable_of(target, built(target))
    needed = needed_arguments(function)
    if len(needed) > len(arg):
        raise ConfigError(
            f"{target} takes {', '.join(needed)}; write a shape for each: --arg 'bf16[8,128]'."
        )
    target_slice, mesh = Slice.parse(asked["on"]), asked.get("mesh")
    return make_request(
        function,
        target_slice,
        *sharded_arguments(arg, target_slice, parse_mesh(mesh) if mesh else None),
        donate_argnums=donate or (),
        options=asked.get("options"),
        progress=progress,
    )
