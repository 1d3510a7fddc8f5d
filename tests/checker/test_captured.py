"""The verdict on an unmodified program is the verdict on the step it contains."""

import json
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from trainers import APART, ONE_STEP, TOO_LARGE
from typer.testing import CliRunner

import tpukit
from tpukit.checker.result import CheckResult
from tpukit.cli.app import app

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]
WIDTH, LAYERS = 2048, 4


@pytest.fixture(autouse=True)
def beside_the_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_FLAGS")
    (tmp_path / "one.py").write_text(ONE_STEP)
    (tmp_path / "apart.py").write_text(APART)


def step_by_hand(params, moments, batch):
    """The step of `trainers.ONE_STEP`, written down a second time."""

    def loss(params, batch):
        def layer(x, w):
            return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

        x, _ = jax.lax.scan(jax.checkpoint(layer), batch.astype(jnp.bfloat16), params["w"])
        return (x.astype(jnp.float32) * params["scale"]).mean()

    value, grads = jax.value_and_grad(loss)(params, batch)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments, value


def test_it_is_the_compile_of_the_step_itself(tmp_path):
    found = tpukit.check_program([sys.executable, "one.py"], "v6e-8", per_step=256)
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def shaped(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    params = {"scale": shaped((WIDTH,)), "w": shaped((LAYERS, WIDTH, WIDTH), None, "data")}
    by_hand = tpukit.compile_for(
        step_by_hand,
        "v6e-8",
        params,
        params,
        shaped((256, WIDTH), "data"),
        donate_argnums=(0, 1),
        until="schedule",
    )
    assert found.fits
    assert found.memory.total_bytes == by_hand.memory.total_bytes
    assert found.step_time_s == pytest.approx(by_hand.predict().step_time_s, rel=0.02)
    # Eight devices share the weights, and each has the whole scale.
    held = 4 * (LAYERS * WIDTH * WIDTH // 8 + WIDTH)
    assert found.memory.purposes["parameters"] == held
    assert found.memory.purposes["optimizer state"] == held
    lines = [buffer.source for buffer in found.memory.buffers if buffer.source]
    assert any("one.py" in line for line in lines)
    # Forward, and backward for activations and weights; the forward pass runs a second time.
    matmul = 2 * 256 * WIDTH * WIDTH
    facts = found.to_dict()["capture"]
    assert facts["model_flops"]["value"] == 3 * LAYERS * matmul
    assert facts["hardware_flops"]["value"] == pytest.approx(4 * LAYERS * matmul, rel=0.01)
    peak = found.compiled.slice.peak_tflops().value * 1e12
    mfu = 3 * LAYERS * matmul / found.step_time_s / peak
    assert facts["mfu"]["value"] == pytest.approx(mfu) == found.prediction.mfu
    assert facts["mfu"]["origin"] == "model"
    assert facts["hardware_utilization"]["value"] == pytest.approx(mfu * 4 / 3, rel=0.01)
    hosts = found.host_memory
    assert hosts.input.value == 256 * WIDTH * 4
    assert hosts.process.origin == "measured"
    # Parameters and moments; the scale is whole on all devices, and saved once.
    assert "of the state is 128" in hosts.saving.reason
    assert "at least" in hosts.verdict
    assert found.next_command == f"tpukit flags tune --on v6e-8 -- {sys.executable} one.py"


def test_programs_of_one_step_add_up():
    found = tpukit.check_program([sys.executable, "apart.py"], "v6e-8")
    assert {one.compiled.name for one in (found, *found.parts)} == {"loss", "<lambda>", "apply"}
    assert found.calls == 2
    expected = sum(one.prediction.step_time_s * one.calls for one in (found, *found.parts))
    assert found.step_time_s == pytest.approx(expected)
    report = found.to_dict()
    assert report["verdict"] == "fits"
    large = TooLarge(**vars(found.parts[0]))
    assert replace(found, parts=(large,)).to_dict()["verdict"] == "does not fit"
    facts = report["capture"]
    assert facts["programs"][0]["calls"] == 2
    # Two micro-batches of three matmuls per layer.
    assert facts["model_flops"]["value"] == 2 * 3 * LAYERS * 2 * 256 * WIDTH * WIDTH
    assert {fix.text for fix in found.fixes.fixes} == {
        "donate: a (<lambda>)",  # the sum of gradients so far
        "donate: params (apply)",
    }


class TooLarge(CheckResult):
    """A program that does not fit."""

    fits = False


@pytest.mark.slow
def test_what_it_could_change_is_proved(tmp_path):
    (tmp_path / "large.py").write_text(TOO_LARGE)
    found = tpukit.check_program([sys.executable, "large.py"], "v5e-8", fix=True)
    assert not found.fits
    fixes = {next(iter(fix.changes)): fix for fix in found.fixes.fixes}
    assert fixes["donate"].text == "donate: params, moments"
    assert fixes["donate"].fits
    assert found.memory.total_bytes - fixes["donate"].verified_bytes > 2**30
    assert fixes["on"].text == "on: v5e-16"
    assert fixes["on"].fits is False  # it replicates everything there, too
    assert fixes["flags"].fits is not None
    assert {key for key, fix in fixes.items() if fix.advice} == {"jax.checkpoint", "shard", "batch"}
    # Each device would keep an eighth of parameters and moments.
    state = 2 * 4 * 16 * 8192 * 8192
    saved = found.memory.total_bytes - fixes["shard"].estimate_bytes
    assert saved == pytest.approx(state * 7 / 8, rel=0.01)
    assert found.next_command == ""  # only the program itself can donate
    guessed = tpukit.check_program([sys.executable, "large.py"], "v5e-8")
    assert [fix.fits for fix in guessed.fixes.fixes] == [None] * 6
    assert guessed.next_command.startswith("tpukit check --on v5e-8 --fix -- ")


def run(*words):
    return CliRunner().invoke(app, ["check", *words, "--", sys.executable, "one.py"])


def test_the_command_lists_compares_keeps_and_writes(tmp_path):
    listed = json.loads(run("--on", "v6e-8", "--list-programs", "--json").stdout)
    assert listed["step"] == ["train_step"]
    table = json.loads(run("--on", "v6e-8,v5e-16", "--json", "--per-step", "256").stdout)
    assert [row["slice"] for row in table["slices"]] == ["v6e-8", "v5e-16"]
    first, second = (row["report"]["capture"] for row in table["slices"])
    # Each host gives 32 rows per device, so twice the devices have twice the rows.
    assert first["usd_per_billion"]["origin"] == "model"
    assert second["processes"] == 4
    shown = run("--on", "v6e-8", "--keep", "kept", "--html", "page.html")
    assert shown.exit_code == 0
    assert "FITS" in shown.stdout
    page = (tmp_path / "page.html").read_text()
    for words in ("one.py", "hardware utilization", "Memory of one host", "recomputation"):
        assert words in page
    assert "MFU" in shown.stdout
    assert "at least" in shown.stdout
    again = CliRunner().invoke(app, ["check", "kept", "--json"])
    assert json.loads(again.stdout)["memory"] == first_memory(table)
    other = CliRunner().invoke(app, ["check", "kept", "--on", "v6e-4"])
    assert "was captured for v6e-8 with a mesh of data=8" in str(other.exception)
    for words in (["--program", "loss"], ["--network"], ["--keep", "again"]):
        refused = CliRunner().invoke(app, ["check", "kept", *words])
        assert "a kept capture has been run already" in str(refused.exception)


def first_memory(table):
    return table["slices"][0]["report"]["memory"]


def test_what_is_worse_than_before_is_named(tmp_path):
    report = json.loads(run("--on", "v6e-8", "--json").stdout)
    path = tmp_path / "before.json"
    path.write_text(json.dumps(report))
    assert run("--on", "v6e-8", "--baseline", "before.json").exit_code == 0
    report["capture"]["step_time_s"]["value"] *= 0.9
    path.write_text(json.dumps(report))
    worse = run("--on", "v6e-8", "--baseline", "before.json")
    assert worse.exit_code == 5
    assert "+11.1%, 5% allowed" in worse.stderr
    report["slice"]["name"] = "v6e-4"
    path.write_text(json.dumps(report))
    other = run("--on", "v6e-8", "--baseline", "before.json")
    assert "is a check on v6e-4" in str(other.exception)


@pytest.mark.slow
def test_a_team_has_it_as_a_fixture(tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tpukit.pytest_plugin"]')
    (tmp_path / "test_step.py").write_text(
        "import sys\ndef test_it(tpukit_check):\n"
        "    tpukit_check([sys.executable, 'one.py'], on='v6e-8', baseline='kept.json')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "test_step.py"]
    first = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "was written" in first.stdout
    second = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert second.returncode == 0, second.stdout


def test_options_of_a_job_are_refused():
    for words in (["--batch-size", "8"], ["tiny"]):
        refused = run("--on", "v6e-8", *words)
        assert "not for a command" in str(refused.exception)
    alone = CliRunner().invoke(app, ["check", "tiny", "--on", "v6e-8", "--per-step", "5"])
    assert "write it behind --" in str(alone.exception)


def test_a_block_of_this_process():
    before = jax.devices()
    with tpukit.capture(on="v6e-8") as captured:
        exec(compile(ONE_STEP, "notebook", "exec"), {})
        raise AssertionError("the block ends at its step")
    assert [one.name for one in captured.step] == ["train_step"]
    assert captured.check(memory_only=True).fits
    assert len(jax.devices()) == len(before)
    assert jax.process_count() == 1
    assert float(jnp.ones(3).sum()) == 3.0
