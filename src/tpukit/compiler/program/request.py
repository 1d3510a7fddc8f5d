"""A compile request: a lowered program, its slice, and the compiler's options."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ... import __version__
from ...errors import FlagError, MeshError, MissingExtraError
from ...hardware import Slice
from ...hardware.mesh_sizes import fill_mesh
from ...hardware.target import target_chip
from ...plain_data import JsonMapping, JsonObject
from ...runtime.progress import Progress, silent
from ...runtime.versions import NOT_INSTALLED, installed_versions
from ..dump import Dump
from .lowered import Program, ProgramFacts, lower_program

if TYPE_CHECKING:
    from ...annotations import AnyMesh

FORMAT = 3  # raise it when what is kept of a compile, or how, changes
OWN_OPTIONS = ("xla_dump_to", "xla_dump_hlo_as_text", "xla_dump_large_constants")


@runtime_checkable
class StepSource(Protocol):
    """A workload: it provides its jitted step and the shapes of its arguments on a mesh."""

    def jit_train_step(self, mesh: "AnyMesh") -> Any:
        """Return the jitted step, with a sharding for every leaf."""
        ...

    def abstract_args(self, mesh: "AnyMesh") -> tuple[Any, ...]:
        """Return the step's arguments as shapes with shardings."""
        ...


