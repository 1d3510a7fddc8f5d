"""Programs that are recorded instead of run: their kind, and which of them form a step.

Everything that jax compiles passes through one function, `jax._src.pjit._resolve_and_lower`, with
its jaxpr, shardings and donation: calls, eager operations, `.lower().compile()`, pmap, shard_map,
and the jit of flax, equinox or haliax. That function is the hook. It runs before anything is
lowered for the CPU, so kernels for TPUs never reach the CPU.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from .arrays import mark_derived, recorded_array
from .layout import devices_of, is_unspecified, result_shardings
from .settings import SMALL_BYTES, SMALL_FLOPS, CaptureState, user_line
from .survey import Survey, parameters_of, size_of, survey, updates_of

STEP, GRADIENTS, UPDATE, OTHER = "training step", "gradients", "optimizer update", "other"
_FLOPS_PER_ELEMENT = 100
_STATE_SHARE = 0.4
_SMALL_SHARE = 0.01  # of the largest weight: a scale or a bias
_LAST_KEY = re.compile(r"(\[[^\[\]]*\]|\.[^.\[\]]*)$")


class RecordedProgram:
    """A program that was recorded and not run."""

    def __init__(self, args: list[Any], params: dict[str, Any], found: Survey) -> None:
        jaxpr = params["jaxpr"]
        self.args, self.params, self.found = args, params, found
        self.name: str = params["name"]
        self.line = user_line()
        self.calls = 0
        self.bytes_in = sum(map(size_of, jaxpr.in_avals))
        self.bytes_out = sum(map(size_of, jaxpr.out_avals))
        self.in_shardings: list[Any] = []
        self.committed = False
        for arg, stated in zip(args, params["in_shardings"], strict=True):
            own = getattr(arg, "sharding", None)
            fixed = own is not None and getattr(arg, "committed", getattr(arg, "_committed", False))
            self.committed = self.committed or bool(fixed)
            known = own if fixed or (own is not None and devices_of(own) > 1) else None
            self.in_shardings.append(known if is_unspecified(stated) else stated)
        self._find_state()
        self._shardings: list[Any] | None = None

    def _find_state(self) -> None:
        """Pair results with the arguments they replace, and determine the kind of program."""
        jaxpr, donated = self.params["jaxpr"], self.params["donated_invars"]
        self.parameters: set[int] = parameters_of(jaxpr.jaxpr, {})
        updates = updates_of(jaxpr.jaxpr, {})
        waiting: dict[Any, list[int]] = {}
        for number in sorted(range(len(jaxpr.in_avals)), key=lambda one: not donated[one]):
            aval = jaxpr.in_avals[number]
            waiting.setdefault((aval.shape, aval.dtype), []).append(number)
        self.partner: dict[int, int] = {}
        for place, aval in enumerate(jaxpr.out_avals):
            same = waiting.get((aval.shape, aval.dtype))
            if same:
                wanted = [number for number in same if number in updates[place]]
                self.partner[place] = wanted[0] if wanted else same[0]
                same.remove(self.partner[place])
        self.updated = {number for numbers in updates.values() for number in numbers}
        returned = sum(size_of(jaxpr.in_avals[number]) for number in self.partner.values())
        as_parameters = sum(
            size_of(jaxpr.in_avals[number]) for number in self.state & self.parameters
        )
        elements = sum(size_of(aval) // aval.dtype.itemsize for aval in jaxpr.in_avals)
        heavy = self.found.flops > _FLOPS_PER_ELEMENT * elements
        much = returned > _STATE_SHARE * self.bytes_in
        changed = sum(size_of(jaxpr.in_avals[number]) for number in self.updated)
        if heavy and (self.parameters & self.updated or (much and any(donated))):
            self.kind = STEP
        elif heavy and as_parameters > _STATE_SHARE * self.bytes_out:
            self.kind = GRADIENTS
        elif much and changed > _STATE_SHARE * returned:
            self.kind = UPDATE
        else:
            self.kind = OTHER

    @property
    def argument_names(self) -> list[str]:
        """A readable name for each argument, in jax's notation of the caller's pytree."""
        jaxpr = self.params["jaxpr"]
        names = getattr(jaxpr.jaxpr.debug_info, "arg_names", None) or ()
        if len(names) == len(jaxpr.in_avals):
            return [str(name) for name in names]
        return [f"[{number}]" for number in range(len(jaxpr.in_avals))]

    @property
    def state(self) -> set[int]:
        """The arguments that a result of the same shape replaces."""
        return set(self.partner.values())

    def purposes(self) -> list[str]:
        """Return the purpose of each argument, as far as the data flow shows it."""
        avals = self.params["jaxpr"].in_avals
        others = [number for number in range(len(avals)) if number not in self.state]
        rows = {avals[one].shape[:1] for one in others if one not in self.parameters}
        fed = [one for one in others if one in self.parameters]
        frozen = [one for one in fed if avals[one].shape[:1] not in rows]
        names = []
        beside = {_parent(self.argument_names[one]) for one in self.state & self.parameters}
        beside |= {_parent(path) for path in beside}
        beside.discard("")
        largest = max((size_of(avals[one]) for one in self.parameters), default=0)
        for number, aval in enumerate(avals):
            above = _parent(self.argument_names[number])
            small = size_of(aval) <= _SMALL_SHARE * largest
            sibling = small and (above in beside or _parent(above) in beside)
            floating = getattr(aval.dtype, "kind", "") in ("f", "V")
            if number in self.state & self.parameters or (number in frozen and len(frozen) > 1):
                names.append("parameters")
            elif number in self.state and floating:
                # A scale or a bias feeds no matmul, but is placed beside weights that do.
                names.append("parameters" if sibling else "optimizer state")
            elif number in self.state:
                names.append("arguments")
            else:
                names.append("batch inputs" if self.kind == STEP else "arguments")
        return names

    def shardings(self, capture: CaptureState, lower_here: Callable[[], Any]) -> list[Any]:
        """Return the sharding of each result."""
        if self._shardings is None:
            self._shardings = result_shardings(self, capture, lower_here)
        return self._shardings

    def row(self) -> dict[str, Any]:
        """Return the program's row in a list of programs."""
        return {
            "name": self.name,
            "kind": self.kind,
            "flops": self.found.flops,
            "model_flops": self.found.model_flops,
            "recomputed_flops": self.found.recomputed_flops,
            "open_flops": self.found.open_flops,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "donated": sum(self.params["donated_invars"]),
            "arguments": len(self.args),
            "calls": self.calls,
            "line": self.line,
            "kernels": self.found.kernels,
            "callbacks": self.found.callbacks,
            "blocks": self.found.blocks,
            "remats": self.found.remats,
        }


