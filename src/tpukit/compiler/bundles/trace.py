"""A kernel's run on every core of a device, and its duration at given rates."""

import tomllib
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files

from ...errors import XLACompilationError
from ...hardware import Chip, get_chip
from ...hardware.rates import ChipRates
from ...plain_data import JsonMapping, JsonObject
from ...shown import Facts
from .core_run import DEFAULT_STEP_LIMIT, GRANULE_BYTES, CoreRun, Transfer, run_program
from .listing import parse_listing
from .units import UNITS, core_of


@dataclass(frozen=True)
class TransferRates:
    """Cost of transfers, in cycles of the core.

    Attributes:
        bytes_per_cycle: HBM traffic of this core, both directions together.
        latency_cycles: From sending the last byte until the core sees the semaphore.
        issue_cycles: Core cycles to start a transfer.
    """

    bytes_per_cycle: float
    latency_cycles: float
    issue_cycles: float


@dataclass(frozen=True)
class Traffic:
    """The total traffic and waiting time of one core's transfers."""

    stall_cycles: float
    issue_cycles: float
    bytes_in: int
    bytes_out: int


def replay(
    transfers: Sequence[Transfer], rates: TransferRates, *, compute_factor: float = 1.0
) -> Traffic:
    """Replay a core's transfers against the compute time between them.

    Args:
        transfers: The recorded transfers.
        rates: Cost of the transfers.
        compute_factor: Real compute time over the recorded cycles.

    Raises:
        XLACompilationError: A wait expects more bytes than were ever sent.
    """
    behind = stalled = issuing = queue_free = 0.0
    moved = {"in": 0, "out": 0}
    under_way: defaultdict[int, deque[tuple[int, float]]] = defaultdict(deque)
    for transfer in transfers:
        now = transfer.cycle * compute_factor + behind
        if transfer.direction == "signal":
            under_way[transfer.flag].append((transfer.granules, now))
            continue
        if transfer.direction != "wait":
            finished = now
            if transfer.direction != "local":
                size = transfer.granules * GRANULE_BYTES
                moved[transfer.direction] += size
                queue_free = max(now, queue_free) + size / rates.bytes_per_cycle
                finished = queue_free
            under_way[transfer.flag].append((transfer.granules, finished + rates.latency_cycles))
            issuing += rates.issue_cycles
            behind += rates.issue_cycles
            continue
        arrived = _await(under_way[transfer.flag], transfer.granules)
        if arrived > now:
            stalled += arrived - now
            behind += arrived - now
    return Traffic(stalled, issuing, moved["in"], moved["out"])


def _await(queue: deque[tuple[int, float]], granules: int) -> float:
    """Return when `granules` have arrived, and take them off the semaphore."""
    arrived = 0.0
    while granules > 0:
        if not queue:
            raise XLACompilationError(
                "the kernel waits for a transfer that was never started: its program was not "
                "followed rightly, so no time is told."
            )
        size, at = queue.popleft()
        arrived = max(arrived, at)
        if size > granules:
            queue.appendleft((size - granules, at))
        granules -= size
    return arrived


_SATURATED = 0.5  # a unit used less than this does not bound a kernel


@dataclass(frozen=True)
class CallRates:
    """Rates that turn a kernel's cycles into time on one device.

    Attributes:
        clock_hz: Clock of the core.
        hbm_bytes_per_s: HBM rate of all its cores together.
        transfer_latency_s: Latency per transfer, in addition to its bytes.
        transfer_issue_cycles: Core cycles to start a transfer.
        compute_factor: Real compute cycles over the compiler's count.
        product_factor: Matmul cycles at peak over the compiler's count.
        turn_cycles: Extra cycles per iteration of the outermost loop.
        launch_s: Extra time per call.
    """

    clock_hz: float
    hbm_bytes_per_s: float
    transfer_latency_s: float
    transfer_issue_cycles: float
    compute_factor: float
    product_factor: float
    turn_cycles: float
    launch_s: float


@dataclass(frozen=True)
class CallEstimate(Facts):
    """One call of a kernel; every figure has origin `model`.

    Attributes:
        cycles: From start to end, on the core that ends last.
        compute_cycles: Cycles of issuing bundles and waiting for results, by the compiler.
        stall_cycles: Cycles of waiting for transfers.
        overhead_cycles: Cycles of starting transfers, loop iterations and the launch.
        hbm_bytes: HBM bytes of all cores, both directions.
        loop_turns: Iterations of the outermost loop, including pipeline fill and drain.
        issued_bundles: Bundles issued by the core that ends last.
        utilisation: Share of the time each unit is used; "HBM" is the share of its rate.
        bound: The unit that is used most, or "latency" when none is used half of the time.
    """

    name: str
    cycles: float
    time_s: float
    compute_cycles: int
    stall_cycles: float
    overhead_cycles: float
    hbm_bytes: int
    loop_turns: int
    issued_bundles: int
    utilisation: Mapping[str, float]
    bound: str
    origin = "model"
    _facts = "* utilisation origin"


