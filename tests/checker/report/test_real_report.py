"""A report of a program that the real compiler scheduled."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tpukit.checker.report import (
    build_report,
    diff_reports,
    spans_of,
    write_html,
    write_perfetto,
)
from tpukit.checker.result import CheckResult
from tpukit.compiler import compile_for
from tpukit.compiler.timeline import predict_step

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]


def layers(weights, x):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    return jax.lax.scan(layer, x, weights)[0].sum()


@pytest.fixture
def result():
    mesh = AbstractMesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))

    def split(*axes):
        return NamedSharding(mesh, P(*axes))

    weights = jax.ShapeDtypeStruct((6, 2048, 2048), jnp.bfloat16, sharding=split(None, "fsdp"))
    x = jax.ShapeDtypeStruct((1024, 2048), jnp.bfloat16, sharding=split("fsdp"))
    compiled = compile_for(jax.value_and_grad(layers), "v6e-4", weights, x, until="schedule")
    prediction = predict_step(
        compiled.module,
        compiled.slice,
        coordinates=compiled.coordinates,
        slice_of_device=compiled.slice_of_device,
    )
    return CheckResult(compiled=compiled, prediction=prediction)


def test_it_holds_what_the_objects_say_and_can_be_shown(result, tmp_path):
    report = json.loads(json.dumps(build_report(result, options={"xla_x": 1})))
    assert report["verdict"] == "fits"
    assert report["memory"] == json.loads(json.dumps(result.compiled.memory.to_dict()))
    assert report["options"] == {"xla_x": 1}
    prediction = result.prediction
    exposed = sum(row["exposed_s"] for row in report["collectives"])
    assert exposed == pytest.approx(prediction.seconds_by_cause.get("ici", 0.0))
    whole = sum(row["seconds"] for row in report["collectives"])
    assert whole == pytest.approx(prediction.transfer_s.get("ici", 0.0))
    assert {row["kind"] for row in report["collectives"]} >= {"all-gather"}
    times = [moment for moment, _ in report["live_memory"]]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= prediction.step_time_s
    assert spans_of(report) == prediction.spans
    page = write_html(report, tmp_path / "report.html").read_text()
    assert "×" not in page[: page.index("<main")]
    assert "runs 6 times" in page
    write_perfetto(spans_of(report), tmp_path / "a.json", memory=report["live_memory"])
    write_perfetto(prediction.spans, tmp_path / "b.json", memory=report["live_memory"])
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert diff_reports(report, build_report(result, options={"xla_x": 1})).changes == ()
