"""`compile_for`: the real TPU compiler, for any slice, on a machine that has none."""

import itertools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import TPUError, TPUOutOfMemoryError, XLACompilationError
from ..hardware import Slice
from ..runtime.child import ChildError, offline_environment, watch_child
from ..runtime.files import temporary_folder
from ..runtime.progress import Progress, silent
from .cache import CompileCache
from .compiled import CompiledStep, Stage, Until
from .dump import Dump, KernelDump
from .failures import explain_failure, ran_out_of_hbm
from .program.lowered import Program
from .program.request import (
    CompileRequest,
    StepSource,
    compiler_versions,
    make_request,
)

if TYPE_CHECKING:
    from ..annotations import AnyMesh

logger = logging.getLogger(__name__)
DEFAULT_TIMEOUT_S = 1800.0
# An 8B training step was measured at 0.8 GB up to its schedule, 1.2 GB through code generation.
CHILD_MEMORY_BYTES = 2 * 2**30
LARGEST_WRITTEN_OUT = 16 * 2**20  # bytes of a lowered program whose constants are listed


def compile_for(
    function: Callable[..., Any] | Program | StepSource,
    on: Slice | str,
    *args: Any,
    donate_argnums: Sequence[int] = (),
    mesh: "Mapping[str, int] | AnyMesh | None" = None,
    dcn_mesh_shape: Sequence[int] | None = None,
    options: Mapping[str, Any] | None = None,
    until: Until = "codegen",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    progress: Progress = silent,
    use_cache: bool = True,
    dump_to: Path | None = None,
) -> CompiledStep:
    """Compile `function` for a slice with the real TPU compiler, in a child process.

    Args:
        function: Anything jax can lower, a `Program` that is lowered already, or a workload.
        on: The slice to compile for, as a `Slice` or a name such as "v6e-16".
        *args: Example arguments: arrays or `jax.ShapeDtypeStruct`s. Shardings over an abstract
            mesh with as many devices as the slice make it a program for the whole slice;
            without shardings it is compiled for one device. A workload brings its own.
        donate_argnums: Arguments whose memory the result may reuse.
        mesh: For a workload: an abstract mesh, or sizes by axis name such as `{"fsdp": -1}`.
        dcn_mesh_shape: Factor of each mesh axis that runs across slices, for several slices.
        options: Compiler options for this compile alone, e.g. `{"xla_tpu_...": True}`.
        until: Stop once this is known: "memory" and "schedule" take seconds and answer also for a
            program that does not fit; "codegen" takes minutes and adds code size and cycles.
        timeout_s: The child is killed after this long.
        progress: Called with each stage as it is reached.
        use_cache: Whether an answer on disk will do, and this one is kept.
        dump_to: A folder that gets a copy of every file the compiler wrote.

    Raises:
        TPUOutOfMemoryError: The program does not fit, and code generation was asked for.
        XLACompilationError: The compiler refused the program, crashed or ran out of time.
        FlagError: The compiler does not know an option.
        MeshError: The mesh has not as many devices as the slice.
        TPUModelError: The function cannot be traced.
    """
    request = make_request(
        function,
        on,
        *args,
        donate_argnums=donate_argnums,
        mesh=mesh,
        dcn_mesh_shape=dcn_mesh_shape,
        options=options,
        progress=progress,
    )
    return run_request(
        request,
        until=until,
        timeout_s=timeout_s,
        progress=progress,
        use_cache=use_cache,
        dump_to=dump_to,
    )


def run_request(
    request: CompileRequest,
    *,
    until: Until = "codegen",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    progress: Progress = silent,
    use_cache: bool = True,
    dump_to: Path | None = None,
    bundles: bool = False,
) -> CompiledStep:
    """Compile what `make_request` described, or take it from the cache.

    `bundles` adds the compiler's final bundles of every Pallas kernel; code must be generated.
    """
    cache = CompileCache.default() if use_cache else None
    if cache is not None and dump_to is None:
        found = load_compiled(cache, request.key, until=until, bundles=bundles)
        if found is not None:
            return _or_raise(found.seen_as(request.program.facts, request.slice), until)
    try:
        with temporary_folder("tpukit-compile-") as folder:
            compiled = _compile(request, folder, until, timeout_s, progress, bundles)
            if dump_to is not None:
                shutil.copytree(folder / "dump", dump_to, dirs_exist_ok=True)
    except OSError as error:
        raise XLACompilationError(
            f"compiling {request.program.name} needs room for its files, and "
            f"{error.filename or tempfile.gettempdir()} cannot be written ({error.strerror}); "
            "free some space, or set TMPDIR to another folder."
        ) from error
    if cache is not None:
        cache.store(_entry(request.key, compiled.stage, bundles), compiled.to_texts())
    return _or_raise(compiled, until)


