"""Why training is slow: measured here, predicted for a slice, and the data loader's own rate."""

import dataclasses
import io
import json
import time

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from rich.console import Console

from tpukit.errors import TPUModelError, TPUValidationError
from tpukit.hardware import Figure
from tpukit.models import get_preset
from tpukit.observe import (
    Bottlenecks,
    StepTiming,
    diagnose_performance,
    measure_input,
    time_steps,
)
from tpukit.observe.diagnosis import performance
from tpukit.observe.diagnosis.result import (
    bottleneck_issues,
    compile_issues,
    input_issues,
    target_issues,
)
from tpukit.step.workload import Workload

WIDTH = 64


def model():
    def init(rng):
        return {"w": jax.random.normal(rng, (WIDTH, WIDTH))}

    def apply(params, batch):
        return jnp.mean((batch["x"] @ params["w"]) ** 2)

    return init, apply


def batches(count, *, pause_s=0.0):
    for _ in range(count):
        time.sleep(pause_s)
        yield {"x": np.ones((8, WIDTH), np.float32)}


def figure(value, origin="measured", unit="s"):
    return Figure(value, unit, origin, "a test")


@pytest.fixture(scope="module")
def predicted():
    """One diagnosis through the real compiler."""
    work = Workload(model(), batch={"x": jax.ShapeDtypeStruct((512, WIDTH), jnp.float32)})
    return diagnose_performance(work, target_tflops=1e6, on="v6e-8", dataloader=batches(3))


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
class TestForASlice:
    def test_the_shares_are_those_of_the_timeline(self, predicted):
        kinds = ("compute", "memory", "communication", "host", "overhead")
        shares = [predicted[f"{kind}_bound"] for kind in kinds]
        assert sum(shares) == pytest.approx(1)
        assert predicted["communication_bound"] > 0  # a gathered weight and a summed gradient
        assert predicted["bottleneck_origin"] == "model"

    def test_every_figure_says_where_it_came_from(self, predicted):
        assert predicted.step_time_s.origin == "model"
        assert predicted.achieved_tflops.origin == "model"
        assert predicted.peak_tflops.origin == "datasheet"
        assert predicted.compile_s.value is None
        assert predicted.achieved_tflops.source.startswith("FLOPs of the model")
        flops = 2 * 512 * WIDTH * WIDTH * 2  # forward, and the gradient of the weights
        achieved = predicted.achieved_tflops.value * 1e12 * predicted.step_time_s.value
        assert achieved == pytest.approx(flops)

    def test_issues_read_as_in_the_guide(self, predicted):
        problems = [issue["problem"] for issue in predicted["issues"]]
        assert "Target above the peak" in problems  # 1e6 TFLOP/s on eight chips
        assert "Below target" in problems
        for issue in predicted["issues"]:
            assert issue["problem"]
            assert issue["impact"]
            assert issue["solution"]
        assert predicted["recommendations"][0] == predicted["issues"][0]["solution"]

    def test_it_prints_and_is_data(self, predicted):
        console = Console(width=120, file=io.StringIO())
        console.print(predicted)
        assert "communication bound" in console.file.getvalue()
        assert json.loads(json.dumps(dict(predicted)))["where"] == "v6e-8"


