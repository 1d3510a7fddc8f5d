"""Fit the rates that `tpukit kernel bench` ships with, on measured kernels.

python benchmarks/kernel_rates.py
"""

import hashlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from pathlib import Path

from harness import DATA, Subcommand, read_command_line, run_command

COMMAND_LINE = read_command_line(
    __name__,
    __doc__,
    Subcommand(
        "",
        "",
        options={
            "--timings": {
                "type": Path,
                "default": DATA / "kernel_timings.json.gz",
                "help": "measured rows",
            },
            "--shapes": {"type": int, "default": 5, "help": "to fit on, of each op and chip"},
            "--errors": {"action": "store_true", "help": "of the kernels not fitted on"},
            "--limit": {"type": int, "help": "cases of each op and chip for --errors"},
            "--on": {"action": "append", "help": "chips for --errors; the others' stay"},
            "--write": {"action": "store_true", "help": "into calibration.toml"},
        },
    ),
)

import numpy as np
from measured_kernels import MeasuredRow, program_of
from measured_kernels.report import GroupScore, ScoredRow

from tpukit import configure_tpu_environment
from tpukit.errors import TPUError
from tpukit.kernels.timing import (
    Calibration,
    ErrorBand,
    KernelEstimate,
    KernelProfile,
    calibration_of,
    profile_kernel,
    time_profile,
)

RATES_MARK, ERRORS_MARK = "# Fitted ", "# Found "
# tokamax's cross-entropy kernels take minutes to compile.
OPS = ("attention_fwd", "attention_bwd", "ragged_dot")
LARGEST_TILE = 1024 * 2048  # attention in larger tiles takes minutes to compile, too
FOLDS = 5

COMPUTE_FACTORS = (0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2)
TURN_CYCLES = tuple(range(0, 801, 50))
TIE_PULL = 1e-6  # of choices that miss by the same, the one nearest to the compiler's own count
LEAST_ROWS = 5  # for constants, or an error band, of a kind's own
BAND = 90  # per cent of measured times on the good side of each end of a band


def shape_key(row: MeasuredRow) -> str:
    """The same for rows of one shape, whatever chip, mask or type; a product and its gradients."""
    named = ("variant", "has_bias")
    sizes = {name: value for name, value in row.dims.items() if name not in named}
    if row.op == "ragged_dot":
        sizes["k"], sizes["n"] = sorted((sizes["k"], sizes["n"]))
    family = row.op.removesuffix("_fwd").removesuffix("_bwd")
    return json.dumps([family, sizes], sort_keys=True)


def fold_of(row: MeasuredRow) -> int:
    """Which of the folds leaves this shape out of its fit."""
    return int(hashlib.sha256(shape_key(row).encode()).hexdigest(), 16) % FOLDS


def spread(rows: Sequence[MeasuredRow], shapes: int) -> list[MeasuredRow]:
    """Some Pallas rows of each chip and op, of different shapes, from fastest to slowest."""
    groups: dict[tuple[str, str], dict[str, MeasuredRow]] = defaultdict(dict)
    for row in rows:
        if row.op in OPS and row.impl == "pallas_mosaic_tpu" and _tile(row) <= LARGEST_TILE:
            groups[row.device, row.op].setdefault(shape_key(row), row)
    chosen: list[MeasuredRow] = []
    for members in groups.values():
        ordered = sorted(members.values(), key=lambda row: row.measured_us)
        count = min(shapes, len(ordered))
        places = {round(i * (len(ordered) - 1) / max(count - 1, 1)) for i in range(count)}
        chosen += [ordered[place] for place in sorted(places)]
    return chosen


def _tile(row: MeasuredRow) -> int:
    """Scores in one tile of an attention kernel; 0 for others."""
    suffix = "_dkv" if row.op.endswith("_bwd") else ""
    return row.config.get(f"block_q{suffix}", 0) * row.config.get(f"block_kv{suffix}", 0)


