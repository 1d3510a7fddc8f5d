"""`check_decoding`: compile the programs that `generate` runs, without a TPU."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...annotations import PyTree
from ...compiler.aot import DEFAULT_TIMEOUT_S, run_request
from ...compiler.program.request import CompileRequest, as_abstract_mesh, make_request
from ...errors import ConfigError, TPUModelError, TPUValidationError
from ...hardware import Slice
from ...hardware.stored_formats import WEIGHT_FORMATS
from ...job.job import Job
from ...models.defaults import SERVING_CONTEXT
from ...runtime.progress import Progress, watched
from ..check import NOT_ASKED_FOR, as_job, predict
from ..result import CheckResult
from .result import DecodingCheck

if TYPE_CHECKING:
    from ...hardware.stored_formats import CacheFormat
    from ...models.generation.cache import CacheSpec
    from ...models.generation.programs import DecodingPrograms
    from ...models.transformer.config import TransformerConfig


_WIDE = "bfloat16"
ROOM_FOR_WEIGHTS = 0.8  # of a device's HBM; what is left is for caches


def check_decoding(
    model: object,
    on: Slice | str | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    batch_size: int = 1,
    context: int | None = None,
    prompt: int | None = None,
    prefill_rows: int | None = None,
    weights: str = "bfloat16",
    activations: str = "bf16",
    kv: "CacheSpec | CacheFormat | str | None" = None,
    memory_only: bool = False,
    options: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    use_cache: bool = True,
    progress: Progress = watched,
) -> DecodingCheck:
    """Compile prefill and decode of a reference transformer for a slice.

    They are the programs of `tpukit.models.generation`, with the same rounding: prompts and
    contexts up to powers of two, rows up to a multiple of the devices.

    Args:
        model: A `TransformerConfig`, a preset, a config.json, a job or a job file.
        on: The slice, e.g. "v6e-8"; it overrides the job's.
        mesh: Devices by axis: data, fsdp, tensor, expert; one may be -1. By default tensor is as
            large as the number of KV heads allows, or larger if the weights need it, and data takes
            the rest.
        batch_size: Sequences that are decoded together.
        context: Tokens that each sequence can grow to; by default 8192, or the model's maximum if
            that is less.
        prompt: Tokens of the prompts; as many as the context by default.
        prefill_rows: Prompts per prefill; all of them by default, as in `generate`.
        weights: The dtype of parameters and matmuls, or int8, int4 or fp8 for matrices stored as
            `quantize` writes them and multiplied with bfloat16.
        activations: bf16, or fp8 together with weights in fp8, which gives the matmuls of `matmul:
            float8_static`.
        kv: Format of the cache, as `Generator` takes it; by default the dtype of the matmuls.
        memory_only: Whether to stop after the memory reports.
        options: Compiler options.
        timeout_s: Time limit of each compile.
        use_cache: Whether to use and keep cached compiles.
        progress: Called with each stage as it is reached.

    Raises:
        ConfigError: No slice was given.
        TPUModelError: The model is not a reference transformer, or its maximum context is shorter.
        TPUValidationError: The format of weights or cache does not exist, needs codebooks, or
            cannot be multiplied.
        MeshError: The mesh and the slice have different numbers of devices.
        ShardingError: The mesh cannot shard this model, or has an axis that decoding cannot use.
        XLACompilationError: The compiler refused a program, crashed or timed out.

    Example:
        >>> found = check_decoding("llama3.1-8b", on="v6e-8", batch_size=64, context=2048)
        >>> found.fits, found.decode.memory.total_bytes, found.token_s, found.prefill_s
    """
    from ...runtime.environment import configure_tpu_environment

    configure_tpu_environment()  # or jax would look for a TPU, slowly, in this process
    from ...models.generation.cache import CacheSpec
    from ...models.generation.decoding import Sampling
    from ...models.generation.programs import DecodingPrograms, rounded_size

    config, target = _asked(model, on)
    dtype, matmul = _products(weights, activations)
    # Layers of multi-token prediction are for training; generation omits their weights.
    config = config.replace(param_dtype=dtype, dtype=dtype, mtp_layers=0)
    if matmul is not None:
        config = config.replace(matmul=matmul)
    room = _room(config, context)
    slots = min(rounded_size(room), config.max_seq_len)
    tokens = min(rounded_size(_within(prompt or room, room)), slots)
    sizes = dict(mesh) if mesh is not None else serving_mesh(config, target)
    # Layers run in a loop on every TPU, whatever backend this process has.
    kept = None if kv is None else CacheSpec.of(kv)
    programs = DecodingPrograms(config, as_abstract_mesh(sizes, target), True, kept)
    params = _params(programs, weights, activations)
    rows = programs.rows(batch_size)
    reads = programs.rows(prefill_rows or batch_size)
    greedy = Sampling(temperature=0)

    def check(name: str, function: Any, arguments: tuple[Any, ...], **how: Any) -> CheckResult:
        progress(f"{name} of {config.name}")
        request = _request(params, target, function, arguments, options, progress, **how)
        facts = replace(request.program.facts, name=f"{config.name} {name}")
        compiled = run_request(
            replace(request, program=replace(request.program, facts=facts)),
            until="schedule",
            timeout_s=timeout_s or DEFAULT_TIMEOUT_S,
            progress=progress,
            use_cache=use_cache,
        )
        is_loop = name == "decode"
        made = rows if is_loop else reads * tokens
        found, why = None, NOT_ASKED_FOR
        if not memory_only:
            found, why = predict(
                compiled, tokens_per_step=made, one_turn=is_loop, progress=progress
            )
        return CheckResult(
            compiled=compiled, prediction=found, no_prediction=why, memory_only=memory_only
        )

    return DecodingCheck(
        model=config.name,
        slice=target,
        mesh=dict(programs.layout.mesh.shape),
        batch_size=batch_size,
        rows=rows,
        prefill_rows=reads,
        prompt=tokens,
        context=slots,
        weights=weights,
        prefill=check(
            "prefill",
            programs.prefill(sampling=greedy, slots=slots),
            programs.prefill_arguments(rows=reads, prompt=tokens),
        ),
        decode=check(
            "decode",
            programs.decode(sampling=greedy),
            programs.decode_arguments(rows=rows, slots=slots),
            donate_argnums=(1,),
        ),
    )


def _products(weights: str, activations: str) -> tuple[str, str | None]:
    """Return the wide dtype, and the `matmul` setting where it differs from the model's.

    Raises:
        TPUValidationError: No matmul takes these operands.
    """
    if activations == "bf16":
        return (_WIDE if weights in WEIGHT_FORMATS else weights), None
    if (weights, activations) != ("fp8", "fp8"):
        raise TPUValidationError(
            f"generation multiplies weights in {weights} with bf16, not with {activations}; leave "
            "activations out, or use fp8 for both."
        )
    return _WIDE, "float8_static"


def _params(programs: "DecodingPrograms", weights: str, activations: str) -> PyTree:

    from .weights import held_params, stored_params

    if weights not in WEIGHT_FORMATS or weights == "bf16":
        return programs.abstract_params()
    return held_params(programs) if activations == "fp8" else stored_params(programs, weights)


def serving_mesh(config: "TransformerConfig", target: Slice) -> dict[str, int]:
    """Return a mesh for decoding: tensor up to the number of KV heads, and data for the rest.

    If one copy of the weights does not fit this way, tensor grows up to the number of query heads.
    """
    from ...models.adapters import TransformerAdapter

    heads = TransformerAdapter(config).head_counts
    weights = config.parameter_count().total * 2.0
    room = target.hbm_usable_bytes.value
    most = ROOM_FOR_WEIGHTS * room / target.devices if room else None
    tensor = 1
    while target.devices % (tensor * 2) == 0 and heads["heads"] % (tensor * 2) == 0:
        needed = most is not None and weights / tensor > most
        if heads["kv_heads"] % (tensor * 2) and not needed:
            break
        tensor *= 2
    rest = target.devices // tensor
    return {"data": rest, "tensor": tensor} if rest > 1 else {"tensor": tensor}


def _request(
    params: PyTree,
    target: Slice,
    function: Any,
    arguments: tuple[Any, ...],
    options: Mapping[str, Any] | None,
    progress: Progress,
    *,
    donate_argnums: tuple[int, ...] = (),
) -> CompileRequest:
    def program(state: dict[str, Any], *rest: Any) -> Any:
        return function(state["params"], *rest)  # by this name the report knows weights

    program.__name__ = function.__name__
    return make_request(
        program,
        target,
        {"params": params},
        *arguments,
        donate_argnums=donate_argnums,
        options=options,
        progress=progress,
    )


def _asked(model: object, on: Slice | str | None) -> tuple["TransformerConfig", Slice]:
    """Return the transformer's configuration and the slice."""
    from ...models.generation.generator import transformer_config

    if not isinstance(model, str | Path | Job):
        if on is None:
            raise ConfigError("which slice? Give on='v6e-8'.")
        return transformer_config(model), Slice.parse(on) if isinstance(on, str) else on
    job = as_job(model, {} if on is None else {"on": str(on)})
    return transformer_config(job.load_model()), job.slice


def _room(config: "TransformerConfig", context: int | None) -> int:
    most = config.max_seq_len
    if context is not None and context > most:
        raise TPUModelError(
            f"a context of {context} tokens is more than the {most} that '{config.name}' takes; "
            "ask for less, or raise max_seq_len."
        )
    return context or min(SERVING_CONTEXT, most)


def _within(prompt: int, room: int) -> int:
    if prompt > room:
        raise TPUValidationError(
            f"prompts of {prompt} tokens do not fit a context of {room}; shorten them, or give "
            "sequences more room."
        )
    return prompt