def compile_many(
    requests: Iterable[CompileRequest],
    *,
    workers: int | None = None,
    until: Until = "schedule",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    use_cache: bool = True,
    bundles: bool = False,
    progress: Progress = silent,
) -> list[CompiledStep | TPUError]:
    """Compile several programs side by side: for each its result, or the error it met.

    Args:
        requests: What `make_request` made.
        workers: Compiles at once; by default as many as cores and free memory allow.
        until: As for `compile_for`.
        timeout_s: For each of them.
        use_cache: As for `compile_for`.
        bundles: As for `run_request`.
        progress: Called with each stage of each program as it is reached, and with its end.
    """
    asked = list(requests)
    ended = itertools.count(1)

    def one(request: CompileRequest) -> CompiledStep | TPUError:
        about = f"{request.program.name} on {request.slice}"
        try:
            return run_request(
                request,
                until=until,
                timeout_s=timeout_s,
                progress=lambda stage: progress(f"{about}: {stage}"),
                use_cache=use_cache,
                bundles=bundles,
            )
        except TPUError as error:
            return error
        finally:
            progress(f"{about}: compiled, {next(ended)} of {len(asked)}")

    pool = ThreadPoolExecutor(workers or room_for_workers())
    try:
        return list(pool.map(one, asked))
    finally:  # whoever interrupts this does not wait for those that have not begun
        pool.shutdown(cancel_futures=True)


def load_compiled(
    cache: CompileCache, key: str, *, until: Until, bundles: bool = False
) -> CompiledStep | None:
    """What an earlier compile left under `key`, if it went far enough."""
    # A program that does not fit never gets beyond its schedule: that is the answer to both.
    for stage in ("codegen", "schedule") if until == "codegen" else ("schedule",):
        texts = cache.load(_entry(key, stage, bundles))
        found = None if texts is None else CompiledStep.from_texts(texts)
        if found is not None and (found.stage == "codegen" or until != "codegen" or not found.fits):
            return found
    return None


def _entry(key: str, stage: Stage, bundles: bool) -> str:
    return f"{key[:40]}-{stage}{'-bundles' if bundles else ''}"


def _compile(
    request: CompileRequest,
    folder: Path,
    until: Until,
    timeout_s: float,
    progress: Progress,
    bundles: bool,
) -> CompiledStep:
    program_path = folder / "program.bin"
    # A program that carries large arrays of its own would be written out many times its size.
    small = len(request.program.serialized) <= LARGEST_WRITTEN_OUT
    dump = Dump(folder / "dump", constants=small)
    dump.folder.mkdir()
    kernels = KernelDump(folder / "kernels")
    program_path.write_bytes(request.program.serialized)
    asked = request.for_worker(program_path, dump)
    chip = request.slice.chip
    usable = chip.per_device(chip.hbm_usable_bytes).value
    told: set[Stage] = set()

    def tell(stage: Stage) -> None:
        if stage not in told:
            told.add(stage)
            progress(stage)

    def far_enough() -> bool:
        if dump.scheduled:
            tell("memory")
        if until == "codegen":
            if dump.accepted:
                tell("schedule")
                tell("codegen")
            return False
        if not (dump.accepted or dump.leaves_room(usable)):
            return False
        tell("schedule")
        return True

    tell("compile")
    logger.info("compiling", extra={"program": request.program.name, "slice": str(request.slice)})
    started = time.perf_counter()
    fits = True
    reply: dict[str, Any] | None = None
    try:
        reply = watch_child(
            "tpukit.compiler.worker",
            asked,
            timeout_s=timeout_s,
            stop_when=far_enough,
            environment=offline_environment(
                {
                    **(kernels.environment if bundles else {}),
                    **({"LIBTPU_INIT_ARGS": flags} if (flags := request.libtpu_init_args) else {}),
                }
            ),
        )
    except ChildError as error:
        if not (ran_out_of_hbm(error) and dump.scheduled):
            facts = request.program.facts
            raise explain_failure(
                error, facts.name, request.slice, exported_by=facts.exported_by
            ) from None
        fits = False
    complete = reply is not None and until == "codegen"
    return CompiledStep(
        facts=request.program.facts,
        slice=request.slice,
        stage="codegen" if complete else "schedule",
        fits=fits,
        listings=dump.listings(),
        compile_s=time.perf_counter() - started,
        versions=compiler_versions(),
        generated_hlo=reply["hlo"] if reply is not None and complete else None,
        code_bytes=reply["code_bytes"] if reply is not None and complete else None,
        kernel_listings=kernels.listings() if bundles else {},
    )


def _or_raise(compiled: CompiledStep, until: Until) -> CompiledStep:
    if compiled.fits or until != "codegen":
        return compiled
    raise TPUOutOfMemoryError(compiled.memory.refusal)


def room_for_workers() -> int:
    """Compiles that cores and free memory allow at once."""
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, psutil.virtual_memory().available // CHILD_MEMORY_BYTES))
