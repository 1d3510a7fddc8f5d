"""The result of a capture: the programs of one step, and observations on the way to it."""

import hashlib
import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..compiler.program.lowered import Program, ProgramFacts
from ..compiler.program.request import CompileRequest, make_request
from ..errors import CaptureError, MeshError
from ..hardware import Slice
from ..runtime.flags.syntax import merge_flags

RESULT = "capture.json"
SETTINGS = "settings.json"
FORMAT = 1
"""Raise the number when a captured folder changes its meaning."""


@dataclass(frozen=True)
class ListedProgram:
    """One program that was recorded instead of run.

    Attributes:
        kind: "training step", "gradients", "optimizer update" or "other", by its data flow.
        flops: FLOPs of its matmuls over all devices, counted in the jaxpr.
        line: The line of the user's program that called it first.
        kernels: Pallas kernels by name, and how often each is called.
        model_flops: FLOPs of its matmuls outside of kernels, without those that `jax.checkpoint`
            computes again; None in captures of earlier versions.
        recomputed_flops: FLOPs of the matmuls that `jax.checkpoint` computes again.
        open_flops: The part of `flops` in loops without a constant length, counted once.
        blocks: Grid and block shapes of each kernel's first call, by name.
        remats: Backward passes of functions under `jax.checkpoint`.
    """

    name: str
    kind: str
    flops: float
    bytes_in: int
    bytes_out: int
    donated: int
    arguments: int
    calls: int
    line: str
    kernels: Mapping[str, int]
    callbacks: int
    model_flops: float | None = None
    recomputed_flops: float = 0.0
    open_flops: float = 0.0
    blocks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    remats: int = 0


@dataclass(frozen=True)
class CapturedProgram:
    """A program of the step, lowered for TPU.

    Attributes:
        program: The lowered program.
        calls: How often one step calls it.
        about: Its row in the list of programs.
        argument_types: The type of each argument, such as "f32[4096,14336]".
        argument_specs: The sharding of each argument, as jax writes it.
        state: Arguments that the program returns in the same shape.
        open_loops: Loops without a constant length.
        source_lines: Whether the program has the user's line numbers.
        evidence: Places of defects that the jaxpr shows; see `find_evidence` of the shim.
    """

    program: Program = field(repr=False)
    calls: int
    about: ListedProgram
    argument_types: tuple[str, ...] = field(repr=False)
    argument_specs: tuple[str, ...] = field(repr=False)
    state: tuple[int, ...] = field(repr=False)
    open_loops: int = 0
    source_lines: bool = True
    evidence: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)

    @property
    def name(self) -> str:
        """The function's name."""
        return self.program.name

    @property
    def devices(self) -> int:
        """Devices that the program spans."""
        return len(self.program.facts.device_order) or 1

    def bytes_on_device(self, number: int) -> int:
        """Return the bytes of an argument on one device."""
        facts = self.program.facts
        return facts.argument_bytes[number] * facts.argument_copies[number] // self.devices


@dataclass(frozen=True)
class Captured:
    """A captured program.

    Attributes:
        slice: The slice it ran for.
        programs: The programs of one step, in the order of their first call.
        listed: All programs that were recorded.
        command: The command that was run.
        versions: Versions of jax and Python in the user's environment.
        processes: Processes of the slice; the program ran as the first of them.
        libtpu_init_args: The compiler flags that the program set for itself.
        reads: Lines that read the value of a recorded array, which is zero: "read" or "decided".
        written: Files that the program opened for writing, the first of `written_count`.
        refused: Addresses that it tried to reach while offline.
        notes: What could not be determined.
        seconds: From the import of jax to the step.
        peak_bytes: Memory of the user's process at its largest; 0 where that was not measured.
    """

    slice: Slice
    programs: tuple[CapturedProgram, ...]
    listed: tuple[ListedProgram, ...] = field(repr=False)
    command: tuple[str, ...]
    versions: Mapping[str, str]
    processes: int
    libtpu_init_args: str = ""
    reads: tuple[Mapping[str, str], ...] = field(default=(), repr=False)
    written: tuple[str, ...] = field(default=(), repr=False)
    written_count: int = 0
    refused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    peak_bytes: int = 0

    @property
    def by_flops(self) -> list[CapturedProgram]:
        """The programs of one step, the heaviest first."""
        return sorted(self.programs, key=lambda program: -program.about.flops)

    def moved_to(self, target: Slice) -> "Captured":
        """Return the capture for another slice, if the program would be the same there.

        Raises:
            CaptureError: The program has a mesh, or kernels for the chip that it saw.
        """
        if target == self.slice:
            return self
        again = f"capture it again with --on {target} -- COMMAND."
        for program in self.programs:
            axes = ", ".join(f"{name}={size}" for name, size in program.program.facts.mesh_axes)
            if axes:
                raise CaptureError(
                    f"{program.name} was captured for {self.slice} with a mesh of {axes} over its "
                    f"devices, and the program would build another one on {target}; {again}"
                )
            if program.about.kernels and target.chip != self.slice.chip:
                raise CaptureError(
                    f"{program.name} was captured for {self.slice}, but its kernels "
                    f"({', '.join(program.about.kernels)}) were traced for {self.slice.chip.name}; "
                    f"{again}"
                )
        note = (
            f"captured for {self.slice}: on {target} a program that asks for the number, kind or "
            "memory of its devices may do something else."
        )
        return replace(self, slice=target, notes=(*self.notes, note))

    def request(self, program: CapturedProgram, options: Mapping[str, Any]) -> CompileRequest:
        """Return the compile request of one program for the slice.

        Raises:
            MeshError: The program spans some devices of the slice, but not all and not one.
        """
        if 1 < program.devices != self.slice.devices:
            raise MeshError(
                f"{program.name} spans {program.devices} devices, but {self.slice} has "
                f"{self.slice.devices}; build its mesh from all of jax.devices(), or choose a "
                f"slice with {program.devices} devices."
            )
        return make_request(
            program.program, self.slice, options=options, libtpu_init_args=self.libtpu_init_args
        )


