"""The serving model on published throughput of servers.

    python benchmarks/serve_published.py [--only TEXT] [--no-compile] [--fit]

Every row of data/published_serving.json is served by its own slice, split, formats and limits, to
a client that sends what was sent: so many requests of such lengths, so many at once. One constant,
the share of the HBM rate that attention over a paged cache reaches (`serving.cache_share` in
rates.toml), was fitted: on the four rows of sglang-jax with Qwen3-8B and on no other (`--fit` does
it again). All rows were in view when it was decided what is counted.

The rows that a target is stated for are predicted by compiled programs too: prefill and decode of
`tpukit.models.generation` (see serving_programs.py) by their timelines. These read every slot of a
cache, which is a power of two, so that decode is compiled for the two around the mean length and
taken between them; with fewer sequences at the end of a run a step shrinks as by arithmetic.
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
from serving_programs import PublishedPrograms

from tpukit.hardware import Slice
from tpukit.models import get_preset
from tpukit.planner.cost.served_model import ServedModel
from tpukit.planner.cost.serving_model import ServedFormats, Server, ServingTraffic

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
    def traffic(self) -> ServingTraffic:
        """Mean lengths, and as many requests as the server works on at once."""
        lengths = self.requests.lengths()
        prompt, new = (round(statistics.mean(side)) for side in zip(*lengths, strict=True))
        asked = ServingTraffic(batch=1, prompt=prompt, new=new)
        most = min(self.row["concurrency"], self.row.get("most_sequences", math.inf))
        return replace(asked, batch=int(min(most, self._room(asked))))

    def _room(self, asked: ServingTraffic) -> float:
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


@dataclass(frozen=True)
class Times:
    """What a server takes.

    Attributes:
        step_s: Of a step with as many sequences as it works on.
        prompt_token_s: Of one token of a prompt.
    """

    step_s: float
    prompt_token_s: float


def by_arithmetic(run: PublishedServer) -> Times:
    """Times of the serving model."""
    server = run.server
    return Times(server.decode().seconds, server.prefill().seconds / run.traffic.prompt)


def by_compiler(run: PublishedServer) -> Times:
    """Times of compiled programs."""
    traffic = run.traffic
    config = get_preset(run.row["model"])
    programs = PublishedPrograms(config, run.slice, run.row["tensor"], run.formats)
    below = 2 ** int(math.log2(traffic.mean_context))
    beyond = traffic.mean_context / below - 1
    few, many = (programs.decode_s(rows=traffic.batch, slots=n) for n in (below, 2 * below))
    prompt = 2 ** math.ceil(math.log2(traffic.prompt))
    step = few + (many - few) * beyond
    return Times(step, programs.prefill_s(tokens=prompt) / prompt)


def predict(run: PublishedServer, times: Times) -> ClientRun:
    """What the client would measure of the server."""
    server, traffic = run.server, run.traffic
    full = server.decode().seconds

    @cache
    def step_s(sequences: int) -> float:
        fewer = replace(server, traffic=replace(traffic, batch=sequences))
        return times.step_s * fewer.decode().seconds / full

    return run_client(
        run.requests,
        at_once=traffic.batch,
        step_s=step_s,
        prompt_s=lambda tokens: times.prompt_token_s * tokens,
    )


def off(run: PublishedServer, times: Times | None = None) -> float:
    """Predicted tokens a second over published ones, less 1; by arithmetic without times."""
    return predict(run, times or by_arithmetic(run)).tokens_per_s / run.tokens_per_s - 1


def line(run: PublishedServer, times: Times) -> str:
    found, chips = predict(run, times), run.slice.chips
    token = run.row.get("token_ms")
    beside = "" if token is None else f", {token} published"
    return (
        f"{run.row['id']:<34} {run.traffic.batch:4d} at once "
        f"{run.row['tokens_per_s_per_chip']:8,.1f} published "
        f"{found.tokens_per_s / chips:8,.1f} tokens/s/chip {100 * off(run, times):+6.1f} %  "
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
    parser.add_argument("--no-compile", action="store_true", help="arithmetic alone")
    parser.add_argument("--fit", action="store_true", help="fit the share of HBM anew")
    options = parser.parse_args()
    rows = load(options.only)
    if options.fit:
        print(f"serving.cache_share = {fit(rows):.3f}")
        return
    for run in rows:
        print(line(run, by_arithmetic(run)), flush=True)
    named = [run for run in rows if run.row.get("field")]
    today = [run for run in rows if run.row["engine"] != "vllm-2025-09"]
    unseen = [abs(off(run)) for run in today if not run.row.get("fitted")]
    compiled: list[float] = []
    for run in [] if options.no_compile else named:
        times = by_compiler(run)
        steps = f"decode {1e3 * times.step_s:.2f} ms, prompts {1e6 * times.prompt_token_s:.1f} us"
        print(f"compiled: {line(run, times)} ({steps} a token)", flush=True)
        compiled.append(abs(off(run, times)))
    if named:
        largest = 100 * max(abs(off(run)) for run in named)
        report(Claim("named rows by arithmetic, largest error", largest, "%", at_most=20))
    if compiled:
        largest = 100 * max(compiled)
        report(Claim("named rows by compiled programs, largest error", largest, "%", at_most=20))
    if unseen:
        report(
            Claim("rows not fitted on, by arithmetic", len(unseen), ""),
            Claim("the same, median error", 100 * statistics.median(unseen), "%"),
            Claim("the same, largest error", 100 * max(unseen), "%"),
            Claim("the same, rows within 20 %", sum(error <= BAR for error in unseen), "rows"),
        )


if __name__ == "__main__":
    main()