@dataclass(frozen=True)
class Followed:
    """A measured row whose program was compiled and run through."""

    row: MeasuredRow
    kind: str
    profile: KernelProfile

    @classmethod
    def of(cls, row: MeasuredRow) -> "Followed":
        """Compile a row's program and run through its kernels.

        Raises:
            TPUError: It cannot be written, compiled or followed.
        """
        program = program_of(row)
        profile = profile_kernel(program.function, program.arguments, row.device)
        if profile.reasons:
            raise TPUError("; ".join(profile.reasons.values()))
        return cls(row, str(program.kind), profile)

    @cached_property
    def parts(self) -> KernelEstimate:
        """Its estimate at the rates in use: how often each kernel runs, and what is around them."""
        return time_profile(self.profile, kind=self.kind)

    def time_us(self, calibration: Calibration) -> float:
        """Its time at the rates of a calibration."""
        rates = calibration.rates(self.profile.chip)
        kernels = sum(
            call.estimate(rates).time_s * self.parts.times[name]
            for name, call in self.profile.calls.items()
        )
        return (kernels + self.parts.surrounding_s) * 1e6

    @property
    def turns(self) -> float:
        """Turns of all its kernels' outermost loops."""
        return self.parts.grid_steps


@dataclass(frozen=True)
class Fitted:
    """The constants of one chip, and of its kinds of kernels, and each row's time without it."""

    chip: str
    calibration: Calibration
    kinds: Mapping[str, Calibration]
    estimated: tuple[ScoredRow, ...]


def fit_rates(followed: Sequence[Followed]) -> list[Fitted]:
    """Constants of each chip that has rows."""
    chips: dict[str, list[Followed]] = defaultdict(list)
    for one in followed:
        chips[one.profile.chip.name].append(one)
    return [_fit_chip(name, members) for name, members in sorted(chips.items())]


def _fit_chip(chip: str, members: Sequence[Followed]) -> Fitted:
    table = _Table(members)
    calibration, held_out = table.fit(range(len(members)))
    estimated: list[ScoredRow] = []
    kinds: dict[str, Calibration] = {}
    for kind in sorted({one.kind for one in members}):
        own = [number for number, one in enumerate(members) if one.kind == kind]
        timed = [held_out[number] for number in own]
        if len(own) >= LEAST_ROWS:
            kinds[kind], timed = table.fit(own)
        estimated += timed
    return Fitted(chip, calibration, kinds, tuple(estimated))


class _Table:
    """The times of a chip's rows by every choice of constants."""

    def __init__(self, members: Sequence[Followed]) -> None:
        self._members = members
        start = replace(calibration_of(members[0].profile.chip.name), turn_cycles=0.0)
        self._choices = [replace(start, compute_factor=factor) for factor in COMPUTE_FACTORS]
        still = np.array([[one.time_us(choice) for choice in self._choices] for one in members])
        clock_hz = members[0].profile.chip.clock_ghz.require("fitting rates") * 1e9
        turning = np.array([one.turns for one in members]) * 1e6 / clock_hz
        measured = np.array([one.row.measured_us for one in members])
        self._times = still[:, :, None] + turning[:, None, None] * np.array(TURN_CYCLES)
        self._misses = np.abs(np.log(self._times / measured[:, None, None]))
        self._pull = TIE_PULL * np.abs(np.log(COMPUTE_FACTORS))
        self._folds = np.array([fold_of(one.row) for one in members])

    def fit(self, numbers: Sequence[int]) -> tuple[Calibration, list[ScoredRow]]:
        """The constants with the smallest mean error, and each row's time without its shape."""
        rows = np.array(numbers)
        timed: dict[int, float] = {}
        for fold in range(FOLDS):
            rate, turn = self._best(rows[self._folds[rows] != fold])
            for row in rows[self._folds[rows] == fold]:
                timed[int(row)] = float(self._times[row, rate, turn])
        rate, turn = self._best(rows)
        estimated = [self._held_out(row, timed[row]) for row in numbers]
        chosen = replace(self._choices[rate], turn_cycles=float(TURN_CYCLES[turn]))
        return chosen, estimated

    def _held_out(self, number: int, time_us: float) -> ScoredRow:
        one = self._members[number]
        chip = one.profile.chip.name
        return ScoredRow(one.row, chip, one.kind, time_us, None, None, in_view=False)

    def _best(self, rows: np.ndarray) -> tuple[int, int]:
        """The numbers of the best choice and turn; the default where there is no row."""
        missed = self._misses[rows].mean(axis=0) if len(rows) else np.zeros((1, len(TURN_CYCLES)))
        missed = missed + self._pull[:, None]
        return divmod(int(missed.argmin()), len(TURN_CYCLES))


