"""Which PCIe link a TPU has: what the compiler reckons with, and published runs that need it.

    python benchmarks/host_link.py [--scheduler]

Nobody has published a measured rate between a v6e and its host; the scaling book states 32 GB/s, a
PCIe 4.0 link. Four runs of a public log decide. benchmarks/predict.py does not score them: their
batch or remat is in no results file. A link carries 90 % of its rate.

`--scheduler` asks libtpu alone: how long its scheduler takes a copy to the host for, by generation,
when nothing scales that (it takes every link for a fifth as fast as it is by itself).
"""

import argparse
import dataclasses
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from claims import Claim, report
from predict import DEFAULT_RESULTS
from published_programs import kernel_timer
from published_rows import as_run, load_rows

from tpukit import configure_tpu_environment
from tpukit.compiler import compile_for
from tpukit.compiler.timeline import Machine, predict_step

LOG = "vlasenkoalexey/tpu_performance_autoresearch_wiki, wiki/experiments"
RATES_GBPS = {"PCIe 4.0 x16": 28.0, "PCIe 5.0 x16": 56.0, "no limit": 1e6}


@dataclass(frozen=True)
class Case:
    """A published run, as a change to a row of the results file.

    Attributes:
        source: Its page in the log.
    """

    row: str
    source: str
    step_s: float
    changes: dict[str, Any]


CASES = (
    Case("wk-q8-mt-2k-bs4", "…/maxtext/…/2026-06-13-mt-v002-2k.md", 3.106, {"batch_size": 96}),
    Case(
        "wk-q8-mt-2k-bs4",
        "…/maxtext/…/2026-06-12-mt-v001-base.md",
        3.535,
        {"batch_size": 24, "sequence_length": 8192},
    ),
    Case(
        "wk-q8-jax-8k-bs2",
        "…/jax/…/2026-06-12-v044-context-checkpoint.md",
        2.4369,
        {"remat": "save=qkv_proj offload=attention"},
    ),
    Case(
        "wk-ll8-jax-exp27-bs4",
        "…/jax/…/2026-04-27-jax-exp36-qkv-proj-offloaded-bs4-rejected.md",
        4 * 8192 / 7641,
        {"remat": "offload=qkv_proj"},
    ),
)


COPIED_BYTES = 2**28
SMALLEST = ("v3-8", "v4-8", "v5e-4", "v5p-8", "v6e-4", "7x-2x2x1")
_OP = r'name: "[^"]+"\n\s+opcode: "copy-{}".*?\n\s+id: (\d+)\n'
_WHEN = r"id: {}\n(?:\s+start_timestamp_cycles: ([\d.]+)\n)?\s+end_timestamp_cycles: ([\d.]+)"


def scheduled_gbps(slice_name: str) -> float:
    """The rate at which libtpu's scheduler takes a copy to the host to run."""

    def through_host(x: jax.Array) -> jax.Array:
        kept = jax.device_put(x, jax.memory.Space.Host)
        return jax.device_put(kept, jax.memory.Space.Device) + x @ x

    with tempfile.TemporaryDirectory() as folder:
        compile_for(
            through_host,
            slice_name,
            jax.ShapeDtypeStruct((8192, COPIED_BYTES // 8192 // 4), "float32"),
            options={
                "xla_dump_latency_hiding_schedule": True,
                "xla_tpu_pcie_bandwidth_multiplier": 1.0,
            },
            until="schedule",
            use_cache=False,
            dump_to=Path(folder),
        )
        text = (Path(folder) / "jit_call.schedule.txt").read_text()
    program, _, schedule = text.partition("\ncomputation_schedules {")
    times: list[float] = []
    for end in ("start", "done"):
        op = re.search(_OP.format(end), program, re.DOTALL)
        when = re.search(_WHEN.format(op[1]), schedule) if op else None
        if when is None:
            raise SystemExit(f"libtpu scheduled no copy-{end} for {slice_name}")
        times.append(float(when[2]))
    clock = re.search(r"cycles_per_microsecond: ([\d.]+)", schedule)
    seconds = (times[1] - times[0]) / (float(clock[1] if clock else "nan") * 1e6)
    return COPIED_BYTES / seconds / 1e9


def main() -> None:
    configure_tpu_environment()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheduler", action="store_true", help="ask libtpu instead")
    if parser.parse_args().scheduler:
        for name in SMALLEST:
            report(Claim(f"link to the host by libtpu, {name}", scheduled_gbps(name), "GB/s"))
        return
    rows = {row["id"]: row for row in load_rows(DEFAULT_RESULTS)}
    errors: dict[str, list[float]] = {name: [] for name in RATES_GBPS}
    for case in CASES:
        run = as_run(rows[case.row])
        compiled = compile_for(
            run.workload.replace(**case.changes),
            run.slice,
            mesh=run.mesh,
            options=run.options,
            until="schedule",
        )
        print(f"{LOG}/{case.source}: {case.step_s:.3f} s")
        for name, gbps in RATES_GBPS.items():
            machine = dataclasses.replace(Machine.of(run.slice), host_bytes_per_s=gbps * 1e9)
            step = predict_step(
                compiled.module,
                compiled.slice,
                coordinates=compiled.coordinates,
                slice_of_device=compiled.slice_of_device,
                machine=machine,
                kernel_timer=kernel_timer(run, machine),
            )
            ratio = step.step_time_s / case.step_s
            waits = step.seconds_by_cause.get("host", 0.0)
            print(f"  {name:<13} {step.step_time_s:.3f} s, {ratio:.3f}, {waits:.3f} s waiting")
            errors[name].append(abs(ratio - 1))
    for name, found in errors.items():
        report(Claim(f"mean error with {name}", sum(found) / len(found), ""))


if __name__ == "__main__":
    main()