@dataclass(frozen=True)
class CallTrace:
    """The recorded run of a kernel's program, independent of any rates.

    Attributes:
        bundle_count: Bundles of its program.
        cores: One run per participating core.
    """

    name: str
    chip: str
    bundle_count: int
    cores: tuple[CoreRun, ...] = field(repr=False)

    @property
    def hbm_bytes(self) -> int:
        """HBM bytes of all cores, both directions."""
        return sum(
            transfer.granules * GRANULE_BYTES
            for core in self.cores
            for transfer in core.transfers
            if transfer.direction in ("in", "out")
        )

    def estimate(self, rates: CallRates) -> CallEstimate:
        """Return the estimated duration at the given rates."""
        return max(
            (self._on_core(run, rates) for run in self.cores), key=lambda found: found.cycles
        )

    def _on_core(self, run: CoreRun, rates: CallRates) -> CallEstimate:
        sharing = max(1, sum(bool(core.transfers) for core in self.cores))
        per_cycle = rates.hbm_bytes_per_s / sharing / rates.clock_hz
        traffic = replay(
            run.transfers,
            TransferRates(
                bytes_per_cycle=per_cycle,
                latency_cycles=rates.transfer_latency_s * rates.clock_hz,
                issue_cycles=rates.transfer_issue_cycles,
            ),
            compute_factor=rates.compute_factor,
        )
        overhead = (
            traffic.issue_cycles
            + run.loop_turns * rates.turn_cycles
            + rates.launch_s * rates.clock_hz
        )
        slots = core_of(self.chip).slots
        products = run.product_cycles / slots["MXU"] * rates.product_factor
        computing = max(run.compute_cycles * rates.compute_factor, products)
        moved = traffic.bytes_in + traffic.bytes_out
        # What a kernel does not wait for has to be moved all the same.
        cycles = max(computing + traffic.stall_cycles + overhead, moved / per_cycle)
        utilisation = {unit: run.busy.get(unit, 0) / slots[unit] / cycles for unit in UNITS}
        utilisation["HBM"] = moved / per_cycle / cycles
        most = max(utilisation, key=lambda unit: utilisation[unit])
        return CallEstimate(
            name=self.name,
            cycles=cycles,
            time_s=cycles / rates.clock_hz,
            compute_cycles=run.compute_cycles,
            stall_cycles=traffic.stall_cycles,
            overhead_cycles=overhead,
            hbm_bytes=self.hbm_bytes,
            loop_turns=run.loop_turns,
            issued_bundles=run.bundles,
            utilisation=utilisation,
            bound=most if utilisation[most] >= _SATURATED else "latency",
        )

    def to_data(self) -> JsonObject:
        """Return everything as plain data, for a cache."""
        return {
            "name": self.name,
            "chip": self.chip,
            "bundle_count": self.bundle_count,
            "cores": [
                {
                    **{key: value for key, value in vars(run).items() if key != "transfers"},
                    "transfers": [
                        [transfer.cycle, transfer.flag, transfer.granules, transfer.direction]
                        for transfer in run.transfers
                    ],
                }
                for run in self.cores
            ],
        }

    @classmethod
    def from_data(cls, data: JsonMapping) -> "CallTrace":
        """Read the data of `to_data`."""
        cores: list[CoreRun] = []
        for run in data["cores"]:
            fields: JsonObject = dict(run)
            fields["transfers"] = tuple(Transfer(*transfer) for transfer in run["transfers"])
            cores.append(CoreRun(**fields))
        return cls(data["name"], data["chip"], data["bundle_count"], tuple(cores))


