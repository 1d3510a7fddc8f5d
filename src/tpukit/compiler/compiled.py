"""`CompiledStep`: the result of one offline compile, with memory verdict, program and versions."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, cast, get_args

from ..errors import TPUValidationError, XLACompilationError, did_you_mean
from ..hardware import Figure, Slice
from ..plain_data import JsonObject
from ..runtime.progress import Progress, silent
from ..shown import Renderable, Shown
from .dump import Listings
from .hlo import HloModule, count_collectives, count_operations, open_loop, parse_hlo
from .memory import MemoryReport, read_memory
from .program.entry import EXAMPLE
from .program.lowered import ProgramFacts

if TYPE_CHECKING:
    from .timeline import StepPrediction

_KERNEL = "kernel/"
_LISTINGS = ("hlo", "assignment", "live_ranges", "devices")
# trace and lower run in the caller's process; the others in the child that holds libtpu.
Stage = Literal["trace", "lower", "compile", "memory", "schedule", "codegen"]
Until = Literal["memory", "schedule", "codegen"]
STAGES: tuple[Stage, ...] = ("trace", "lower", "compile", "memory", "schedule", "codegen")


def parse_until(text: str) -> Until:
    """Return the last stage that a user asked for.

    Raises:
        TPUValidationError: There is no such stage.
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
    """A program that the real TPU compiler scheduled for a slice.

    Attributes:
        stage: The last stage: "schedule", or "codegen".
        fits: Whether the compiler accepted it.
        compile_s: Duration of the original compile.
        code_bytes: Size of the generated code; None before codegen.
        kernel_listings: The final bundles of each Pallas kernel by the name of its call, if
            requested.
        source_lines: Whether line numbers are valid; False if the source has changed since.
        limit_bytes: The user's own HBM limit per device, if below the chip's.
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
    _facts = (
        "name slice=slice.name stage fits memory flops_per_device=flops collectives operations "
        "unsplit from_cache versions"
    )

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
        """The parsed scheduled program."""
        return parse_hlo(self.hlo)

    @cached_property
    def memory(self) -> MemoryReport:
        """The memory report of one device."""
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
        """FLOPs of one device in one run, including loops and Pallas kernels."""
        from .program_flops import program_flops

        return program_flops(self.module)

    @property
    def collectives(self) -> dict[str, int]:
        """Number of collectives by kind; a loop's body counts once."""
        return count_collectives(self.module)

    @property
    def operations(self) -> dict[str, int]:
        """Number of fusions, kernels, loops and copies; a loop's body counts once."""
        return count_operations(self.module)

    @cached_property
    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """Torus coordinates of each device, in the program's order."""
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
        """Predict the duration of one step by simulating the schedule.

        Args:
            tokens_per_step: Tokens per step, for tokens per second.
            model_flops: FLOPs of the model in one step over all devices, for MFU.
            compile_kernels: Whether to compile Pallas kernels that are not in the cache alone, to
                time them; otherwise their stated costs are used.
            one_turn: For a program that is a loop without a constant end: predict one iteration,
                without the code before and after the loop.
            progress: Called with each stage.

        Raises:
            XLACompilationError: `one_turn` is set, but there is no such loop.
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
        """Return the body of the program's open loop as a program."""
        loop = open_loop(self.module)
        if loop is None:
            raise XLACompilationError(
                f"{self.name} has no loop without a constant end, so one iteration "
                "cannot be timed; predict the whole program."
            )
        return replace(self.module, entry_name=loop.called["body"])

    @property
    def unsplit(self) -> str:
        """A warning if no argument is sharded over the slice's devices; else ""."""
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
        """Return the same compile, judged by a memory limit below the chip's."""
        fits = self.fits and self.memory.total_bytes <= limit_bytes
        return replace(self, fits=fits, limit_bytes=limit_bytes)

    def seen_as(self, facts: ProgramFacts, target: Slice) -> "CompiledStep":
        """Return the same compile with the names of `facts`; the source may have changed since."""
        same_lines = facts.source_fingerprint == self.facts.source_fingerprint
        return replace(self, facts=facts, slice=target, source_lines=same_lines)

    def to_texts(self) -> dict[str, str]:
        """Return everything as texts by name, for a cache."""
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
        """Read the texts of `to_texts`; return None if one is missing or has another format."""
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

    def to_dict(self) -> JsonObject:
        """Return the figures as plain data, without the program text."""
        return {
            **super().to_dict(),
            "code_bytes": {"value": self.code_bytes, "origin": "compiler"},
            "compile_s": {"value": round(self.compile_s, 3), "origin": "measured"},
        }

    def __rich__(self) -> Renderable:
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
