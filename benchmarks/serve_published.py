"""The serving model on published throughput of servers.

    python benchmarks/serve_published.py [--only TEXT] [--fit]

Every row of data/published_serving.json is served by its own slice, split, formats and limits, to
a client that sends what was sent: so many requests of such lengths, so many at once. One constant,
the share of the HBM rate that attention over a paged cache reaches (`serving.cache_share` in
rates.toml), was fitted: on the four rows of sglang-jax with Qwen3-8B and on no other (`--fit` does
it again). All rows were in view when it was decided what is counted.
"""

import argparse
import json
import math
import statistics
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from claims import Claim, report
from serving_client import ClientRun, Requests, run_client

from tpukit.hardware import Slice
from tpukit.models import get_preset
from tpukit.planner.cost.served_model import ServedModel
from tpukit.planner.cost.serving_model import ServedFormats, Server, Traffic

DATA = Path(__file__).parent / "data" / "published_serving.json"
BAR = 0.20
WAVES = 4  # requests of a client that says only how many it sends at once, over those


@dataclass(frozen=True)
class PublishedServer:
    """One row: a server, and what a client measured of it."""

    row: dict[str, Any]

    @property
    def slice(self) -> Slice:
        return Slice.parse(self.row["slice"])

    @property
    def requests(self) -> Requests:
        row = self.row
        count = row.get("requests", WAVES * row["concurrency"])
        lengths = (row["prompt_tokens"], row["new_tokens"], row.get("shortest", 1.0))
        return Requests(count=count, prompt=lengths[0], new=lengths[1], shortest=lengths[2])

    @property
    def traffic(self) -> Traffic:
        """Mean lengths, and as many requests as the server works on at once."""
        lengths = self.requests.lengths()
        prompt, new = (round(statistics.mean(side)) for side in zip(*lengths, strict=True))
        asked = Traffic(batch=1, prompt=prompt, new=new)
        most = min(self.row["concurrency"], self.row.get("most_sequences", math.inf))
        return replace(asked, batch=int(min(most, self._room(asked))))

    def _room(self, asked: Traffic) -> float:
        """Sequences of the mean length that its share of HBM has room for: pages are shared."""
        chip = self.slice.chip
        usable = chip.per_device(chip.hbm_usable_bytes).require("serving") * self.slice.devices
        free = usable * self.row.get("hbm_share", 0.9) - self.model.weight_bytes(
            self.formats.weights
        )
        return free // self.model.cache_bytes(asked.mean_context, self.formats.cache)

    @property
    def model(self) -> ServedModel:
        return ServedModel.of(get_preset(self.row["model"]))

    @property
    def formats(self) -> ServedFormats:
        names = ("weights", "cache", "activations")
        return ServedFormats(**{name: self.row[name] for name in names if name in self.row})

    @property
    def server(self) -> Server:
        return Server(self.model, self.slice, self.traffic, self.row["tensor"], self.formats)

    @property
    def tokens_per_s(self) -> float:
        """As published, of the whole slice."""
        return self.row["tokens_per_s_per_chip"] * self.slice.chips


def predict(run: PublishedServer) -> ClientRun:
    """What the client would measure of the server by arithmetic."""
    server, traffic = run.server, run.traffic
    prompt_s = server.prefill().seconds

    @cache
    def step_s(sequences: int) -> float:
        return replace(server, traffic=replace(traffic, batch=sequences)).decode().seconds

    return run_client(
        run.requests,
        at_once=traffic.batch,
        step_s=step_s,
        prompt_s=lambda tokens: prompt_s * tokens / traffic.prompt,
    )


def off(run: PublishedServer) -> float:
    """Predicted tokens a second over published ones, less 1."""
    return predict(run).tokens_per_s / run.tokens_per_s - 1


def line(run: PublishedServer) -> str:
    found, chips = predict(run), run.slice.chips
    token = run.row.get("token_ms")
    beside = "" if token is None else f", {token} ms a token published"
    return (
        f"{run.row['id']:<34} {run.traffic.batch:4d} at once "
        f"{run.row['tokens_per_s_per_chip']:8,.1f} published "
        f"{found.tokens_per_s / chips:8,.1f} tokens/s/chip {100 * off(run):+6.1f} %  "
        f"{1e3 * found.token_s:.1f} ms a token{beside}"
    )


def load(only: str | None = None) -> list[PublishedServer]:
    rows = json.loads(DATA.read_text("utf-8"))["rows"]
    return [PublishedServer(row) for row in rows if not only or only in row["id"]]


def fit(rows: list[PublishedServer]) -> float:
    """The share of the HBM rate by which the rows to fit on are right in the geometric mean."""
    from tpukit.hardware import rates

    fitted = [run for run in rows if run.row.get("fitted")]
    low, high = 0.1, 1.0
    whole = rates.rates_file()
    for _ in range(20):
        share = math.sqrt(low * high)
        entry = {"default": {"value": share, "source": "serving"}, "unit": "", "what": ""}
        rates.rates_file = lambda entry=entry: {**whole, "serving": {"cache_share": entry}}
        rates._load.cache_clear()  # pyright: ignore[reportPrivateUsage]
        error = statistics.mean(math.log(1 + off(run)) for run in fitted)
        low, high = (low, share) if error > 0 else (share, high)
    return math.sqrt(low * high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="rows whose id contains this")
    parser.add_argument("--fit", action="store_true", help="fit the share of HBM anew")
    options = parser.parse_args()
    rows = load(options.only)
    if options.fit:
        print(f"serving.cache_share = {fit(rows):.3f}")
        return
    for run in rows:
        print(line(run), flush=True)
    named = [abs(off(run)) for run in rows if run.row.get("field")]
    today = [run for run in rows if run.row["engine"] != "vllm-2025-09"]
    unseen = [abs(off(run)) for run in today if not run.row.get("fitted")]
    report(
        Claim(
            "serving by arithmetic, named rows: largest error", 100 * max(named), "%", at_most=20
        ),
        Claim("serving by arithmetic, rows not fitted on", len(unseen), ""),
        Claim("the same, median error", 100 * statistics.median(unseen), "%"),
        Claim("the same, largest error", 100 * max(unseen), "%"),
        Claim("the same, rows within 20 %", sum(e <= BAR for e in unseen), "rows"),
    )


if __name__ == "__main__":
    main()
