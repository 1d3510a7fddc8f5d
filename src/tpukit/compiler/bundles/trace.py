"""What one kernel does on every core of a device, and how long that takes at given rates."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...errors import XLACompilationError
from ...hardware import get_chip
from .core_run import DEFAULT_STEP_LIMIT, GRANULE_BYTES, CoreRun, Transfer, run_program
from .listing import parse_listing
from .transfers import TransferRates, replay
from .units import UNITS, core_of

_SATURATED = 0.5  # a unit used less than this does not bound a kernel


@dataclass(frozen=True)
class CallRates:
    """What turns a kernel's cycles into time on one device.

    Attributes:
        clock_hz: Of the core.
        hbm_bytes_per_s: That transfers of all its cores reach together.
        transfer_latency_s: Of one transfer beside its bytes.
        transfer_issue_cycles: What starting one takes on the core.
        compute_factor: Cycles of computing over the compiler's own count of them.
        product_factor: The least that products can take, over the compiler's count: the peak.
        turn_cycles: Extra cycles of each turn of the outermost loop.
        launch_s: Extra time of each call.
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
class CallEstimate:
    """One call of a kernel; every figure has origin `model`.

    Attributes:
        cycles: From start to end, on the core that ends last.
        compute_cycles: Issuing bundles and waiting for results, as the compiler reckons them.
        stall_cycles: Waiting for transfers.
        overhead_cycles: Starting transfers, turns of the loop and the launch.
        hbm_bytes: Moved by all cores, both ways.
        loop_turns: Of the outermost loop: grid steps and those that fill and drain the pipeline.
        issued_bundles: On the core that ends last.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "utilisation": dict(self.utilisation), "origin": "model"}


@dataclass(frozen=True)
class CallTrace:
    """What a kernel's program did, without any rate in it.

    Attributes:
        bundle_count: Bundles of its program.
        cores: One run for each core that has a part in it.
    """

    name: str
    chip: str
    bundle_count: int
    cores: tuple[CoreRun, ...] = field(repr=False)

    @property
    def hbm_bytes(self) -> int:
        """Moved by all cores, both ways."""
        return sum(
            one.granules * GRANULE_BYTES
            for core in self.cores
            for one in core.transfers
            if one.direction in ("in", "out")
        )

    def estimate(self, rates: CallRates) -> CallEstimate:
        """How long it takes at the given rates."""
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

    def to_data(self) -> dict[str, Any]:
        """Everything as plain data, for a cache."""
        return {
            "name": self.name,
            "chip": self.chip,
            "bundle_count": self.bundle_count,
            "cores": [
                {
                    **{key: value for key, value in vars(run).items() if key != "transfers"},
                    "transfers": [
                        [one.cycle, one.flag, one.granules, one.direction] for one in run.transfers
                    ],
                }
                for run in self.cores
            ],
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "CallTrace":
        """Read what `to_data` wrote."""
        cores: list[CoreRun] = []
        for run in data["cores"]:
            fields: dict[str, Any] = dict(run)
            fields["transfers"] = tuple(Transfer(*one) for one in run["transfers"])
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
    """Run the program a compiler's listing describes.

    Args:
        name: The kernel's name in the compiled program.
        text: The listing, `*-final_bundles.txt`.
        chip: The generation it was compiled for.
        tables: Words of its scalar operands, by operand number.
        step_limit: Stretches of code after which the run is given up.

    Raises:
        XLACompilationError: The listing cannot be read, or what it does cannot be told.
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