class TestHere:
    def test_steps_are_timed_on_the_devices_there_are(self):
        found = diagnose_performance(model(), batches(4), target_tflops=1e9, steps=3)
        assert found.step_time_s.origin == "measured"
        assert 0 < found.step_time_s.value < 5
        assert found.compile_s.value > found.step_time_s.value
        assert found["compute_bound"] is None
        assert "name a slice" in found["no_bottlenecks"]
        assert found["where"] == "8 x cpu"
        assert found["input"]["samples_per_batch"] == 8
        assert "Below target" in [issue["problem"] for issue in found["issues"]]

    def test_the_slow_part_is_what_counts(self, monkeypatch):
        slow = StepTiming(0.001, 1.0, Figure(1e9, "FLOP", "model", "a trace"), 3, "8 x cpu")
        monkeypatch.setattr(performance, "time_steps", lambda *args, **how: slow)
        found = diagnose_performance(model(), batches(5, pause_s=0.02))
        assert found["issues"][0]["problem"] == "Data loading bottleneck"
        assert "of the time" in found["issues"][0]["impact"]

    def test_a_batch_that_the_devices_do_not_divide_runs_on_one(self):
        work = Workload(model(), batch={"x": jax.ShapeDtypeStruct((3, WIDTH), jnp.float32)})
        assert time_steps(work, steps=1).devices == "1 x cpu"

    @pytest.mark.parametrize(
        "model",
        [
            linen.Dense(WIDTH),
            nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)),
            lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs),
            equinox.nn.Linear(WIDTH, WIDTH, key=jax.random.key(0)),
        ],
        ids=["linen", "nnx", "nnx function", "equinox"],
    )
    def test_a_model_of_any_framework_is_taken(self, model):
        found = diagnose_performance(
            model,
            batches(2),
            steps=1,
            inputs=("x",),
            loss=lambda outputs, batch: jnp.mean(outputs**2),
        )
        assert found.step_time_s.origin == "measured"

    @pytest.mark.slow
    def test_a_reference_transformer_says_its_flops(self):
        found = diagnose_performance("tiny", batch_size=8, sequence_length=32, steps=1)
        flops = get_preset("tiny").flops_per_token(32).total * 8 * 32
        achieved = found.achieved_tflops.value * 1e12 * found.step_time_s.value
        assert achieved == pytest.approx(flops)
        assert "counted once" in found.achieved_tflops.source

    @pytest.mark.parametrize(
        ("batch", "note"),
        [
            (np.zeros((8, 4), np.int32), False),  # tokens are their own targets
            (np.zeros((8, 16), np.float32), True),
            ((np.zeros((8, 16), np.float32), np.zeros(8, np.int32)), False),
            ((np.zeros((8, 16), np.float32), np.zeros((8, 3), np.float32)), True),
        ],
    )
    def test_a_loader_of_plain_arrays(self, batch, note):
        tokens = not isinstance(batch, tuple) and batch.dtype == np.int32
        own = linen.Embed(32, 16) if tokens else linen.Dense(32)
        found = diagnose_performance(model=own, dataloader=[batch, batch], target_tflops=15000)
        assert found["issues"][0]["problem"] == "Below target"
        assert found["input"]["samples_per_batch"] == 8
        assert any("is used" in note_ for note_ in found["notes"]) is note

    def test_what_is_missing_is_named(self):
        with pytest.raises(TPUModelError, match="shapes of a batch are not known"):
            diagnose_performance(model())
        with pytest.raises(TPUValidationError, match="name a slice"):
            diagnose_performance(model(), measure=False)


class TestInput:
    def test_the_rate_is_that_of_the_loader(self):
        rate = measure_input(batches(6, pause_s=0.02))
        assert rate.batches == 6
        assert 0 < rate.samples_per_s <= 8 / 0.02
        assert rate.first_batch_s >= 0.02

    def test_both_limits_hold(self):
        assert measure_input(batches(1000), batches=3).batches == 4
        assert measure_input(batches(1000, pause_s=0.02), seconds=0.1).batches < 10

    def test_pairs_and_nests_are_batches_too(self):
        assert measure_input([(np.ones((4, 2)), np.ones(4))] * 2).samples_per_batch == 4
        assert measure_input([{"a": {"b": [np.ones((5, 2))]}}] * 2).samples_per_batch == 5

    def test_one_batch_gives_no_rate(self):
        rate = measure_input([np.ones((4, 2))])
        assert rate.samples_per_s is None
        assert rate.to_dict()["reason"] == "it ended after one batch"

    def test_what_is_no_loader_is_refused(self):
        with pytest.raises(TPUValidationError, match="is no data loader"):
            measure_input(3)
        with pytest.raises(TPUValidationError, match="is empty"):
            measure_input([])
        with pytest.raises(TPUValidationError, match="without arrays"):
            measure_input(["text"])


class TestIssues:
    @pytest.mark.parametrize(
        ("kind", "problem"),
        [
            ("communication", "Communication overhead"),
            ("memory", "Memory bandwidth"),
            ("host", "Host offload"),
            ("overhead", "Many small operations"),
            ("compute", None),
        ],
    )
    def test_the_largest_share_is_named(self, kind, problem):
        shares = dataclasses.replace(Bottlenecks(0, 0, 0, 0, 0), **{kind: 1.0})
        assert [one.problem for one in bottleneck_issues(shares, 2.0)] == (
            [problem] if problem else []
        )

    def test_a_loader_that_keeps_up_is_no_issue(self):
        rate = measure_input([np.ones((4, 2))] * 4)
        assert not list(input_issues(rate, 4, figure(1000.0)))
        assert list(input_issues(dataclasses.replace(rate, samples_per_s=1.0), 4, figure(1.0)))

    def test_a_long_compile_is_one(self):
        assert not list(compile_issues(figure(10.0), figure(1.0)))
        (issue,) = compile_issues(figure(10.0), figure(0.001))
        assert "10,000 steps" in issue.impact

    def test_a_target_that_is_met_is_none(self):
        reached, peak = figure(100.0, unit="TFLOP/s"), figure(200.0, "datasheet", "TFLOP/s")
        assert not list(target_issues(reached, 90.0, peak))
        assert not list(target_issues(reached, None, peak))
        assert [one.problem for one in target_issues(reached, 150.0, peak)] == ["Below target"]