def by_op(rows: Sequence[ScoredRow]) -> list[GroupScore]:
    """A score for each op of one chip."""
    members: dict[str, list[ScoredRow]] = defaultdict(list)
    for one in rows:
        members[one.row.op].append(one)
    return [GroupScore.of(op, own[0].chip, own) for op, own in sorted(members.items())]


def error_bands(rows: Iterable[ScoredRow]) -> dict[str, list[ErrorBand]]:
    """How far estimates of kernels are off, by chip: of all kinds, and of each with enough rows."""
    chips: dict[str, dict[str, list[ScoredRow]]] = defaultdict(lambda: defaultdict(list))
    for one in rows:
        if one.kind is not None:
            chips[one.chip][one.kind].append(one)
    bands: dict[str, list[ErrorBand]] = {}
    for chip, kinds in sorted(chips.items()):
        together = [one for own in kinds.values() for one in own]
        if len(together) < LEAST_ROWS:
            continue
        enough = [own for _, own in sorted(kinds.items()) if LEAST_ROWS <= len(own) < len(together)]
        bands[chip] = [_band(own) for own in (together, *enough)]
    return bands


def _band(rows: Sequence[ScoredRow]) -> ErrorBand:
    shares = np.array([one.row.measured_us / one.estimate_us for one in rows])
    low, high = np.percentile(shares, [100 - BAND, BAND])
    median = float(np.median([one.error for one in rows]))
    kinds = Counter(sorted(str(one.kind) for one in rows))
    return ErrorBand(median, max(0.0, 1 - float(low)), max(0.0, float(high) - 1), kinds)


def rates_as_toml(fitted: Sequence[Fitted]) -> str:
    """The constants, and the rows they stand on."""
    ids = sorted(one.row.id for chip in fitted for one in chip.estimated)
    lines = [
        f"{RATES_MARK}{date.today().isoformat()} by `benchmarks/kernel_rates.py --write` on Pallas",
        "# kernels of tokamax 0.0.12 that were timed on real chips: these rows of",
        "# benchmarks/data/kernel_timings.json.gz.",
        "[fitted_on]",
        "rows = [",
        *(f"  {', '.join(map(json.dumps, ids[i : i + 4]))}," for i in range(0, len(ids), 4)),
        "]",
    ]
    for one in fitted:
        named = {one.chip: one.calibration}
        named.update((f"{one.chip}.kinds.{kind}", own) for kind, own in one.kinds.items())
        for name, constants in named.items():
            lines += [
                "",
                f"[{name}]",
                f"compute_factor = {constants.compute_factor:g}",
                f"turn_cycles = {constants.turn_cycles:g}",
            ]
    return "\n".join(lines) + "\n"