@dataclass(frozen=True)
class CompileRequest:
    """A program, its slice and its options; built by `make_request`."""

    program: Program = field(repr=False)
    slice: Slice
    dcn_shape: tuple[int, ...]
    options: JsonMapping
    libtpu_init_args: str = ""

    @property
    def key(self) -> str:
        """A hash of everything that the result depends on."""
        return compile_key(
            self.program.facts, self.slice, self.dcn_shape, self.options, self.libtpu_init_args
        )

    def for_worker(self, program_path: Path, dump: Dump) -> JsonObject:
        """Return the request as the child process reads it."""
        sizes = [size for _, size in self.program.facts.mesh_axes]
        return {
            "program": str(program_path),
            "devices": str(dump.devices_path),
            "topology": self.slice.libtpu_topology,
            "topology_options": dict(self.slice.libtpu_options),
            "mesh_axes": self.program.facts.mesh_axes,
            "axis_types": self.program.facts.axis_types,
            "ici_shape": [size // outer for size, outer in zip(sizes, self.dcn_shape, strict=True)],
            "dcn_shape": list(self.dcn_shape),
            "device_order": list(self.program.facts.device_order),
            "donated": self.program.facts.donated,
            "options": {**self.options, **dump.options},
        }


def compile_key(
    facts: ProgramFacts,
    target: Slice,
    dcn_shape: Sequence[int],
    options: JsonMapping,
    libtpu_init_args: str = "",
) -> str:
    """Return the key of a compile from the facts of its program."""
    identity = [
        FORMAT,
        __version__,  # the order of devices is this package's own work
        facts.fingerprint,
        target.libtpu_topology,
        sorted((name, str(value)) for name, value in target.libtpu_options.items()),
        list(dcn_shape),
        sorted((name, repr(value)) for name, value in options.items()),
        sorted(compiler_versions().items()),
        *([list(facts.device_order)] if facts.device_order else []),
        *([libtpu_init_args] if libtpu_init_args else []),
    ]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def make_request(
    function: Callable[..., Any] | Program | StepSource,
    on: Slice | str,
    *args: Any,
    donate_argnums: Sequence[int] = (),
    mesh: "Mapping[str, int] | AnyMesh | None" = None,
    dcn_mesh_shape: Sequence[int] | None = None,
    options: JsonMapping | None = None,
    libtpu_init_args: str = "",
    progress: Progress = silent,
) -> CompileRequest:
    """Lower `function` and check that it, its mesh and the slice fit together.

    The arguments are those of `compile_for`; `libtpu_init_args` are flags for the child's
    environment variable of that name.
    """
    target = Slice.parse(on) if isinstance(on, str) else on
    for name in options or {}:
        if name in OWN_OPTIONS:
            raise FlagError(f"{name!r} is set by tpukit itself; pass dump_to= to keep the files.")
    if isinstance(function, Program):
        program = function
    else:
        with target_chip(target.chip.name):
            program = _lower(function, target, args, donate_argnums, mesh, progress)
    sizes = tuple(size for _, size in program.facts.mesh_axes)
    if sizes and prod(sizes) != target.devices:
        raise MeshError(
            f"{program.name} is laid out on a mesh of {' x '.join(map(str, sizes))} = "
            f"{prod(sizes)} devices, but {target} has {target.devices}; "
            "change the mesh or the slice."
        )
    across = (
        (1,) * len(sizes)  # the program's own mesh has its devices in order already
        if program.facts.device_order
        else cut_across_slices(sizes, target, dcn_mesh_shape)
    )
    return CompileRequest(program, target, across, dict(options or {}), libtpu_init_args)


def _lower(
    function: Callable[..., Any] | StepSource,
    target: Slice,
    args: tuple[Any, ...],
    donate_argnums: Sequence[int],
    mesh: "Mapping[str, int] | AnyMesh | None",
    progress: Progress,
) -> Program:
    if not isinstance(function, StepSource):
        return lower_program(function, *args, donate_argnums=donate_argnums, progress=progress)
    devices = as_abstract_mesh(mesh, target)
    step, step_args = function.jit_train_step(devices), function.abstract_args(devices)
    return lower_program(step, *step_args, donate_argnums=(0,), progress=progress)


def as_abstract_mesh(mesh: "Mapping[str, int] | AnyMesh | None", target: Slice) -> "AnyMesh":
    """Return a mesh without devices from sizes by axis name; one size may be -1, the rest."""
    if mesh is None:
        raise MeshError(
            f"a workload needs a mesh; pass one, for example mesh={{'fsdp': {target.devices}}}."
        )
    if not isinstance(mesh, Mapping):
        return mesh
    return abstract_mesh(fill_mesh(mesh, target))


def abstract_mesh(sizes: Mapping[str, int]) -> "AnyMesh":
    """Return a mesh without devices; `sizes` has the devices along each axis."""
    from jax.sharding import AbstractMesh, AxisType

    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


def cut_across_slices(
    sizes: Sequence[int], target: Slice, dcn_mesh_shape: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the factor of each mesh axis across slices; by default the first possible axis."""
    if dcn_mesh_shape is not None:
        fits = len(dcn_mesh_shape) == len(sizes) and prod(dcn_mesh_shape) == target.num_slices
        if not fits or any(size % cut for size, cut in zip(sizes, dcn_mesh_shape, strict=True)):
            raise MeshError(
                f"dcn_mesh_shape={tuple(dcn_mesh_shape)} does not split a mesh of {tuple(sizes)} "
                f"into {target.num_slices} slices; give one factor per axis with that product."
            )
        return tuple(dcn_mesh_shape)
    across = [1] * len(sizes)
    if target.num_slices > 1 and sizes:
        axis = next((i for i, size in enumerate(sizes) if size % target.num_slices == 0), None)
        if axis is None:
            raise MeshError(
                f"no axis of the mesh {tuple(sizes)} can be split into {target.num_slices} slices; "
                "make one axis a multiple of it, or pass dcn_mesh_shape."
            )
        across[axis] = target.num_slices
    return tuple(across)


def compiler_versions() -> dict[str, str]:
    """Return the versions that decide the compiler's output.

    Raises:
        MissingExtraError: libtpu is not installed.
    """
    found = installed_versions("jax", "jaxlib", "libtpu")
    if NOT_INSTALLED in found.values():
        raise MissingExtraError("tpu", needed_for="The offline TPU compiler", module="libtpu")
    return found