def trace_call(
    name: str,
    text: str,
    chip: str,
    *,
    tables: Mapping[int, Sequence[int]] | None = None,
    step_limit: int = DEFAULT_STEP_LIMIT,
) -> CallTrace:
    """Run the program of a compiler's listing.

    Args:
        name: The kernel's name in the compiled program.
        text: The listing, `*-final_bundles.txt`.
        chip: The generation it was compiled for.
        tables: Words of its scalar operands, by operand number.
        step_limit: The run is abandoned after this many code segments.

    Raises:
        XLACompilationError: The listing cannot be parsed, or its run depends on unknown values.
    """
    listing = parse_listing(text)
    core = core_of(chip)
    cores = get_chip(chip).cores_per_device if listing.uses_core_id else 1
    try:
        runs = [
            run_program(listing, core, core_number=number, tables=tables, step_limit=step_limit)
            for number in range(cores)
        ]
    except XLACompilationError as error:
        raise XLACompilationError(f"{name}: {error}") from None
    return CallTrace(name, chip, len(listing.bundles), tuple(runs))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The constants of one generation, as `data/calibration.toml` documents them.

    Attributes:
        hbm_efficiency: The value of the chip's rates, so that a kernel and the XLA ops it is
            compared with are timed by the same HBM rate.
    """

    hbm_efficiency: float
    transfer_latency_s: float
    transfer_issue_cycles: float
    compute_factor: float
    turn_cycles: float
    launch_s: float

    def rates(self, chip: Chip) -> CallRates:
        """Return the rates of one device of `chip`."""
        needed = "timing kernels"
        hbm = chip.per_device(chip.hbm_gbps).require(needed) * 1e9
        clock_hz = chip.clock_ghz.require(needed) * 1e9
        peak = chip.per_device(chip.peak("bf16")).require(needed) * 1e12
        counted = core_of(chip.name).flops_per_cycle(chip.mxu_size.require(needed)) * clock_hz
        return CallRates(
            clock_hz=clock_hz,
            hbm_bytes_per_s=hbm * self.hbm_efficiency,
            transfer_latency_s=self.transfer_latency_s,
            transfer_issue_cycles=self.transfer_issue_cycles,
            compute_factor=self.compute_factor,
            product_factor=counted * chip.cores_per_device / peak,
            turn_cycles=self.turn_cycles,
            launch_s=self.launch_s,
        )


@dataclass(frozen=True)
class ErrorBand(Facts):
    """Error of the estimates against measured kernels.

    Attributes:
        median: Median of the absolute relative error.
        below: Nine in ten measured times were at least (1 - below) of the estimate.
        above: Nine in ten measured times were at most (1 + above) of the estimate.
        kinds: Number of measured kernels per kind; the band covers no other kinds.
    """

    median: float
    below: float
    above: float
    kinds: Mapping[str, int]
    origin = "measured"
    _facts = "* kinds rows origin"

    @property
    def rows(self) -> int:
        """Number of measured kernels behind the band."""
        return sum(self.kinds.values())


def calibration_of(chip: str, kind: str | None = None) -> Calibration:
    """Return a generation's fitted constants, or those of an op kind that has its own."""
    tables = _tables()
    fitted: JsonMapping = tables.get(chip, {})
    own: JsonMapping = fitted.get("kinds", {}).get(kind or "", {})
    plain = {key: value for key, value in fitted.items() if key != "kinds"}
    default = Calibration(hbm_efficiency=ChipRates.of(chip).hbm_efficiency, **tables["default"])
    return replace(default, **{**plain, **own})


def error_of(chip: str, kind: str | None = None) -> ErrorBand | None:
    """Return the error band of a generation's estimates, for the kind if enough were measured.

    Otherwise return the band over all measured kinds, which `kinds` names; None if no kernel was
    measured.
    """
    found = error_bands_of(chip)
    own = [band for band in found if list(band.kinds) == [kind]]
    return max(own or found, key=lambda band: len(band.kinds), default=None)


def error_bands_of(chip: str) -> list[ErrorBand]:
    """Return all bands of a generation: over all kinds, and of each kind with enough kernels."""
    return [
        ErrorBand(row["median"], row["below"], row["above"], row["kinds"])
        for row in _tables()["errors"]
        if row["chip"] == chip
    ]


def describe_band(band: ErrorBand | None, kind: str | None) -> str:
    """Describe the possible error of a kernel estimate, and the measurements behind it."""
    if band is None:
        return "not known: none measured"
    measured = ", ".join(f"{count} {name}" for name, count in band.kinds.items())
    shares = f"-{band.below:.0%} +{band.above:.0%}"
    if kind in band.kinds:
        return f"{shares} ({measured} measured)"
    return f"not known: no {kind or 'kernel like it'} measured ({measured}: {shares})"


@cache
def _tables() -> JsonObject:
    text = (files("tpukit.compiler.bundles") / "data" / "calibration.toml").read_text()
    return tomllib.loads(text)
