"""Four programs, each bound by one thing: what the profiler says of them, and what it costs.

The programs run on whatever device is here (CPU, GPU, TPU). For each: the shares, how much of the
ops' time was judged by FLOPs and bytes of the recorded program, how much of it belongs to no
recorded op, and the largest ops. Then the cost of recording, on the program of products: seconds a
step without a trace, with one, and with one that leaves out Python calls, turn by turn, medians of
rounds; on a busy machine the CPU seconds of the process say more. Last, what a recording costs once:
starting, waiting, writing. On a CPU, communication takes virtual devices:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu python benchmarks/observe_profile.py
    python benchmarks/observe_profile.py --details      # on a GPU or TPU; also what the file holds
"""  # noqa: E501

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax
from bound_programs import compute_step, programs
from claims import Claim, report

from tpukit.observe import TPUProfiler
from tpukit.observe.profiling.judging import KINDS
from tpukit.observe.profiling.profile import Profile

STEPS = 5
TIMED_STEPS, ROUNDS = 20, 7


def record(
    step: Callable[[], object], folder: Path, name: str, *, python_calls: bool
) -> tuple[float, float]:
    """Record a few steps; returns wall and CPU seconds a step."""
    profiler = TPUProfiler(folder, capture_memory=False, python_calls=python_calls)
    with profiler.profile(name):
        return timed(step)


def timed(step: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds a step, waiting for each."""
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(TIMED_STEPS):
        jax.block_until_ready(step())
    ended, cpu_ended = time.perf_counter(), time.process_time()
    return (ended - began) / TIMED_STEPS, (cpu_ended - cpu) / TIMED_STEPS


def show(kind: str, profile: Profile, *, details: bool) -> bool:
    """Print what was found; returns whether it is what the program was made for."""
    analysis = profile.analysis
    found = ", ".join(f"{one} {analysis.shares[one]:.1%}" for one in KINDS)
    verdict = "right" if analysis.largest == kind else "WRONG"
    print(f"{kind:<14} {verdict}: {found}")
    intensity = analysis.judged_by_intensity
    unknown = [op for op in analysis.ops if not op.opcode]
    print(
        f"{'':<14} {analysis.where}, {1e3 * analysis.duration_s:.1f} ms; by intensity "
        f"{'–' if intensity is None else f'{intensity:.0%}'}; against {analysis.roof}; "
        f"{len(unknown)} of {len(analysis.ops)} ops in no recorded program"
    )
    for op in analysis.ops[:3]:
        print(
            f"{'':<14} {op.name[:50]:<50} {op.kind:<13} by {op.by:<9} "
            f"{1e6 * op.seconds:10.1f} us in {op.times:3d}  {op.where}"
        )
    if details:
        show_lines(profile)
    return analysis.largest == kind


def show_lines(profile: Profile) -> None:
    """Print rows, kernels and properties of the file, for whoever meets a new device."""
    for host in profile.recording.hosts:
        print(f"  programs {sorted({str(name) for name in host.programs})}")
        print(f"  host: {Counter(event.name for event in host.host.transfers).most_common(4)}")
        for track in host.devices:
            print(f"  {track.name} {dict(track.properties)}")
            lines = Counter(op.line for op in track.ops)
            for line, count in lines.items():
                names = Counter((op.kernel[:60], op.name) for op in track.ops if op.line == line)
                print(f"    {line}: {count} ops, {names.most_common(4)}")


def overhead() -> dict[str, float]:
    """How much longer a recorded step takes, and what one recording costs beside its steps."""
    step = compute_step()
    jax.block_until_ready(step())
    taken: dict[str, list[tuple[float, float]]] = {"bare": [], "calls": [], "no calls": []}
    beside: list[float] = []
    for number in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            taken["bare"].append(timed(step))
            for name, python_calls in (("calls", True), ("no calls", False)):
                cpu = time.process_time()
                into = Path(folder) / f"{name} {number}"
                taken[name].append(record(step, into, name, python_calls=python_calls))
                steps = TIMED_STEPS * taken[name][-1][1]
                beside.append(time.process_time() - cpu - steps)
    medians = {
        (name, at): statistics.median(one[at] for one in found)
        for name, found in taken.items()
        for at in (0, 1)
    }
    return {
        "a recorded step longer, wall": medians["calls", 0] / medians["bare", 0] - 1,
        "a recorded step longer, CPU": medians["calls", 1] / medians["bare", 1] - 1,
        "the same without Python calls, wall": medians["no calls", 0] / medians["bare", 0] - 1,
        "the same without Python calls, CPU": medians["no calls", 1] / medians["bare", 1] - 1,
        "beside": statistics.median(beside),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--details", action="store_true", help="print what the files hold")
    details = parser.parse_args().details
    print(f"{jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}")
    right = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, step in programs().items():
            profiler = TPUProfiler(Path(folder) / kind)
            with profiler.profile(kind):
                for _ in range(STEPS):
                    step()
            began = time.perf_counter()
            profile = profiler.profiles()[-1]
            right.append(show(kind, profile, details=details))
            page = profiler.generate_report()
            seconds = time.perf_counter() - began
            size = page.stat().st_size / 1e3
            print(f"{'':<14} read, analyzed and written in {seconds:.2f} s, page of {size:.0f} kB")
    if jax.device_count() == 1:
        print("communication  not run: there is one device")
    costs = overhead()
    beside = costs.pop("beside")
    report(
        Claim("programs judged as what they were made for", sum(right), f"of {len(right)}",
              at_least=len(right)),
        *(Claim(what, 100 * share, "%") for what, share in costs.items()),
        Claim("one recording beside its steps, CPU", beside, "s"),
    )  # fmt: skip
    return len(right) - sum(right)


if __name__ == "__main__":
    raise SystemExit(main())