def _parent(name: str) -> str:
    """Return the path of a pytree without its last key; "" at the top."""
    return _LAST_KEY.sub("", name) if _LAST_KEY.search(name) else ""


class _StandIn:
    """Replaces a lowered or compiled program that is never run."""

    const_args = ()
    _auto_spmd_lowering = False  # older versions of jax read it

    def __init__(
        self, program: RecordedProgram, recorder: "Recorder", lower: Callable[[], Any]
    ) -> None:
        self.program, self.recorder, self.lower_here = program, recorder, lower
        self.unsafe_call = self.call

    def compile(self, *args: Any, **kwargs: Any) -> "_StandIn":
        return self

    def shard_const_args(self, const_args: Any) -> Any:
        return ()

    def create_cpp_call(self, *args: Any, **kwargs: Any) -> None:
        """Return None, so that jax calls this object instead of its own compiled path."""

    create_cpp_call_for_aot = create_cpp_call

    def cost_analysis(self) -> dict[str, float]:
        return {"flops": self.program.found.flops}

    def memory_analysis(self) -> None:
        return None

    def as_text(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def call(self, *args: Any) -> list[Any]:
        self.recorder.called(self.program, args)
        shardings = self.program.shardings(self.recorder.capture, self.lower_here)
        outs = self.program.params["jaxpr"].out_avals
        return [
            recorded_array(aval, sharding, self.program.committed)
            for aval, sharding in zip(outs, shardings, strict=True)
        ]

    def __getattr__(self, name: str) -> Any:
        """Return the attributes of `stages.Lowered` and `stages.Compiled` that callers read."""
        jaxpr = self.program.params["jaxpr"]
        every = range(len(jaxpr.in_avals))
        if name in ("_out_shardings", "output_shardings"):
            return self.program.shardings(self.recorder.capture, self.lower_here)
        known = {
            "in_avals": jaxpr.in_avals,
            "out_avals": jaxpr.out_avals,
            "_kept_var_idx": set(every),
            "_in_shardings": self.program.in_shardings,
            "input_shardings": self.program.in_shardings,
            "compile_args": {
                "global_in_avals": jaxpr.in_avals,
                "global_out_avals": jaxpr.out_avals,
                "kept_var_idx": every,
            },
        }
        if name in known:
            return known[name]
        raise AttributeError(name)


class _Real:
    """A lowered or compiled program that runs on the CPU; marks results of unknown values."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def compile(self, *args: Any, **kwargs: Any) -> "_Real":
        """Return jax's own compiled program, marked like this one."""
        return _Real(self.own.compile(*args, **kwargs))

    def create_cpp_call(self, *args: Any, **kwargs: Any) -> None:
        """Return None, so that every call comes through this object."""

    create_cpp_call_for_aot = create_cpp_call

    def unsafe_call(self, *args: Any) -> Any:
        """Run the program."""
        results = self.own.unsafe_call(*args)
        mark_derived(results, args)
        return results

    def call(self, *args: Any) -> Any:
        """Run the program after jax's check of its arguments."""
        results = self.own.call(*args)
        mark_derived(results, args)
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


class Recorder:
    """Decides whether each program runs, keeps those that do not, and ends the capture.

    Attributes:
        finish: Called when the step is complete; does not return.
    """

    def __init__(self, capture: CaptureState, finish: Callable[[], None]) -> None:
        self.capture, self.finish = capture, finish
        self.programs: dict[Any, RecordedProgram] = {}
        self.order: list[RecordedProgram] = []
        self.trained: list[Any] = []

    def hook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement of jax's own function."""

        def resolve_and_lower(args: Any, *rest: Any, **kwargs: Any) -> Any:
            if kwargs.get("lowering_platforms") is not None or "jaxpr" not in kwargs:
                return original(args, *rest, **kwargs)
            args = list(args)
            found = survey(kwargs["jaxpr"].jaxpr, {})
            if not found.needs_tpu and self._is_small(kwargs, found):
                self.capture.run_for_real += 1
                # An argument without memory may be another argument, too: nothing is given up.
                kept = tuple(False for _ in kwargs["donated_invars"])
                return _Real(original(args, *rest, **{**kwargs, "donated_invars": kept}))
            key = (id(kwargs["jaxpr"]), tuple(map(str, kwargs["in_shardings"])))
            if key not in self.programs:
                self.programs[key] = RecordedProgram(args, kwargs, found)
                self.capture.progress(f"recorded {kwargs['name']}")
            return _StandIn(self.programs[key], self, lambda: original(args, *rest, **kwargs))

        return resolve_and_lower

    def _is_small(self, params: dict[str, Any], found: Survey) -> bool:
        jaxpr = params["jaxpr"]
        if params["name"] == self.capture.program or found.flops > SMALL_FLOPS:
            return False
        return sum(map(size_of, (*jaxpr.in_avals, *jaxpr.out_avals))) <= SMALL_BYTES

    def called(self, program: RecordedProgram, args: Sequence[Any]) -> None:
        """Count a call, and end the capture if it completes a step.

        Separate gradient and optimizer programs form one step, which ends when an update changes an
        array that was a parameter of the gradients.
        """
        program.calls += 1
        self.order.append(program)
        self.capture.events.append(program.name)
        if self.capture.program is not None:
            done = program.name == self.capture.program
        else:
            if program.kind == GRADIENTS:
                self.trained += [args[number] for number in program.state & program.parameters]
            changed = [args[number] for number in program.updated] if program.kind == UPDATE else []
            trained = {id(array) for array in self.trained}
            done = program.kind == STEP or any(id(array) in trained for array in changed)
        if done and program.calls >= self.capture.stop_at_call:
            self.finish()

    def chosen(self) -> dict[RecordedProgram, int]:
        """Return the programs of one step, and how often the step calls each."""
        if self.capture.program is not None:
            named = [one for one in self.programs.values() if one.name == self.capture.program]
            return dict.fromkeys(named[-1:], 1)
        steps = [one for one in self.order if one.kind == STEP]
        if steps:
            return {max(steps, key=lambda one: one.found.flops): 1}
        first = next((i for i, one in enumerate(self.order) if one.kind == GRADIENTS), None)
        if first is not None:
            return dict(Counter(self.order[first:]))
        heaviest = sorted(self.programs.values(), key=lambda one: (one.found.flops, one.bytes_in))
        return dict.fromkeys(heaviest[-1:], 1)
