"""Predicted against published step times, beside a baseline that compiles nothing.

    python benchmarks/predict.py --results FILE [--only TEXT]

Every constant of the model comes from single ops and public microbenchmarks
(src/tpukit/compiler/timeline/data/constants.toml); none is fitted to a step, so nothing has to
be left out when a generation is scored. The baseline knows each generation's mean MFU over the
other rows and nothing else.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path

from claims import Claim, report
from published_rows import NotExpressible, PublishedRun, as_run, load_rows

from tpukit import configure_tpu_environment
from tpukit.compiler import compile_for
from tpukit.errors import TPUError

DEFAULT_RESULTS = Path(__file__).parent / "data" / "published_results.json"


def predicted_s(run: PublishedRun) -> float:
    """The step time our model gives the row's own program."""
    compiled = compile_for(
        run.workload,
        run.slice,
        mesh=run.mesh,
        dcn_mesh_shape=run.dcn_mesh_shape,
        options=run.options,
        until="schedule",
    )
    prediction = compiled.predict()
    shares = {cause: round(s, 3) for cause, s in prediction.seconds_by_cause.items() if s > 1e-3}
    gib = compiled.memory.total_bytes / 2**30
    fits = "fits" if compiled.fits else "DOES NOT FIT"
    print(f"    {fits} {gib:.2f} GiB; {shares} {' '.join(prediction.caveats)}")
    return prediction.step_time_s


def baseline_s(run: PublishedRun, runs: list[PublishedRun]) -> float | None:
    """The step time the generation's mean MFU gives, this row left out."""
    others = [
        other.mfu for other in runs if other.slice.chip == run.slice.chip and other.name != run.name
    ]
    return run.model_flops / (statistics.mean(others) * run.peak_flops) if others else None


def rank_correlation(pairs: list[tuple[float, float]]) -> float:
    """Spearman's rho."""

    def ranks(values: list[float]) -> list[float]:
        order = sorted(values)
        return [order.index(value) + (order.count(value) - 1) / 2 for value in values]

    left, right = (ranks([pair[side] for pair in pairs]) for side in (0, 1))
    return statistics.correlation(left, right)


def main() -> None:
    configure_tpu_environment()  # or jax would look for a TPU in this process
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=DEFAULT_RESULTS)
    parser.add_argument("--only", help="rows whose id contains this")
    parser.add_argument("--save", type=Path, help="write every row's figures here as JSON")
    options = parser.parse_args()
    runs: list[PublishedRun] = []
    for row in load_rows(options.results, only=options.only):
        try:
            runs.append(as_run(row))
        except NotExpressible as reason:
            print(f"left out {row['id']}: {reason}")
    seen: dict[str, float] = {}
    for run in runs:
        started = time.perf_counter()
        try:
            seen[run.name] = predicted_s(run)
        except TPUError as error:
            print(f"{run.name}: no prediction: {error}")
            continue
        ratio = seen[run.name] / run.step_time_s
        spent = time.perf_counter() - started
        times = f"published {run.step_time_s:8.3f} s  predicted {seen[run.name]:8.3f} s"
        print(f"{run.name:<32} {times}  ratio {ratio:.3f}  ({spent:.0f} s)", flush=True)
    score(runs, seen)
    if options.save:
        rows = [
            {"id": run.name, "published_s": run.step_time_s, "predicted_s": seen.get(run.name)}
            for run in runs
        ]
        options.save.write_text(json.dumps(rows, indent=1))


def score(runs: list[PublishedRun], seen: dict[str, float]) -> None:
    """Print errors and rank correlation per generation and over all, beside the baseline."""
    by_generation: dict[str, list[PublishedRun]] = defaultdict(list)
    for run in runs:
        if run.name in seen:
            by_generation[run.slice.chip.name].append(run)
    scored = [run for members in by_generation.values() for run in members]
    for name, members in [*by_generation.items(), ("all", scored)]:
        if not members:
            continue
        errors = [abs(seen[run.name] / run.step_time_s - 1) for run in members]
        guesses = [(baseline_s(run, scored), run) for run in members]
        base = [abs(guess / run.step_time_s - 1) for guess, run in guesses if guess]
        print(f"\n{name}: {len(members)} rows")
        report(
            Claim("  median error", statistics.median(errors), "", at_most=0.06),
            Claim("  mean error", statistics.mean(errors), "", at_most=0.08),
            Claim("  largest error", max(errors), "", at_most=0.20),
        )
        if base:
            report(Claim("  mean error of the baseline", statistics.mean(base), ""))
        if name != "all" and len(members) > 2:
            pairs = [
                (run.model_flops / seen[run.name] / run.peak_flops, run.mfu) for run in members
            ]
            report(Claim("  rank correlation of MFU", rank_correlation(pairs), "", at_least=0.8))


if __name__ == "__main__":
    main()