def read_capture(folder: Path) -> Captured:
    """Read the capture in a folder.

    Raises:
        CaptureError: The folder has no complete capture, or one of another format.
    """
    try:
        data = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        if settings.get("format") != FORMAT:
            raise CaptureError(
                f"{folder} has a capture of format {settings.get('format')}, but this tpukit reads "
                f"{FORMAT}; capture the program again."
            )
        return Captured(
            slice=Slice.parse(settings["on"]),
            programs=tuple(_program(program, folder, data["jax"]) for program in data["programs"]),
            listed=tuple(_listed(program) for program in data["listed"]),
            command=tuple(settings["command"]),
            versions={"jax": data["jax"], "python": data["python"]},
            processes=data["processes"],
            libtpu_init_args=data["libtpu_init_args"],
            reads=tuple(data["reads"]),
            written=tuple(data["written"]),
            written_count=data["written_count"],
            refused=tuple(data["refused"]),
            notes=tuple(data["notes"]),
            seconds=data["seconds"],
            peak_bytes=data.get("peak_bytes", 0),
        )
    except OSError as error:
        raise CaptureError(
            f"{error.filename or folder} cannot be read ({error.strerror}); expected a folder "
            "that `tpukit check --keep` wrote."
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise CaptureError(
            f"{folder} is damaged ({type(error).__name__}: {error}); capture the program again."
        ) from None


def copy_without_flags(folder: Path, to: Path, names: Collection[str]) -> Path:
    """Copy a capture without some of the compiler flags that its program sets; return the copy."""
    shutil.copytree(folder, to)
    data = json.loads((to / RESULT).read_text(encoding="utf-8"))
    data["libtpu_init_args"] = merge_flags(data["libtpu_init_args"], {}, without=names)
    (to / RESULT).write_text(json.dumps(data), encoding="utf-8")
    return to


def _listed(row: Mapping[str, Any]) -> ListedProgram:
    names = ListedProgram.__dataclass_fields__
    found = {name: row[name] for name in names if name in row}
    if isinstance(found["donated"], list):
        found["donated"] = len(found["donated"])
    return ListedProgram(**found)


def _program(row: Mapping[str, Any], folder: Path, jax: str) -> CapturedProgram:
    serialized = (folder / Path(row["file"]).name).read_bytes()
    fingerprint = hashlib.sha256(serialized).hexdigest()
    facts = ProgramFacts(
        name=row["name"],
        argument_names=tuple(row["argument_names"]),
        argument_copies=tuple(row["argument_copies"]),
        donated=tuple(row["donated"]),
        mesh_axes=tuple((axis, size) for axis, size in row["mesh_axes"]),
        fingerprint=fingerprint,
        source_fingerprint=fingerprint,
        axis_types=tuple(row["axis_types"]),
        argument_bytes=tuple(row["argument_bytes"]),
        argument_purposes=tuple(row["purposes"]),
        device_order=tuple(row["device_order"]),
        exported_by=jax,
    )
    return CapturedProgram(
        program=Program(serialized, facts),
        calls=row["calls_per_step"],
        about=_listed(row),
        argument_types=tuple(row["argument_types"]),
        argument_specs=tuple(row["argument_specs"]),
        state=tuple(row["state"]),
        open_loops=row["open_loops"],
        source_lines=row["source_lines"],
        evidence=row.get("evidence", {}),
    )
