"""`compile_for`: run the real TPU compiler for any slice, on a machine without a TPU."""

import itertools
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import (
    OUT_OF_MEMORY_ADVICE,
    FlagError,
    TPUError,
    TPUOutOfMemoryError,
    XLACompilationError,
)
from ..hardware import Slice
from ..hardware.figure import bytes_text
from ..plain_data import JsonMapping, JsonObject
from ..runtime.child import ChildError, offline_environment, watch_child
from ..runtime.files import temporary_folder
from ..runtime.progress import Progress, silent
from ..runtime.versions import installed_versions
from .cache import CompileCache
from .compiled import CompiledStep, Stage, Until
from .dump import Dump, KernelDump
from .program.lowered import Program
from .program.request import (
    CompileRequest,
    StepSource,
    compiler_versions,
    make_request,
)

if TYPE_CHECKING:
    from ..annotations import AnyMesh


_SIZE = r"([\d.]+[KMGT]?)"
_HBM = (
    re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"[Uu]sed {_SIZE} of {_SIZE} hbm"),
)
# The compiler has three messages for a kernel that does not fit, one per pass that may notice it.
# The second does not state the size in its first line.
_VMEM = (
    re.compile(rf"[Uu]sed {_SIZE} of {_SIZE} vmem"),
    re.compile(rf"[Ss]coped allocation with size {_SIZE} and limit {_SIZE} exceeded scoped vmem"),
    re.compile(rf"Allocation \(size={_SIZE}\) would exceed memory \(size={_SIZE}\)[^\n]*=\s*vmem"),
)
_RAN_OUT_OF_VMEM = re.compile(r"RESOURCE_EXHAUSTED[\s\S]*(?:memory space vmem|[Vv]memOom|=\s*vmem)")
_LARGEST = re.compile(r"tag = '(\w+) window[^']*?window shape is ([a-z0-9]+\[[\d,]*\])")
# A program of a newer jax, with operations that this libtpu does not support.
_UNREADABLE = re.compile(
    r"Failed to deserialize StableHLO|unsupported (?:Mosaic|serde) version", re.I
)
_UNKNOWN_OPTION = re.compile(r"No such compile option: '?\"?([\w-]+)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def ran_out_of_hbm(error: ChildError) -> bool:
    """Whether the compiler rejected the program because it does not fit in HBM."""
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text and _sizes(_HBM, text) is not None


def explain_failure(
    error: ChildError, name: str, target: Slice, *, exported_by: str = ""
) -> TPUError:
    """Return the error to show a user for an error of the compiling child.

    Args:
        error: The child's error.
        name: Name of the program.
        target: The slice.
        exported_by: The version of jax that exported the program; "" for the running one.
    """
    text = str(error)
    hbm = _sizes(_HBM, text)
    if ran_out_of_hbm(error) and hbm:
        return TPUOutOfMemoryError(
            f"{name} does not fit on {target}: the compiler needs {hbm[0]} of HBM per device, "
            f"but has {hbm[1]}; {OUT_OF_MEMORY_ADVICE}. "
            'compile_for(..., until="memory").memory lists the buffers.'
        )
    if _RAN_OUT_OF_VMEM.search(text):
        return XLACompilationError(_vmem_words(text, name, target))
    unknown = _UNKNOWN_OPTION.search(text)
    if unknown:
        return FlagError(
            f"the TPU compiler has no option {unknown[1]!r}; "
            "`tpukit flags explain` finds the nearest one."
        )
    if exported_by and _UNREADABLE.search(text):
        here = installed_versions("jax")["jax"]
        return XLACompilationError(
            f"jax {here} beside this tpukit cannot read {name}, which jax {exported_by} exported; "
            f"compile it with --toolchain jax-{exported_by}, or run tpukit in an environment with "
            "that jax."
        )
    first = next((line for line in text.splitlines() if line.strip()), "no message")
    return XLACompilationError(f"compiling {name} for {target} failed ({error.kind}): {first}")


def _vmem_words(text: str, name: str, target: Slice) -> str:
    """Describe how much VMEM a kernel needs and has, and how to make it need less."""
    chip, sizes = target.chip, _sizes(_VMEM, text)
    whole = chip.vmem_bytes.value
    there = "" if whole is None else f" ({bytes_text(whole)} on each core of {chip.name})"
    needs, raised = f"needs more VMEM than there is{there}", ""
    if sizes is not None:
        need, limit = map(_in_bytes, sizes)
        needs = f"needs {bytes_text(need)} of VMEM, but has {bytes_text(limit)}{there}"
        raised = ", or raise its vmem_limit_bytes" if need < (whole or 0) else ""
    largest = _LARGEST.search(text)
    window = f"; the window of its {largest[1]} is {largest[2]}" if largest else ""
    return f"a kernel of {name} {needs}{window}. Make its blocks smaller{raised}."


def _sizes(patterns: tuple[re.Pattern[str], ...], text: str) -> tuple[str, str] | None:
    """Return the needed and the available size, as the compiler writes them."""
    found = next((match for pattern in patterns if (match := pattern.search(text))), None)
    return None if found is None else (found[1], found[2])


def _in_bytes(size: str) -> float:
    unit = size[-1] if size[-1] in _UNITS else ""
    return float(size.removesuffix(unit)) * _UNITS[unit]


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
    options: JsonMapping | None = None,
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
        until: The stage to stop at. "memory" and "schedule" take seconds, also for a program that
            does not fit; "codegen" takes minutes and adds code size and cycles.
        timeout_s: The child is killed after this long.
        progress: Called with each stage as it is reached.
        use_cache: Whether to return a cached result, and to cache this one.
        dump_to: Folder for a copy of every file that the compiler writes.

    Raises:
        TPUOutOfMemoryError: The program does not fit, and until is "codegen".
        XLACompilationError: The compiler rejected the program, crashed or ran out of time.
        FlagError: The compiler has no such option.
        MeshError: Mesh and slice have different numbers of devices.
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
    """Compile a request of `make_request`, or return its result from the cache.

    `bundles` adds the compiler's final bundles of every Pallas kernel; it needs until="codegen".
    """
    cache = CompileCache.default() if use_cache else None
    if cache is not None and dump_to is None:
        cached = load_compiled(cache, request.key, until=until, bundles=bundles)
        if cached is not None:
            return _or_raise(cached.seen_as(request.program.facts, request.slice), until)
    try:
        with temporary_folder("tpukit-compile-") as folder:
            compiled = _compile(request, folder, until, timeout_s, progress, bundles)
            if dump_to is not None:
                shutil.copytree(folder / "dump", dump_to, dirs_exist_ok=True)
    except OSError as error:
        raise XLACompilationError(
            f"compiling {request.program.name} needs space for its files, but "
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
    """Compile several programs in parallel; return each one's result, or its error.

    Args:
        requests: Results of `make_request`.
        workers: Compiles at once; by default as many as cores and free memory allow.
        until: As for `compile_for`.
        timeout_s: Time limit per program.
        use_cache: As for `compile_for`.
        bundles: As for `run_request`.
        progress: Called with each stage of each program as it is reached, and with its end.
    """
    pending = list(requests)
    ended = itertools.count(1)

    def compile_one(request: CompileRequest) -> CompiledStep | TPUError:
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
            progress(f"{about}: compiled, {next(ended)} of {len(pending)}")

    pool = ThreadPoolExecutor(workers or room_for_workers())
    try:
        return list(pool.map(compile_one, pending))
    finally:  # after Ctrl-C, compiles that have not begun are cancelled
        pool.shutdown(cancel_futures=True)


def load_compiled(
    cache: CompileCache, key: str, *, until: Until, bundles: bool = False
) -> CompiledStep | None:
    """Return the cached compile under `key`; None if it stopped before `until`."""
    # A program that does not fit stops at its schedule, whichever stage was requested.
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
    message = request.for_worker(program_path, dump)
    chip = request.slice.chip
    usable = chip.per_device(chip.hbm_usable_bytes).value
    reported: set[Stage] = set()

    def report(stage: Stage) -> None:
        if stage not in reported:
            reported.add(stage)
            progress(stage)

    def far_enough() -> bool:
        if dump.scheduled:
            report("memory")
        if until == "codegen":
            if dump.accepted:
                report("schedule")
                report("codegen")
            return False
        if not (dump.accepted or dump.leaves_room(usable)):
            return False
        report("schedule")
        return True

    report("compile")
    logger.info("compiling", extra={"program": request.program.name, "slice": str(request.slice)})
    started = time.perf_counter()
    fits = True
    reply: JsonObject | None = None
    try:
        reply = watch_child(
            "tpukit.compiler.worker",
            message,
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
    """Return how many compiles cores and free memory allow at once."""
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, psutil.virtual_memory().available // CHILD_MEMORY_BYTES))
