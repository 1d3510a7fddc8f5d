"""Tokens a second out of a memory-mapped file: tpukit against a hand-written numpy loop.

Both give the same work: random rows of one file as int32 inputs and targets. The loop is what
people write by hand; grain as its tutorial writes it (one element a row) is there for
comparison (https://github.com/google/grain/issues/569). Rounds of all three alternate, so that a
busy machine is busy for all; the figure is the median of the rounds.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grain
import numpy as np
from claims import Claim, report

from tpukit.training.data import open_data

TOKENS = 200_000_000
VOCABULARY = 50_000
SHAPES = ((8, 2048), (64, 2048), (256, 4096))  # batch of this host, sequence
BY_HAND = "hand-written numpy loop"
ROUNDS, ROUND_S, SETTLE_S = 7, 0.5, 0.2


def hand_loop(path: Path, batch: int, sequence: int) -> Iterator[dict[str, np.ndarray]]:
    tokens = np.memmap(path, np.uint16, "r")
    chosen = np.random.default_rng(0)
    while True:
        starts = chosen.integers(0, len(tokens) - sequence - 1, batch)
        inputs = np.stack([tokens[i : i + sequence].astype(np.int32) for i in starts])
        targets = np.stack([tokens[i + 1 : i + 1 + sequence].astype(np.int32) for i in starts])
        yield {"inputs": inputs, "targets": targets}


def grain_by_row(path: Path, batch: int, sequence: int) -> Iterator[dict[str, np.ndarray]]:
    tokens = np.memmap(path, np.uint16, "r")

    class Rows:
        def __len__(self) -> int:
            return (len(tokens) - 1) // sequence

        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            row = tokens[index * sequence : (index + 1) * sequence + 1].astype(np.int32)
            return {"inputs": row[:-1], "targets": row[1:]}

    rows = grain.MapDataset.source(Rows()).seed(0).shuffle().repeat()
    return iter(rows.to_iter_dataset().batch(batch))


def tpukit_data(path: Path, batch: int, sequence: int) -> Iterator[dict[str, np.ndarray]]:
    data = open_data(
        path,
        sequence_length=sequence,
        batch_size=batch,
        vocab_size=VOCABULARY,
        process_index=0,
        process_count=1,
    )
    return data.stream()


def rate(stream: Iterator[dict[str, np.ndarray]]) -> tuple[float, float]:
    """Tokens by second of the clock, and by second of work on all cores."""
    settled = time.perf_counter() + SETTLE_S  # what was read ahead meanwhile does not count
    while time.perf_counter() < settled:
        next(stream)
    drawn, began, worked = 0, time.perf_counter(), time.process_time()
    while (took := time.perf_counter() - began) < ROUND_S:
        drawn += next(stream)["targets"].size
    return drawn / took, drawn / (time.process_time() - worked)


def main() -> None:
    makers: dict[str, Callable[..., Iterator[dict[str, np.ndarray]]]] = {
        "tpukit": tpukit_data,
        BY_HAND: hand_loop,
        "grain, one element a row": grain_by_row,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        numbers = np.random.default_rng(1).integers(0, VOCABULARY, TOKENS, dtype=np.uint16)
        numbers.tofile(path)
        for batch, sequence in SHAPES:
            streams = {name: make(path, batch, sequence) for name, make in makers.items()}
            for stream in streams.values():
                rate(stream)  # starts threads, and brings the file into memory for all
            rounds = [{n: rate(s) for n, s in streams.items()} for _ in range(ROUNDS)]
            found = {name: statistics.median(r[name][0] for r in rounds) for name in makers}
            ratios = [
                statistics.median(r["tpukit"][by] / r[BY_HAND][by] for r in rounds)
                for by in range(2)
            ]
            shape = f"batch {batch} x {sequence}"
            report(
                *(Claim(f"{shape}: {name}", found[name] / 1e6, "Mtokens/s") for name in makers),
                Claim(f"{shape}: tpukit / hand loop", ratios[0], "×", at_least=1.0),
                Claim(f"{shape}: the same by processor time", ratios[1], "×"),
            )
            for stream in streams.values():
                if hasattr(stream, "close"):
                    stream.close()


if __name__ == "__main__":
    main()
