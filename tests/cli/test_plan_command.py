"""`tpukit plan` from the outside: exit codes, JSON, the job file, the page."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from tpukit.cli import plan as command
from tpukit.errors import ConfigError
from tpukit.job import Job

ASK = ["llama3.1-8b", "--tokens", "1e11", "--on", "v6e", "--max-chips", "64"]


@pytest.fixture(scope="module")
def app():
    made = typer.Typer()
    made.command("plan")(command.plan)
    return made


def run(app, *words):
    return CliRunner().invoke(app, [*words])


def test_the_verdict_comes_first_and_the_next_command_last(app):
    found = run(app, *ASK, "--deadline", "30d", "--no-verify")
    assert found.exit_code == 0, found.output
    assert found.stdout.startswith("CHEAPEST (within 1 %) v6e-")  # a plainer layout goes first
    assert "Next: tpukit check llama3.1-8b --on v6e-" in found.stdout
    assert "skypilot-catalog" in found.stdout  # prices say where they are from
    assert "does not fit" in found.stdout


def test_json_has_every_figure_with_its_origin(app):
    found = run(app, *ASK, "--no-verify", "--json", "--spot", "--top", "2")
    data = json.loads(found.stdout)
    assert data["feasible"] is True
    assert len(data["choices"]) == 2
    first = data["choices"][0]
    assert first["memory_origin"] == "model"
    assert first["usd"]["origin"] == "model"  # a modelled time at a listed price
    assert first["usd_per_chip_hour"]["origin"] == "third-party"
    assert first["usd"]["date"]
    assert first["preemption_waste"] > 0
    assert data["rejected"][0]["reason"]


def test_a_job_file_and_a_page(app, tmp_path):
    job, page = tmp_path / "job.yaml", tmp_path / "plan.html"
    found = run(app, *ASK, "--no-verify", "-o", str(job), "--html", str(page))
    assert found.exit_code == 0
    assert f"tpukit check {job}" in found.stderr
    assert f"Next: tpukit check {job}" in found.stdout.replace("\n", "")  # a long path may wrap
    assert "the same with -o" not in found.stdout
    assert Job.from_yaml(job).model == "llama3.1-8b"
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "Where the step goes on v6e-" in text


def test_another_optimizer_is_planned_shown_and_written(app, tmp_path):
    job = tmp_path / "job.yaml"
    how = ["--optimizer", "lion", "--moment-dtype", "bfloat16"]
    found = run(app, *ASK, "--no-verify", *how, "-o", str(job))
    assert found.exit_code == 0, found.output
    assert "states of lion" in found.stdout
    train = Job.from_yaml(job).train
    assert (train.optimizer, train.moment_dtype) == ("lion", "bfloat16")


def test_nothing_within_the_limits_is_exit_code_3(app):
    found = run(app, *ASK, "--no-verify", "--deadline", "1h")
    assert found.exit_code == 3
    assert found.stdout.startswith("NOT AS ASKED nothing ends within")


def test_tokens_are_needed(app):
    found = run(app, "llama3.1-8b")
    assert isinstance(found.exception, ConfigError)
    assert "--tokens 15e12" in str(found.exception)


def test_serving_is_sized_by_the_same_command(app):
    found = run(app, "llama3.1-8b", "--serve", "--on", "v6e", "--weights", "bf16,int8", "--json")
    assert found.exit_code == 0, found.output
    sizes = {one["weights"]: one["chips"] for one in json.loads(found.stdout)["choices"]}
    assert sizes == {"bf16": 1, "int8": 1}


def test_a_plan_without_the_compiler_needs_no_jax():
    code = (
        "import sys\n"
        "from tpukit.planner.planning import plan\n"
        "plan('llama3.1-8b', tokens=1e11, on='v6e', max_chips=16, verify=0).to_dict()\n"
        "sys.exit('jax' in sys.modules or 'flax' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_the_compiler_confirms_a_small_plan(app, tmp_path):
    job = tmp_path / "job.yaml"
    words = ["tiny", "--tokens", "1e6", "--on", "v6e-8", "--sequence", "32", "--verify-top", "1"]
    found = run(app, *words, "--max-batch-tokens", "512", "-o", str(job), "--json")
    assert found.exit_code == 0, found.output
    first = json.loads(found.stdout)["choices"][0]
    assert first["memory_origin"] == "compiler"
    assert first["verified"]["step_time_s"] > 0
    assert Job.from_yaml(job).mesh_sizes == first["mesh"]


def test_a_server_has_its_page(app, tmp_path):
    page = tmp_path / "serving.html"
    found = run(app, "llama3.1-8b", "--serve", "--on", "v6e", "--html", str(page))
    assert found.exit_code == 0, found.output
    assert "Cheapest in int4" in page.read_text("utf-8")
