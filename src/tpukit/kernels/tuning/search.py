"""Search an op's block sizes for one case on one generation, without a TPU or on the one here."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from ...compiler.request import compiler_versions
from ...errors import TPUError, TPUKernelError
from ...hardware import get_chip
from ..op import Blocks, Direction, KernelCase, Op
from ..timing.bench import Tell, Values, estimate, kind_of
from ..timing.calibration import error_of
from ..vmem import vmem_capacity_bytes
from .result import Origin, Trial, TuningResult

# Estimates rank blocks no finer than this: the default stays unless it is beaten by more.
LEAST_GAIN = 0.02
FORWARD_CONTENDERS = 3  # of the fastest forward passes, whose gradients are timed too
Timer = Callable[[Blocks, Direction], float]


def tune_op(
    op: Op,
    case: KernelCase,
    chip: str,
    *,
    gradient: bool = True,
    seconds: float | None = None,
    timer: Timer | None = None,
    origin: Origin = "model",
    values: Values | None = None,
    tell: Tell | None = None,
    use_cache: bool = True,
) -> TuningResult:
    """Find the block sizes that make a case fastest on a generation.

    First every candidate's forward pass is timed. Those that leave it as it is differ in what the
    backward pass takes: they are then timed by both passes, on top of the best forward blocks, and
    so are the fastest forward blocks themselves. Both passes together decide.

    Args:
        op: Its `block_space` gives the candidates, its default blocks the one to beat.
        case: The shapes; the choice is kept for all of their bucket.
        chip: The generation.
        gradient: Whether to tune the backward pass too, where the op has one.
        seconds: Stop trying after this long.
        timer: Seconds of a choice in a direction; by default the static estimate.
        origin: Where the timer's seconds come from.
        values: Of integer arguments that decide what the kernel does, such as group sizes.
        tell: Called with what is tried next.
        use_cache: Whether estimates on disk will do, and these are kept.

    Raises:
        TPUKernelError: No choice of blocks compiles.
        SliceError: There is no such generation.
    """
    chip = get_chip(chip).name
    timer = timer or _static(op, case, chip, values, use_cache)
    search = _Search(op, case, chip, timer, tell, seconds)
    default = op.default_blocks(case, chip)
    capacity = vmem_capacity_bytes(chip)
    space = [blocks for blocks in op.block_space(case, chip) if blocks != default]
    fitting = [blocks for blocks in space if op.vmem_bytes(case, blocks) <= capacity]
    # The nearest to the default first: a budget of time then ends a search, not a lottery.
    for blocks in (default, *sorted(fitting, key=lambda blocks: len(_changes(blocks, default)))):
        search.forward(blocks)
    chosen = search.best_forward(default)
    if gradient and op.differentiable:
        chosen = _tune_backward(search, default, chosen)
    error = error_of(chip, kind_of(op, "forward"))
    band = f"-{error.below:.0%} +{error.above:.0%}" if error else "not known: none measured"
    return TuningResult(
        op=op.name,
        case=case.name,
        bucket=op.bucket(case),
        chip=chip,
        origin=origin,
        chosen=search.trials[_key(chosen)],
        default=search.trials[_key(default)],
        trials=tuple(search.trials.values()),
        too_large=len(space) - len(fitting),
        left=search.left,
        error="none: measured here" if origin == "measured" else band,
        versions=compiler_versions(),
    )


def _tune_backward(search: "_Search", default: Blocks, chosen: Blocks) -> Blocks:
    """Choose by both passes: among the fastest forward blocks, and with other backward sizes.

    Sizes that serve both passes may speed one up and slow the other down.
    """
    same_forward = search.trials[_key(default)].forward_s
    backward_only = [
        trial.blocks
        for trial in search.trials.values()
        if trial.forward_s == same_forward and _key(trial.blocks) != _key(default)
    ]
    for blocks in (default, chosen, *search.fastest(FORWARD_CONTENDERS)):
        search.gradient(blocks)
    for blocks in backward_only:
        changes = _changes(blocks, default)
        search.gradient(dataclasses.replace(chosen, **changes))  # pyright: ignore[reportArgumentType]  blocks are frozen dataclasses
    return search.best_gradient(default)


class _Search:
    """What was tried so far, within a budget of time."""

    def __init__(
        self,
        op: Op,
        case: KernelCase,
        chip: str,
        timer: Timer,
        tell: Tell | None,
        seconds: float | None,
    ) -> None:
        self._name = f"{op.name} {case.name} on {chip}"
        self._timer = timer
        self._tell = tell
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self.trials: dict[tuple[Any, ...], Trial] = {}
        self.left = 0

    def forward(self, blocks: Blocks) -> None:
        """Time the forward pass with these blocks; the first is tried whatever the budget."""
        if _key(blocks) in self.trials or (self.trials and self._late()):
            return
        self._say("forward", blocks)
        try:
            trial = Trial(blocks, self._timer(blocks, "forward"))
        except TPUError as error:
            trial = Trial(blocks, None, error=str(error))
        self.trials[_key(blocks)] = trial

    def gradient(self, blocks: Blocks) -> None:
        """Time both passes with these blocks."""
        self.forward(blocks)
        trial = self.trials.get(_key(blocks))
        if trial is None or trial.forward_s is None or trial.gradient_s is not None:
            return
        if self._late():
            return
        self._say("both passes", blocks)
        try:
            found = dataclasses.replace(trial, gradient_s=self._timer(blocks, "backward"))
        except TPUError as error:
            found = dataclasses.replace(trial, error=str(error))
        self.trials[_key(blocks)] = found

    def best_forward(self, default: Blocks) -> Blocks:
        """The fastest blocks; the default when nothing beats it by enough."""
        timed = [trial for trial in self.trials.values() if trial.forward_s is not None]
        if not timed:
            reasons = {trial.error for trial in self.trials.values()}
            raise TPUKernelError(
                f"{self._name}: none of {len(self.trials)} choices of blocks has a time: "
                f"{min(reasons, key=len)}"
            )
        best = min(timed, key=lambda trial: trial.forward_s or 0.0)
        usual = self.trials[_key(default)].forward_s
        beaten = usual is None or (best.forward_s or 0.0) < usual * (1 - LEAST_GAIN)
        return best.blocks if beaten else default

    def fastest(self, most: int) -> list[Blocks]:
        """The blocks with the fastest forward passes."""
        timed = [trial for trial in self.trials.values() if trial.forward_s is not None]
        timed.sort(key=lambda trial: trial.forward_s or 0.0)
        return [trial.blocks for trial in timed[:most]]

    def best_gradient(self, default: Blocks) -> Blocks:
        """The blocks whose passes together are fastest, with the default to beat."""
        timed = [trial for trial in self.trials.values() if trial.gradient_s is not None]
        usual = self.trials[_key(default)].gradient_s
        if not timed:
            return default
        best = min(timed, key=lambda trial: trial.gradient_s or 0.0)
        beaten = usual is None or (best.gradient_s or 0.0) < usual * (1 - LEAST_GAIN)
        return best.blocks if beaten else default

    def _late(self) -> bool:
        late = self._deadline is not None and time.monotonic() > self._deadline
        self.left += late
        return late

    def _say(self, what: str, blocks: Blocks) -> None:
        if self._tell is not None:
            sizes = " ".join(f"{name}={size}" for name, size in blocks.to_dict().items())
            self._tell(f"{self._name}, {what}: {sizes}")


def _static(op: Op, case: KernelCase, chip: str, values: Values | None, use_cache: bool) -> Timer:
    def timer(blocks: Blocks, direction: Direction) -> float:
        found = estimate(
            op, case, chip, blocks, direction=direction, values=values, use_cache=use_cache
        )
        if found.time_s is None:
            raise TPUKernelError(found.reason)
        return found.time_s

    return timer


def _changes(blocks: Blocks, default: Blocks) -> dict[str, Any]:
    usual = default.to_dict()
    return {name: size for name, size in blocks.to_dict().items() if size != usual.get(name)}


def _key(blocks: Blocks) -> tuple[Any, ...]:
    return tuple(sorted(blocks.to_dict().items()))
