"""The published servers: rows that say where they come from, and the client that is played."""

import math
import statistics

import pytest
from serve import BAR, Requests, by_arithmetic, load, off, predict, run_client

from tpukit.hardware.rates import ServingRates


def test_rows_are_whole_and_cited():
    rows = load()
    assert len({run.row["id"] for run in rows}) == len(rows)
    assert sum(bool(run.row.get("field")) for run in rows) == 3
    for run in rows:
        assert run.row["source"].startswith(("https://github.com/", "reference/field.md"))
        assert run.slice.devices % run.row["tensor"] == 0
        assert 1 <= run.traffic.batch <= run.row["concurrency"]


def test_named_rows_are_within_the_bar():
    named = [run for run in load() if run.row.get("field")]
    assert max(abs(off(run)) for run in named) <= BAR


def test_the_share_of_hbm_is_that_of_the_rows_it_was_fitted_on():
    fitted = [run for run in load() if run.row.get("fitted")]
    assert {run.row["model"] for run in fitted} == {"qwen3-8b"}
    assert {run.row["engine"] for run in fitted} == {"sglang-jax"}
    error = statistics.mean(math.log(1 + off(run)) for run in fitted)
    assert abs(error) < 0.02
    assert ServingRates.of().cache_share == 0.43


def test_equal_requests_are_answered_in_waves():
    found = run_client(
        Requests(count=12, prompt=100, new=11),
        at_once=4,
        step_s=lambda sequences: 1.0,
        prompt_s=lambda tokens: tokens / 100,
    )
    # Three waves, each of four prompts of 1 s and ten steps after the first token.
    assert found.tokens_per_s == pytest.approx(12 * 11 / (3 * (4 + 10)))
    # The first of a wave waits for three more prompts, the last for none.
    assert found.token_s == pytest.approx((10 + (3 + 2 + 1 + 0) / 4) / 10)


def test_a_run_ends_with_fewer_and_fewer_sequences():
    asked = Requests(count=3, prompt=1, new=5)
    found = run_client(asked, at_once=2, step_s=float, prompt_s=lambda tokens: 0.0)
    assert found.tokens_per_s == pytest.approx(15 / (4 * 2 + 4 * 1))


def test_lengths_are_drawn_within_their_bounds_and_the_same_each_time():
    asked = Requests(count=1000, prompt=1000, new=100, shortest=0.8)
    prompts, answers = zip(*asked.lengths(), strict=True)
    assert (min(prompts), max(prompts)) == (800, 1000)
    assert (min(answers), max(answers)) == (80, 100)
    assert asked.lengths() == asked.lengths()
    assert set(Requests(count=5, prompt=7, new=3).lengths()) == {(7, 3)}


def test_a_client_sees_no_more_than_a_server_that_is_always_full():
    for run in load("sgl-qwen3-8b"):
        whole = run.server.throughput().tokens_per_s
        assert predict(run, by_arithmetic(run)).tokens_per_s == pytest.approx(whole, rel=0.01)
