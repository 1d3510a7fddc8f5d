"""What one offline compile gave: the verdict on memory, the program, the versions."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from ..errors import TPUValidationError, XLACompilationError, did_you_mean
from ..hardware import Figure, Slice
from ..runtime.progress import Progress, silent
from ..shown import Shown
from .dump import Listings
from .hlo import HloModule, count_collectives, count_operations, open_loop, parse_hlo
from .memory import MemoryReport, read_memory
from .program.lowered import ProgramFacts
from .program.sharded_arguments import EXAMPLE

if TYPE_CHECKING:
    from .timeline import StepPrediction

_KERNEL = "kernel/"
_LISTINGS = ("hlo", "assignment", "live_ranges", "devices")
# trace and lower run in the caller's process; the others in the child that holds libtpu.
Stage = Literal["trace", "lower", "compile", "memory", "schedule", "codegen"]
Until = Literal["memory", "schedule", "codegen"]
STAGES: tuple[Stage, ...] = ("trace", "lower", "compile", "memory", "schedule", "codegen")


def parse_until(text: str) -> Until:
    """The stage a user named as the last one wanted.

    Raises:
        TPUValidationError: There is none of that name.
    """
    known: tuple[str, ...] = get_args(Until)
    if text not in known:
        raise TPUValidationError(
            f"a compile cannot stop after {text!r}; use {', '.join(known)}."
            + did_you_mean(text, known)
        )
    return cast(Until, text)


@dataclass(frozen=True)
class CompiledStep(Shown):
    """A program the real TPU compiler scheduled for a slice.

    Attributes:
        stage: How far it went: "schedule", or "codegen" for all the way.
        fits: Whether the compiler accepted it.
        compile_s: From the start of the compiler to this answer, when it was made.
        code_bytes: Of the generated code; None before codegen.
        kernel_listings: The final bundles of each Pallas kernel by the name of its call, when they
            were asked for.
        source_lines: False when the source has changed since, so that its lines cannot be told.
        limit_bytes: HBM of one device that its user allows, where that is less than the chip's.
    """

    facts: ProgramFacts
    slice: Slice
    stage: Stage
    fits: bool
    listings: Listings = field(repr=False)
    compile_s: float
    versions: Mapping[str, str]
    generated_hlo: str | None = field(default=None, repr=False)
    code_bytes: int | None = None
    kernel_listings: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    from_cache: bool = False
    source_lines: bool = True
    limit_bytes: int | None = None

    @property
    def name(self) -> str:
        """The function's name."""
        return self.facts.name

    @property
    def hlo(self) -> str:
        """The scheduled program; after codegen with the compiler's cycle counts in it."""
        return self.generated_hlo or self.listings.hlo

    @cached_property
    def module(self) -> HloModule:
        """The scheduled program, read."""
        return parse_hlo(self.hlo)

    @cached_property
    def memory(self) -> MemoryReport:
        """Where the memory of one device goes."""
        report = read_memory(
            self.listings,
            facts=self.facts,
            target=self.slice,
            fits=self.fits,
            module=self.module if self.generated_hlo is None else None,
            source_lines=self.source_lines,
        )
        if self.limit_bytes is None:
            return report
        usable = min(self.limit_bytes, report.usable_bytes or self.limit_bytes)
        return replace(report, usable_bytes=usable)

    @cached_property
    def flops(self) -> Figure:
        """What one device computes in one run, loops and Pallas kernels included."""
        from .program_flops import program_flops

        return program_flops(self.module)

    @property
    def collectives(self) -> dict[str, int]:
        """How many of each collective the program contains (a loop's body counts once)."""
        return count_collectives(self.module)

    @property
    def operations(self) -> dict[str, int]:
        """How many fusions, kernels, loops and copies it contains (a loop's body counts once)."""
        return count_operations(self.module)

    @cached_property
    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """Place on the torus of each device, in the program's order."""
        return tuple(tuple(device) for device, _ in json.loads(self.listings.devices))

    @cached_property
    def slice_of_device(self) -> tuple[int, ...]:
        """Slice number of each device, in the program's order."""
        return tuple(number for _, number in json.loads(self.listings.devices))

    def predict(
        self,
        *,
        tokens_per_step: int | None = None,
        model_flops: float | None = None,
        compile_kernels: bool = True,
        one_turn: bool = False,
        progress: Progress = silent,
    ) -> "StepPrediction":
        """How long one step takes, by simulating the schedule.

        Args:
            tokens_per_step: For tokens per second.
            model_flops: FLOPs of the model in one step over all devices, for MFU.
            compile_kernels: Whether Pallas kernels that nobody timed before are compiled alone to
                time them; otherwise they are timed by what they state.
            one_turn: Of a program that is a loop without a constant end: one turn of it, without
                what comes before and after.
            progress: Told what is being done.

        Raises:
            XLACompilationError: One turn was asked for, and there is no such loop.
        """
        from .kernel_traces import trace_kernels
        from .timeline import predict_step
        from .timeline.kernels import has_own_model

        traces = trace_kernels(
            self.module,
            self.slice,
            wanted=lambda call: not has_own_model(call),
            compile_missing=compile_kernels,
            progress=progress,
        )
        progress("simulate the schedule")
        return predict_step(
            self._turn() if one_turn else self.module,
            self.slice,
            coordinates=self.coordinates,
            slice_of_device=self.slice_of_device,
            kernel_traces=traces,
            tokens_per_step=tokens_per_step,
            model_flops=model_flops,
        )

    def _turn(self) -> HloModule:
        """The program that one turn of its open loop is."""
        loop = open_loop(self.module)
        if loop is None:
            raise XLACompilationError(
                f"{self.name} has no loop of its own without a constant end, so a turn of it "
                "cannot be timed; predict the whole program."
            )
        return replace(self.module, entry_name=loop.called["body"])

    @property
    def unsplit(self) -> str:
        """A sentence where no argument is split over the slice's devices; "" where one is."""
        devices, facts = self.slice.devices, self.facts
        if devices == 1 or (facts.mesh_axes and min(facts.argument_copies, default=1) < devices):
            return ""
        return (
            f"no argument is split: each of the {devices:,} devices of {self.slice} holds all of "
            f"them. Name mesh axes behind dimensions to split them: --arg '{EXAMPLE}'."
        )

    @property
    def usable_bytes(self) -> int | None:
        """HBM of one device that the compiler lets a program use."""
        return self.memory.usable_bytes

    def within(self, limit_bytes: int) -> "CompiledStep":
        """Return the same compile, judged by less memory than the chip has."""
        fits = self.fits and self.memory.total_bytes <= limit_bytes
        return replace(self, fits=fits, limit_bytes=limit_bytes)

    def seen_as(self, facts: ProgramFacts, target: Slice) -> "CompiledStep":
        """The same compile under the names at hand; the source may have moved since."""
        same_lines = facts.source_fingerprint == self.facts.source_fingerprint
        return replace(self, facts=facts, slice=target, source_lines=same_lines)

    def to_texts(self) -> dict[str, str]:
        """Everything, as texts by name, for a cache."""
        about = {
            "facts": self.facts.to_dict(),
            "slice": str(self.slice),
            "stage": self.stage,
            "fits": self.fits,
            "compile_s": self.compile_s,
            "versions": dict(self.versions),
            "code_bytes": self.code_bytes,
        }
        texts = {name: getattr(self.listings, name) for name in _LISTINGS}
        if self.generated_hlo is not None:
            texts["generated_hlo"] = self.generated_hlo
        texts.update((f"{_KERNEL}{name}", text) for name, text in self.kernel_listings.items())
        return {"about.json": json.dumps(about), **texts}

    @classmethod
    def from_texts(cls, texts: Mapping[str, str]) -> "CompiledStep | None":
        """Read what `to_texts` wrote; None when something is missing or of another make."""
        try:
            about = json.loads(texts["about.json"])
            return cls(
                facts=ProgramFacts.from_dict(about["facts"]),
                slice=Slice.parse(about["slice"]),
                stage=about["stage"],
                fits=about["fits"],
                listings=Listings(**{name: texts[name] for name in _LISTINGS}),
                compile_s=about["compile_s"],
                versions=about["versions"],
                generated_hlo=texts.get("generated_hlo"),
                code_bytes=about["code_bytes"],
                kernel_listings={
                    name.removeprefix(_KERNEL): text
                    for name, text in texts.items()
                    if name.startswith(_KERNEL)
                },
                from_cache=True,
            )
        except (KeyError, TypeError, ValueError):
            return None

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data, without the program text."""
        return {
            "name": self.name,
            "slice": str(self.slice),
            "stage": self.stage,
            "fits": self.fits,
            "memory": self.memory.to_dict(),
            "code_bytes": {"value": self.code_bytes, "origin": "compiler"},
            "flops_per_device": self.flops.to_dict(),
            "collectives": self.collectives,
            "operations": self.operations,
            "unsplit": self.unsplit,
            "compile_s": {"value": round(self.compile_s, 3), "origin": "measured"},
            "from_cache": self.from_cache,
            "versions": dict(self.versions),
        }

    def __rich__(self) -> Any:
        """A report with the verdict first."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, show_header=False, pad_edge=False)
        flops = self.flops
        if flops.value is None:
            table.add_row("FLOPs per device", "–", flops.reason)
        else:
            table.add_row("FLOPs per device", f"{flops.value:.4g}", flops.origin)
        found = ", ".join(f"{count} {kind}" for kind, count in self.collectives.items())
        table.add_row("collectives", found or "none", "compiler")
        made = "measured, when it was compiled" if self.from_cache else "measured"
        table.add_row("compile time", f"{self.compile_s:.1f} s", made)
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        note = [Text(f"note: {self.unsplit}", style="yellow")] if self.unsplit else []
        return Group(self.memory, *note, table, Text(versions, style="dim"))
