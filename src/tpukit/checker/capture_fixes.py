"""Changes to a captured program that reduce its memory.

Donation and compiler flags are proved by compiling the recorded program, a larger slice by a new
capture. Changes that only the user can make in their code are advice, with an estimate where
arithmetic gives one.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..capturing.captured import Captured, CapturedProgram
from ..compiler.aot import DEFAULT_TIMEOUT_S, compile_many
from ..compiler.memory import MemoryReport
from ..compiler.program.request import CompileRequest
from ..errors import TPUError
from ..hardware import Slice, list_slices
from ..plain_data import JsonMapping
from ..runtime.progress import Progress, silent
from .fix import Fix, FixList, is_thin, rank
from .job_fixes import amount

CaptureAgain = Callable[[Slice], Captured]
_LARGE_BYTES = 2**20
_LARGE_SHARE = 0.01
_ROOT = re.compile(r"[A-Za-z_]\w*")
_ROWS = re.compile(r"\[(\d+)")
_FOR_MEMORY: JsonMapping = {"xla_latency_hiding_scheduler_rerun": 2}
_OWN_CODE = "only your program's own code can change it"


@dataclass(frozen=True)
class CaptureFixer:
    """Proposes changes to one captured program, and proves those that need no change of its code.

    Attributes:
        options: Compiler options of the check itself.
        again: Captures the same command for another slice; None without a command.
    """

    captured: Captured
    program: CapturedProgram
    memory: MemoryReport
    options: JsonMapping
    again: CaptureAgain | None = None

    def propose(self) -> FixList:
        """Return every change worth trying, those that should fit first, by effort."""
        found = list(self._donation())
        if is_thin(self.memory):
            found += [
                *self._flags(),
                *self._checkpoint(),
                *self._sharding(),
                *self._batch(),
                *self._slice(),
            ]
        return rank([replace(one, usable_bytes=self.memory.usable_bytes) for one in found])

    def prove(
        self,
        proposed: FixList,
        *,
        timeout_s: float | None = None,
        use_cache: bool = True,
        progress: Progress = silent,
    ) -> FixList:
        """Compile the changes that need no change of the user's code."""
        tried = list(proposed.fixes)
        requests: dict[int, CompileRequest] = {}
        for number, one in enumerate(tried):
            try:
                request = self._request(one, progress)
            except TPUError as error:
                tried[number] = one.tried(error)
                continue
            if request is not None:
                requests[number] = request
        if requests:
            progress(f"verifying {len(requests)} fixes, each by a compile")
        answers = compile_many(
            requests.values(),
            until="memory",
            timeout_s=timeout_s or DEFAULT_TIMEOUT_S,
            use_cache=use_cache,
            progress=progress,
        )
        for number, answer in zip(requests, answers, strict=True):
            tried[number] = tried[number].tried(answer)
        return rank(tried)

    def _request(self, fix: Fix, progress: Progress) -> CompileRequest | None:
        """Return the compile that proves a change; None if the change is only advice."""
        if "donate" in fix.changes:
            return self.captured.request(_donating(self.program, self._undonated()), self.options)
        if "flags" in fix.changes:
            return self.captured.request(self.program, {**self.options, **_FOR_MEMORY})
        if "on" in fix.changes and self.again is not None:
            progress(f"run the program again, as if on {fix.changes['on']}")
            captured = self.again(Slice.parse(fix.changes["on"]))
            same = [one for one in captured.programs if one.name == self.program.name]
            return captured.request((same or captured.programs)[0], self.options)
        return None

    def _undonated(self) -> tuple[int, ...]:
        """Return the state arguments that the program replaces but does not donate."""
        facts = self.program.program.facts
        if self.program.about.kind not in ("training step", "optimizer update"):
            return ()
        state = ("parameters", "optimizer state")
        return tuple(
            number
            for number in self.program.state
            if number not in facts.donated and facts.argument_purposes[number] in state
        )

    def _donation(self) -> Sequence[Fix]:
        waiting = self._undonated()
        facts = self.program.program.facts
        size = sum(self.program.bytes_on_device(number) for number in waiting)
        least = _LARGE_SHARE * sum(
            map(self.program.bytes_on_device, range(len(facts.argument_bytes)))
        )
        if size < max(_LARGE_BYTES, least):
            return []
        roots = dict.fromkeys(_root(facts.argument_names[number]) for number in waiting)
        return [
            Fix(
                changes={"donate": ", ".join(roots)},
                cost="the old state cannot be read after the step",
                estimate_reason="results hold other arrays before, so only a compile can tell",
            )
        ]

    def _flags(self) -> Sequence[Fix]:
        text = " ".join(f"--{name}={value}" for name, value in _FOR_MEMORY.items())
        cost = "LIBTPU_INIT_ARGS: the scheduler hides less communication where memory is short"
        reason = "the compiler decides what it saves"
        return [Fix(changes={"flags": text}, cost=cost, estimate_reason=reason)]

    def _checkpoint(self) -> Sequence[Fix]:
        kept = amount(self.memory, "activations")
        if kept < _LARGE_SHARE * self.memory.total_bytes:
            return []
        about = self.program.about
        if not about.remats:
            change, cost = "each layer", "computes the forward pass of each layer a second time"
        elif about.recomputed_flops:
            change = "policy=nothing_saveable"
            cost = "computes more of each layer a second time"
        else:
            change = "a policy that recomputes"
            cost = "the one in use recomputes no matmul: do its names exist in the program?"
        return [
            Fix(
                changes={"jax.checkpoint": change},
                cost=cost,
                estimate_reason="what is kept is decided when the program is differentiated",
                advice=_OWN_CODE,
            )
        ]

    def _sharding(self) -> Sequence[Fix]:
        facts, devices = self.program.program.facts, self.program.devices
        whole = [
            number
            for number, copies in enumerate(facts.argument_copies)
            if copies == devices > 1 and self.program.bytes_on_device(number) > _LARGE_BYTES
        ]
        saved = sum(self.program.bytes_on_device(number) * (1 - 1 / devices) for number in whole)
        if saved < _LARGE_SHARE * self.memory.total_bytes:
            return []
        largest = sorted(whole, key=lambda number: -self.program.bytes_on_device(number))[:3]
        names = ", ".join(facts.argument_names[number] for number in largest)
        more = len(whole) - len(largest)
        return [
            Fix(
                changes={"shard": names + (f" and {more} more" if more else "")},
                cost="gathers or exchanges in the step",
                estimate_bytes=round(self.memory.total_bytes - saved),
                advice=_OWN_CODE,
            )
        ]

    def _batch(self) -> Sequence[Fix]:
        facts = self.program.program.facts
        rows = [
            int(found[1])
            for purpose, text in zip(
                facts.argument_purposes, self.program.argument_types, strict=True
            )
            if purpose == "batch inputs" and (found := _ROWS.search(text)) is not None
        ]
        if not rows or max(rows) < 2 * self.program.devices:
            return []
        moving = amount(self.memory, "activations", "temporaries", "batch inputs")
        if moving // 2 < _LARGE_SHARE * self.memory.total_bytes:
            return []
        return [
            Fix(
                changes={"batch": f"{max(rows) // 2} instead of {max(rows)} rows"},
                cost="fewer examples in a step, so more steps",
                estimate_bytes=self.memory.total_bytes - moving // 2,
                advice=_OWN_CODE,
            )
        ]

    def _slice(self) -> Sequence[Fix]:
        on = self.captured.slice
        if on.num_slices > 1:
            return []
        larger = next(
            (one for one in list_slices(on.chip.name) if one.devices >= 2 * on.devices), None
        )
        if larger is None:
            return []
        reason = "the program decides how it uses more devices"
        return [
            Fix(
                changes={"on": str(larger)},
                cost=f"{larger.chips // on.chips} times the chips",
                estimate_reason=reason,
                advice="" if self.again is not None else "a kept capture is of one slice",
            )
        ]


def _donating(program: CapturedProgram, more: Sequence[int]) -> CapturedProgram:
    """Return a program that donates more of its arguments."""
    own = program.program
    donated = tuple(sorted({*own.facts.donated, *more}))
    mark = hashlib.sha256(repr((own.facts.fingerprint, donated)).encode()).hexdigest()
    facts = replace(own.facts, donated=donated, fingerprint=mark, source_fingerprint=mark)
    return replace(program, program=replace(own, facts=facts))


def _root(name: str) -> str:
    """Return the function parameter that an argument's path starts with."""
    found = _ROOT.match(name)
    return found[0] if found else name
