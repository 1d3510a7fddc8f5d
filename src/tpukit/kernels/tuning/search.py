"""Search an op's block sizes for one case on one generation, by estimates or on this TPU."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...compiler.bundles import describe_band, error_of
from ...compiler.program.request import compiler_versions
from ...errors import TPUError, TPUKernelError, TPUNotAvailableError
from ...hardware import get_chip
from ...hardware.target import current_target
from ...runtime.progress import Progress, silent
from ..blocks.vmem import vmem_capacity_bytes
from ..registry.op import Blocks, Direction, KernelCase, Op
from ..timing.bench import Values, estimate, kind_of
from .result import Origin, Trial, TuningResult

RUNS = 5


def local_chip() -> str:
    """Return the generation of this process's TPU.

    Raises:
        TPUNotAvailableError: There is none.
    """
    platform = jax.default_backend()
    chip = current_target() if platform == "tpu" else None
    if chip is None:
        raise TPUNotAvailableError(
            f"measuring needs a TPU, but this process has {platform} devices; run it on a TPU VM, "
            "or leave --measure out and take the static estimate."
        )
    return chip


def measured_timer(
    op: Op, case: KernelCase, *, values: Values | None = None
) -> Callable[[Blocks, Direction], float]:
    """Return a timer that runs the op here: the median of several runs after a first one.

    Args:
        op: The op to run.
        case: Its shapes.
        values: (case) -> values of integer arguments that decide what the kernel does; by default
            the op's own.

    Raises:
        TPUNotAvailableError: There is no TPU here.
    """
    local_chip()
    known = values or op.values
    given = {} if known is None else known(case)
    arrays = [
        jnp.asarray(given[place]) if place in given else _filled(argument)
        for place, argument in enumerate(case.arguments)
    ]

    def timer(blocks: Blocks, direction: Direction) -> float:
        run = jax.jit(op.bind(case, blocks=blocks, direction=direction))
        jax.block_until_ready(run(*arrays))
        return statistics.median(_seconds(run, arrays) for _ in range(RUNS))

    return timer


def _seconds(run: Callable[..., Any], arrays: list[Any]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(run(*arrays))
    return time.perf_counter() - started


def _filled(argument: jax.ShapeDtypeStruct) -> Any:
    if jnp.issubdtype(argument.dtype, jnp.floating):
        return jax.random.normal(jax.random.key(0), argument.shape, argument.dtype)
    return jnp.ones(argument.shape, argument.dtype)


# Estimates do not rank blocks finer than this, so a choice stays unless it is beaten by more.
LEAST_GAIN = 0.02
FORWARD_CONTENDERS = 2  # fastest forward passes whose gradients are timed too
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
    progress: Progress = silent,
    use_cache: bool = True,
) -> TuningResult:
    """Find the block sizes that make a case fastest on a generation.

    A compile is expensive, so the search climbs: from the default blocks it times the next larger
    and the next smaller value of each size, moves to the fastest, and ends where no step gains. The
    forward pass leads first. Then both passes together decide between its fastest blocks, and lead
    the search over the sizes that only the backward pass has.

    Args:
        op: Its `block_space` gives the values of each size, its default blocks the start.
        case: The shapes; the choice applies to all of their bucket.
        chip: The generation.
        gradient: Whether to tune the backward pass too, where the op has one.
        seconds: Time budget.
        timer: (blocks, direction) -> seconds; by default the static estimate.
        origin: Origin of the timer's seconds.
        values: (case) -> values of integer arguments that decide what the kernel does, such as
            group sizes; by default the op's own.
        progress: Called with the next choice.
        use_cache: Whether to read and keep estimates on disk.

    Raises:
        TPUKernelError: No choice of blocks compiles.
        SliceError: There is no such generation.
    """
    chip = get_chip(chip).name
    timer = timer or _static(op, case, chip, values, use_cache)
    default = op.default_blocks(case, chip)
    search = _Search(op, case, chip, timer, progress, seconds)
    grid = _Grid(op, case, chip, default)
    search.forward(default)
    chosen = _climb_forward(search, grid, default)
    if gradient and op.differentiable:
        chosen = _climb_backward(search, grid, default, chosen)
    kind = kind_of(op, "forward")
    band = describe_band(error_of(chip, kind), kind)
    return TuningResult(
        op=op.name,
        case=case.name,
        bucket=op.bucket(case),
        chip=chip,
        origin=origin,
        chosen=search.trials[_key(chosen)],
        default=search.trials[_key(default)],
        trials=tuple(search.trials.values()),
        too_large=grid.too_large,
        left=len(search.left),
        error="none: measured here" if origin == "measured" else band,
        versions=compiler_versions(),
    )


def _climb_forward(search: "_Search", grid: "_Grid", chosen: Blocks) -> Blocks:
    while True:
        for blocks in grid.beside(chosen):
            search.forward(blocks)
        if not search.timed():
            search.first_that_works(grid.members)
        better = search.fastest_forward(chosen)
        if better == chosen:
            return chosen
        chosen = better


def _climb_backward(
    search: "_Search", grid: "_Grid", default: Blocks, fast_forward: Blocks
) -> Blocks:
    """Choose by both passes, because a size may speed one up and slow the other down."""
    backward_only = [
        name
        for name in grid.sizes
        if any(
            search.forward_s(blocks) == search.forward_s(fast_forward)
            for blocks in grid.beside(fast_forward, [name])
        )
    ]
    for blocks in (default, fast_forward, *search.fastest(FORWARD_CONTENDERS)):
        search.gradient(blocks)
    # Without a time of any backward pass the fastest forward blocks stay, not a default that may
    # have no time at all.
    chosen = search.fastest_gradient(default if search.has_gradient() else fast_forward)
    while True:
        for blocks in grid.beside(chosen, backward_only):
            search.gradient(blocks)
        better = search.fastest_gradient(chosen)
        if better == chosen:
            return chosen
        chosen = better


class _Grid:
    """The values of each size by name, and the choices one step away from another.

    Attributes:
        members: The op's choices that fit in VMEM, the nearest to the default first.
        too_large: How many do not fit.
    """

    def __init__(self, op: Op, case: KernelCase, chip: str, default: Blocks) -> None:
        capacity = vmem_capacity_bytes(chip)
        self._fits = lambda blocks: op.vmem_bytes(case, blocks) <= capacity
        space = list(op.block_space(case, chip))
        fitting = [blocks for blocks in space if self._fits(blocks)]
        self.too_large = len(space) - len(fitting)
        self.members = sorted(fitting, key=lambda blocks: len(_changes(blocks, default)))
        self.sizes: dict[str, list[int]] = {
            name: sorted({blocks.to_dict()[name] for blocks in (default, *fitting)})
            for name in default.to_dict()
        }

    def beside(self, blocks: Blocks, names: Sequence[str] | None = None) -> Iterator[Blocks]:
        """Yield the choices with the next value of one named size; of any by default."""
        for name in self.sizes if names is None else names:
            values = self.sizes[name]
            place = values.index(blocks.to_dict()[name])
            for value in (*values[max(place - 1, 0) : place], *values[place + 1 : place + 2]):
                other = dataclasses.replace(blocks, **{name: value})  # pyright: ignore[reportArgumentType]  blocks are frozen dataclasses
                if self._fits(other):
                    yield other


class _Search:
    """The trials so far, within a time budget."""

    def __init__(
        self,
        op: Op,
        case: KernelCase,
        chip: str,
        timer: Timer,
        progress: Progress,
        seconds: float | None,
    ) -> None:
        self._name = f"{op.name} {case.name} on {chip}"
        self._timer = timer
        self._progress = progress
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self.trials: dict[tuple[Any, ...], Trial] = {}
        self.left: set[tuple[Any, ...]] = set()

    def forward(self, blocks: Blocks) -> None:
        """Time the forward pass with these blocks; the first is timed whatever the budget."""
        if _key(blocks) in self.trials or (self.trials and self._late(blocks)):
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
        if trial.error or self._late(blocks):
            return
        self._say("both passes", blocks)
        try:
            timed = dataclasses.replace(trial, gradient_s=self._timer(blocks, "backward"))
        except TPUError as error:
            timed = dataclasses.replace(trial, error=str(error))
        self.trials[_key(blocks)] = timed

    def forward_s(self, blocks: Blocks) -> float | None:
        """Return the time of a forward pass, if it has one."""
        trial = self.trials.get(_key(blocks))
        return None if trial is None else trial.forward_s

    def timed(self) -> list[Trial]:
        """Return the trials whose forward pass has a time, the fastest first."""
        timed = [trial for trial in self.trials.values() if trial.forward_s is not None]
        return sorted(timed, key=lambda trial: trial.forward_s or 0.0)

    def has_gradient(self) -> bool:
        """Whether any backward pass has a time."""
        return any(trial.gradient_s is not None for trial in self.trials.values())

    def first_that_works(self, candidates: Sequence[Blocks]) -> None:
        """Try choices in order until one has a time.

        Raises:
            TPUKernelError: None has.
        """
        for blocks in candidates:
            self.forward(blocks)
            if self.timed():
                return
        reasons = {trial.error for trial in self.trials.values()}
        raise TPUKernelError(
            f"{self._name}: none of {len(self.trials)} choices of blocks has a time: "
            f"{min(reasons, key=len)}"
        )

    def fastest(self, most: int) -> list[Blocks]:
        """Return the blocks with the fastest forward passes."""
        return [trial.blocks for trial in self.timed()[:most]]

    def fastest_forward(self, chosen: Blocks) -> Blocks:
        """Return the fastest blocks by forward pass; the chosen ones unless clearly beaten."""
        best, usual = self.timed()[0], self.forward_s(chosen)
        beaten = usual is None or (best.forward_s or 0.0) < usual * (1 - LEAST_GAIN)
        return best.blocks if beaten else chosen

    def fastest_gradient(self, chosen: Blocks) -> Blocks:
        """Return the fastest blocks by both passes; the chosen ones unless clearly beaten."""
        timed = [trial for trial in self.trials.values() if trial.gradient_s is not None]
        if not timed:
            return chosen
        usual = self.trials[_key(chosen)].gradient_s
        best = min(timed, key=lambda trial: trial.gradient_s or 0.0)
        beaten = usual is None or (best.gradient_s or 0.0) < usual * (1 - LEAST_GAIN)
        return best.blocks if beaten else chosen

    def _late(self, blocks: Blocks) -> bool:
        late = self._deadline is not None and time.monotonic() > self._deadline
        if late:
            self.left.add(_key(blocks))
        return late

    def _say(self, what: str, blocks: Blocks) -> None:
        sizes = " ".join(f"{name}={size}" for name, size in blocks.to_dict().items())
        self._progress(f"{self._name}, {what}: {sizes}")


def _static(op: Op, case: KernelCase, chip: str, values: Values | None, use_cache: bool) -> Timer:
    def timer(blocks: Blocks, direction: Direction) -> float:
        estimated = estimate(
            op, case, chip, blocks, direction=direction, values=values, use_cache=use_cache
        )
        if estimated.time_s is None:
            raise TPUKernelError(estimated.reason)
        return estimated.time_s

    return timer


def _changes(blocks: Blocks, default: Blocks) -> dict[str, Any]:
    usual = default.to_dict()
    return {name: size for name, size in blocks.to_dict().items() if size != usual.get(name)}


def _key(blocks: Blocks) -> tuple[Any, ...]:
    return tuple(sorted(blocks.to_dict().items()))
