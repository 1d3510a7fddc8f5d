"""Compiled programs on disk: saved here, also for slices nobody has rented, and loaded there."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import TPUNotAvailableError, TPUValidationError, XLARuntimeError
from ...hardware import detect_accelerators
from ...plain_data import JsonObject
from ...runtime.child import ChildError, run_child
from ...runtime.files import temporary_folder
from ...runtime.versions import installed_versions
from ..aot import DEFAULT_TIMEOUT_S, explain_failure
from ..dump import Dump
from ..program.request import CompileRequest, compiler_versions
from .file import ExecutableHeader, read_executable, write_executable
from .loaded_step import LoadedStep
from .slots import describe_program, host_features, place_of

if TYPE_CHECKING:
    import jax

    from ...annotations import PyTree


def save_executable(
    program: "jax.stages.Compiled | CompileRequest",
    path: str | Path,
    *,
    name: str = "",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> ExecutableHeader:
    """Write a compiled program to a file that `load_executable` reads.

    Args:
        program: A `jax.stages.Compiled` of this process (`jax.jit(f).lower(…).compile()`), or
            what `make_request` made: that is compiled for its slice in a child, all the way.
        path: The file to write.
        name: What to call the program; by default what it is called already.
        timeout_s: For the child.

    Returns:
        What the file says of itself.

    Raises:
        TPUValidationError: The program cannot be written down.
        TPUOutOfMemoryError: It does not fit on its slice.
        XLACompilationError: The compiler refused it, crashed or ran out of time.
    """
    if isinstance(program, CompileRequest):
        header, code = _compile_offline(program, name, timeout_s)
    else:
        header, code = _of_this_process(program, name)
    write_executable(Path(path), header, code)
    return header


def load_executable(path: str | Path, *, like: "PyTree" = None) -> LoadedStep:
    """Load a saved program onto the devices of this process.

    A file holds machine code: load only what you trust.

    Args:
        path: What `save_executable` wrote.
        like: A tree in the structure of the results, where that is made of more than tuples,
            lists and dicts.

    Raises:
        TPUValidationError: The file is damaged, or made with other versions or for other devices.
        TPUNotAvailableError: There is no accelerator of its kind here.
        XLARuntimeError: The runtime refuses it all the same.
    """
    header, code = read_executable(Path(path))
    _refuse_other_platform(header)
    _refuse_other_versions(header)
    import jax
    from jaxlib import xla_client

    devices = _find_devices(header, jax.devices())
    loader: Any = xla_client
    try:
        loaded = devices[0].client.deserialize_executable(
            code, loader.DeviceList(tuple(devices)), None
        )
    except jax.errors.JaxRuntimeError as error:
        first = str(error).splitlines()[0]
        raise XLARuntimeError(
            f"{header.name} cannot be loaded on {devices[0].device_kind}: {first}"
        ) from error
    return LoadedStep(header, loaded, devices, like=like)


def _of_this_process(compiled: Any, name: str) -> tuple[ExecutableHeader, bytes]:
    if not hasattr(compiled, "runtime_executable"):
        raise TPUValidationError(
            f"a {type(compiled).__name__} is no compiled program; pass jax.jit(f).lower(…)"
            ".compile(), or make_request(f, slice, …) for a slice that is not here."
        )
    about = describe_program(compiled)
    code = compiled.runtime_executable().serialize()
    called = name or compiled.as_text().split(maxsplit=2)[1].rstrip(",").removeprefix("jit_")
    header = ExecutableHeader(
        name=called, slice=None, versions=_versions_for(about["platform"]), **about, **_sums(code)
    )
    return header, code


def _compile_offline(
    request: CompileRequest, name: str, timeout_s: float
) -> tuple[ExecutableHeader, bytes]:
    with temporary_folder("tpukit-save-") as folder:
        program_path, code_path = folder / "program.bin", folder / "code.bin"
        dump = Dump(folder / "dump")
        dump.folder.mkdir()
        program_path.write_bytes(request.program.serialized)
        asked = {**request.for_worker(program_path, dump), "executable": str(code_path)}
        # Where to dump would become part of the program's own record of its options.
        asked["options"] = dict(request.options)
        try:
            reply = run_child("tpukit.compiler.worker", asked, timeout_s=timeout_s)
        except ChildError as error:
            raise explain_failure(error, request.program.name, request.slice) from None
        code = code_path.read_bytes()
    # The child compiles the flat program: paths are known here.
    about = reply["executable"]
    for slot, path in zip(about["arguments"], request.program.argument_names, strict=True):
        slot["path"] = path
    for slot in about["results"]:
        slot["path"] = ""
    data = {
        **about,
        "structure": None,
        "name": name or request.program.name,
        "slice": str(request.slice),
        "versions": compiler_versions(),
        "options": dict(request.options),
        "fingerprint": request.program.fingerprint,
        "format": ExecutableHeader.format,
        **_sums(code),
    }
    return ExecutableHeader.from_dict(data), code


def _sums(code: bytes) -> JsonObject:
    return {"code_bytes": len(code), "checksum": hashlib.sha256(code).hexdigest()}


def _versions_for(platform: str) -> dict[str, str]:
    names = ("jax", "jaxlib", "libtpu") if platform == "tpu" else ("jax", "jaxlib")
    return installed_versions(*names)


def _refuse_other_platform(header: ExecutableHeader) -> None:
    if header.platform == "tpu" and detect_accelerators().kind != "tpu":
        raise TPUNotAvailableError(
            f"{header.name} was compiled for {header.target}, and there is no TPU here; load it "
            f"on a TPU VM of that slice with libtpu {header.versions.get('libtpu')} and "
            f"jaxlib {header.versions.get('jaxlib')}."
        )
    if header.host and header.host != host_features():
        raise TPUValidationError(
            f"{header.name} holds code for another kind of CPU than this machine's; "
            "compile and save it again here."
        )


def _refuse_other_versions(header: ExecutableHeader) -> None:
    here = _versions_for(header.platform)
    other = [
        f"{name} {number} (here {here.get(name, 'none')})"
        for name, number in header.versions.items()
        if here.get(name) != number
    ]
    if other:
        raise TPUValidationError(
            f"{header.name} was saved with {', '.join(other)}; compiled programs load only with "
            "the versions they were made with: install those, or save it again."
        )


def _find_devices(header: ExecutableHeader, here: list[Any]) -> list[Any]:
    """The devices of this process that the program was made for, in its order."""
    platform = "cuda" if here[0].platform == "gpu" else here[0].platform
    if (platform, here[0].device_kind) != (header.platform, header.device_kind):
        raise TPUNotAvailableError(
            f"{header.name} was compiled for {header.target}, and this process has "
            f"{len(here)} x {here[0].device_kind}; load it where those devices are."
        )
    by_id = {place_of(device): device for device in here}
    missing = [device for device in header.devices if device not in by_id]
    if missing:
        raise TPUValidationError(
            f"{header.name} was compiled for {header.target}, and this process has {len(here)} "
            f"devices, none of them at {missing[0]}; load it on the same topology, or compile "
            "it for this one."
        )
    return [by_id[device] for device in header.devices]