def errors_as_toml(bands: Mapping[str, Sequence[ErrorBand]]) -> str:
    """How far estimates at those rates are off."""
    lines = [
        f"{ERRORS_MARK}{date.today().isoformat()} by `benchmarks/kernel_rates.py --errors` on rows",
        "# of the same file that the rates were not fitted on.",
    ]
    for chip, own in bands.items():
        for band in own:
            lines += [
                "",
                "[[errors]]",
                f'chip = "{chip}"',
                f"kinds = {{ {', '.join(f'{kind} = {n}' for kind, n in band.kinds.items())} }}",
                f"median = {band.median:.3f}",
                f"below = {band.below:.3f}",
                f"above = {band.above:.3f}",
            ]
    return "\n".join(lines) + "\n"


CHIPS = ("7x", "v5e", "v5p", "v6e")
RATES_FILE = Path(__file__).parents[1] / "src/tpukit/compiler/bundles/data/calibration.toml"


def run_fit(options):
    """Fit the rates on some measured kernels and judge them by others.

    Each kernel is compiled and followed as the command does it, which says exactly what it does;
    two constants of a chip say how fast that is done. They are fitted on a few
    shapes of each op and chip; `--errors` says how far they leave the kernels they were not fitted
    on. `--write` puts either into src/tpukit/compiler/bundles/data/calibration.toml.
    """
    configure_tpu_environment()  # or jax would look for a TPU in this process
    head, _, rest = RATES_FILE.read_text().partition(RATES_MARK)
    rates, _, errors = rest.partition(ERRORS_MARK)
    if options.errors:
        errors = find_errors(options.timings, options.limit, options.on)
    else:
        rates = fit(options.timings, options.shapes)
    if options.write:
        RATES_FILE.write_text(
            f"{head}{RATES_MARK}{rates.removeprefix(RATES_MARK).rstrip()}\n\n"
            f"{ERRORS_MARK}{errors.removeprefix(ERRORS_MARK)}"
        )
    return 0


def fit(timings: Path, shapes: int) -> str:
    """Fit on some shapes; the constants as they are kept."""
    from measured_kernels import read_timings

    followed: list[Followed] = []
    for row in spread(read_timings(timings).rows, shapes):
        try:
            followed.append(Followed.of(row))
            print(f"followed {row.describe()}", flush=True)
        except TPUError as error:
            print(f"left out {row.describe()}: {error}", flush=True)
    fitted = fit_rates(followed)
    print("\nKernels timed (model) by rates that were fitted on other shapes, against measured")
    for chip in fitted:
        for score in by_op(chip.estimated):
            rank = "-" if score.spearman is None else f"{score.spearman:.2f}"
            print(
                f"{score.op:<14} on {score.chip:<4} {score.rows:3d} kernels, "
                f"median error {score.median_error:6.1%}, Spearman {rank}"
            )
    return rates_as_toml(fitted)


def find_errors(timings: Path, limit: int | None, chips: list[str] | None) -> str:
    """Score the kernels that the rates were not fitted on; the errors as they are kept."""
    from measured_kernels import Timings, read_timings, score_timings
    from measured_kernels.score import newest, sample

    from tpukit.compiler.bundles.trace import error_bands_of

    read = read_timings(timings)
    programs = {row.program_key for row in sample(newest(read.rows)[0], limit) if row.is_pallas}
    kernels = tuple(row for row in read.rows if row.program_key in programs)
    score = score_timings(
        Timings(read.path, kernels, ()),
        chips=chips or (),
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    bands = error_bands(score.unseen)
    for chip, own in bands.items():
        for band in own:
            low, high = 1 - band.below, 1 + band.above
            print(
                f"{chip}: {', '.join(f'{n} {kind}' for kind, n in band.kinds.items())}, "
                f"median error {band.median:.1%}, "
                f"measured {low:.2f} to {high:.2f} of the estimate"
            )
    others = [chip for chip in CHIPS if chips and chip not in chips]
    stay = {chip: error_bands_of(chip) for chip in others}
    return errors_as_toml(dict(sorted({**stay, **bands}.items())))


if __name__ == "__main__":
    run_command(COMMAND_LINE, run_fit)
