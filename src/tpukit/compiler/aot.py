"""`compile_for`: the real TPU compiler, for any slice, on a machine that has none."""

import logging
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any

from ..errors import (
    FlagError,
    MeshError,
    MissingExtraError,
    TPUOutOfMemoryError,
    XLACompilationError,
)
from ..hardware import Slice
from ..runtime.child import ChildError, run_child
from .compiled import CompiledStep, MemoryUse
from .program import Program, lower_program

logger = logging.getLogger(__name__)
DEFAULT_TIMEOUT_S = 1800.0
_OUT_OF_MEMORY = re.compile(r"\(([\d.]+[KMGT]?)\) exceeds available HBM \(([\d.]+[KMGT]?)\)")
_USED_OF = re.compile(r"[Uu]sed ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) hbm")


def compile_for(
    function: Callable[..., Any] | Program,
    slice: Slice | str,
    *args: Any,
    donate_argnums: Sequence[int] = (),
    dcn_mesh_shape: Sequence[int] | None = None,
    options: Mapping[str, Any] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> CompiledStep:
    """Compile `function` for `slice` with the real TPU compiler, in a child process.

    Args:
        function: Anything jax can lower, or a `Program` that is lowered already.
        slice: The slice to compile for, as a `Slice` or a name such as "v6e-16".
        *args: Example arguments: arrays or `jax.ShapeDtypeStruct`s. Shardings over an abstract
            mesh with as many devices as the slice make it a program for the whole slice;
            without shardings it is compiled for one device.
        donate_argnums: Arguments whose memory the result may reuse.
        dcn_mesh_shape: Factor of each mesh axis that runs across slices, for several slices.
        options: Compiler options for this compile alone, e.g. `{"xla_tpu_...": True}`.
        timeout_s: The child is killed after this long.

    Raises:
        TPUOutOfMemoryError: The program does not fit in the chip's memory.
        XLACompilationError: The compiler refused the program, crashed or ran out of time.
        FlagError: The compiler does not know an option.
        MeshError: The mesh has not as many devices as the slice.
    """
    target = Slice.parse(slice) if isinstance(slice, str) else slice
    program = function if isinstance(function, Program) else lower_program(
        function, *args, donate_argnums=donate_argnums
    )  # fmt: skip
    sizes = tuple(size for _, size in program.mesh_axes)
    if sizes and prod(sizes) != target.devices:
        raise MeshError(
            f"{program.name} is laid out on a mesh of {' x '.join(map(str, sizes))} = "
            f"{prod(sizes)} devices, but {target} has {target.devices}; "
            "change the mesh or the slice."
        )
    across = _across_slices(sizes, target, dcn_mesh_shape)
    with tempfile.TemporaryDirectory(prefix="tpukit-program-") as folder:
        path = Path(folder) / "program.bin"
        path.write_bytes(program.serialized)
        request = {
            "program": str(path),
            "topology": target.libtpu_topology,
            "topology_options": dict(target.libtpu_options),
            "mesh_axes": program.mesh_axes,
            "ici_shape": [size // outer for size, outer in zip(sizes, across, strict=True)],
            "dcn_shape": across,
            "donated": program.donated,
            "options": dict(options or {}),
        }
        logger.info("compiling", extra={"program": program.name, "slice": str(target)})
        try:
            reply = run_child("tpukit.compiler.worker", request, timeout_s=timeout_s)
        except ChildError as error:
            raise _explain(error, program.name, target) from None
    return CompiledStep(
        name=program.name,
        slice=target,
        memory=MemoryUse(**reply["memory"]),
        flops=reply["flops"],
        compile_s=reply["compile_s"],
        hlo=reply["hlo"],
        versions=compiler_versions(),
    )


def compiler_versions() -> dict[str, str]:
    """The versions that decide what the compiler does.

    Raises:
        MissingExtraError: libtpu is not installed.
    """
    try:
        return {name: version(name) for name in ("jax", "jaxlib", "libtpu")}
    except PackageNotFoundError:
        raise MissingExtraError(
            "tpu", needed_for="The offline TPU compiler", module="libtpu"
        ) from None


def _across_slices(
    sizes: tuple[int, ...], target: Slice, dcn_mesh_shape: Sequence[int] | None
) -> list[int]:
    """How each mesh axis is cut across slices; by default the first axis that can be."""
    if dcn_mesh_shape is not None:
        if len(dcn_mesh_shape) != len(sizes) or prod(dcn_mesh_shape) != target.num_slices:
            raise MeshError(
                f"dcn_mesh_shape={tuple(dcn_mesh_shape)} does not cut a mesh of {sizes} into "
                f"{target.num_slices} slices; give one factor per axis with that product."
            )
        return list(dcn_mesh_shape)
    across = [1] * len(sizes)
    if target.num_slices > 1 and sizes:
        axis = next((i for i, size in enumerate(sizes) if size % target.num_slices == 0), None)
        if axis is None:
            raise MeshError(
                f"no axis of the mesh {sizes} can be cut into {target.num_slices} slices; "
                "make one axis a multiple of it, or pass dcn_mesh_shape."
            )
        across[axis] = target.num_slices
    return across


def _explain(error: ChildError, name: str, target: Slice) -> Exception:
    text = str(error)
    memory = _OUT_OF_MEMORY.search(text) or _USED_OF.search(text)
    if "RESOURCE_EXHAUSTED" in text and memory:
        return TPUOutOfMemoryError(
            f"{name} does not fit on {target}: the compiler needs {memory[1]} of HBM per device "
            f"and has {memory[2]}. Use a smaller batch, more rematerialization, more sharding "
            "or a larger slice."
        )
    unknown = re.search(r"No such compile option: '?\"?([\w-]+)", text)
    if unknown:
        return FlagError(
            f"the TPU compiler does not know the option {unknown[1]!r}; "
            "`tpukit flags explain` finds the nearest one it knows."
        )
    first = next((line for line in text.splitlines() if line.strip()), "no message")
    return XLACompilationError(f"compiling {name} for {target} failed ({error.kind}): {first}")
