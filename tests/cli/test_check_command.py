"""`tpukit check` from the outside: exit codes, verdict first, JSON, the cache, a function."""

import json
from importlib import import_module
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from tpukit.checker import compiling
from tpukit.checker.report import read_report
from tpukit.cli import cache, check, job_options
from tpukit.compiler import CompileCache
from tpukit.errors import (
    TPUModelError,
    TPUOutOfMemoryError,
    TPUValidationError,
    XLACompilationError,
)
from tpukit.mcp import tools
from tpukit.mcp.access import Access

checking = import_module("tpukit.checker.check")  # not the function of that name
SMALL = ["tiny", "--on", "v6e-8", "--batch", "16", "--sequence", "32", "--mesh", "fsdp=8"]


@pytest.fixture(scope="module")
def app():
    made = typer.Typer()
    made.command("check")(check.check)
    made.add_typer(cache.app, name="cache")
    return made


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("TPUKIT_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def first(app, own_cache):
    """The one real check of this file."""
    return CliRunner().invoke(app, ["check", *SMALL])


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
class TestOneRealCheck:
    def test_the_verdict_comes_first(self, first):
        assert first.exit_code == 0, first.output
        assert first.stdout.startswith("FITS tiny on v6e-8")
        assert "optimizer state" in first.stdout
        assert "[model]" in first.stdout  # the predicted step

    def test_progress_goes_to_standard_error_by_stage(self, first):
        lines = [line.split(" s  ")[1] for line in first.stderr.splitlines()[1:]]
        # Kernels, if any, and what a slow machine says meanwhile.
        stages = [line for line in lines if not line.startswith(("simulate:", "… still:"))]
        assert stages == [
            "trace",
            "lower",
            "compile",
            "memory",
            "schedule",
            "simulate the schedule",
        ]
        assert lines[-1] == stages[-1]
        assert "checking tiny on v6e-8" in first.stderr

    def test_the_same_again_needs_no_compiler(self, first, app, monkeypatch):
        def no_child(*args, **options):
            raise AssertionError("a child was started")

        monkeypatch.setattr("tpukit.compiler.aot.watch_child", no_child)
        monkeypatch.setattr("tpukit.compiler.program.request.lower_program", no_child)
        again = CliRunner().invoke(app, ["check", *SMALL, "--json", "--memory-only"])
        assert again.exit_code == 0, again.output
        data = json.loads(again.stdout)
        assert data["verdict"] == "fits"
        assert data["compile"]["from_cache"]
        assert data["job"]["batch_size"] == 16
        assert data["no_prediction"] == "not asked for"
        assert sum(data["memory"]["purposes"].values()) == (data["memory"]["total_bytes"])

    def test_it_can_be_a_page_and_a_trace(self, first, app, tmp_path):
        page, trace, saved = (tmp_path / name for name in ("a.html", "a.json", "report.json"))
        result = CliRunner().invoke(
            app, ["check", *SMALL, "--json", "--html", str(page), "--perfetto", str(trace)]
        )
        assert result.exit_code == 0, result.output
        assert "tiny" in page.read_text()
        assert json.loads(trace.read_text())["traceEvents"]
        saved.write_text(result.stdout)
        assert read_report(saved)["verdict"] == "fits"

    def test_the_cache_shows_and_clears(self, first, app):
        shown = CliRunner().invoke(app, ["cache", "show", "--json"])
        assert json.loads(shown.stdout)["entries"] == 2  # the compile, and which job it answers
        cleared = CliRunner().invoke(app, ["cache", "clear"])
        assert cleared.stdout.startswith("0 entries")
        assert CompileCache.default().summary().entries == 0


def test_what_does_not_fit_exits_3_with_fixes(app, own_cache, monkeypatch):
    from dataclasses import replace

    asked = []

    def too_big(job, **how):
        asked.append(job)
        report = _report(fits=False)
        return _Compiled(report)

    monkeypatch.setattr(checking, "compile_job", too_big)
    monkeypatch.setattr(
        compiling, "known_compile", lambda job: _Compiled(replace(_report(fits=True)))
    )
    result = CliRunner().invoke(app, ["check", *SMALL, "--fix", "--json"])
    assert result.exit_code == 3, result.output
    data = json.loads(result.stdout)
    assert data["verdict"] == "does not fit"
    assert data["fixes"][0]["fits"] is True
    assert data["fixes"][0]["verified"]["origin"] == "compiler"
    assert data["fixes"][-1]["estimate"]["origin"] == "model"
    assert data["next"].startswith("tpukit check tiny --on v6e-8 --batch-size 16")
    plain = CliRunner().invoke(app, ["check", *SMALL])
    assert plain.exit_code == 3
    assert plain.stdout.startswith("DOES NOT FIT")
    assert "simulate" not in plain.stderr
    assert "what could make it fit" in plain.stdout
    assert "next: tpukit check tiny" in plain.stdout.replace("\n", " ")


def test_variables_of_a_job_are_in_no_answer(app, own_cache, monkeypatch, tmp_path):
    monkeypatch.setattr(checking, "compile_job", lambda job, **how: _Compiled(_report(fits=True)))
    file, page = tmp_path / "job.yaml", tmp_path / "page.html"
    file.write_text("model: tiny\non: v6e-8\nlaunch: {environment: {HF_TOKEN: canary-123456789}}\n")
    typed = ["check", str(file), "--memory-only", "--json", "--html", str(page)]
    for more in ([], ["--set", "launch.environment={A: canary-123456789}"]):
        found = CliRunner().invoke(app, [*typed, *more])
        assert found.exit_code == 0, found.output
        assert "environment" in found.stdout
        assert "environment" in page.read_text()
        assert "canary" not in found.output + page.read_text()
    asked = tools.check(Access(), str(file), memory_only=True, whole=True)
    assert "canary" not in json.dumps(asked)
    assert asked["job"]["launch"]["environment"] == {"HF_TOKEN": "…"}


def test_a_job_file_with_options_before_it(app, own_cache, monkeypatch, tmp_path):
    asked = []

    def remember(job, **how):
        asked.append(job)
        return _Compiled(_report(fits=True))

    monkeypatch.setattr(checking, "compile_job", remember)
    path = tmp_path / "job.yaml"
    path.write_text("model: tiny\non: v6e-8\nbatch_size: 16\nsequence_length: 32\n")
    result = CliRunner().invoke(
        app, ["check", str(path), "--on", "v6e-16", "--mesh", "fsdp=8,tensor=2", "--memory-only"]
    )
    assert result.exit_code == 0, result.output
    (job,) = asked
    assert job.on == "v6e-16"
    assert job.batch_size == 16
    assert job.mesh_sizes == {"fsdp": 8, "tensor": 2}


def test_what_cannot_be_told_exits_4(app, own_cache, monkeypatch):
    def crash(job, **how):
        raise XLACompilationError("compiling tiny for v6e-8 failed (exit): it was killed")

    monkeypatch.setattr(checking, "compile_job", crash)
    result = CliRunner().invoke(app, ["check", *SMALL])
    assert result.exit_code == 4
    assert "could not tell: compiling tiny" in result.stderr


def test_a_refusal_without_a_report_still_exits_3(app, own_cache, monkeypatch):
    def refuse(job, **how):
        raise TPUOutOfMemoryError("tiny does not fit on v6e-8: the compiler needs 181G.")

    monkeypatch.setattr(checking, "compile_job", refuse)
    result = CliRunner().invoke(app, ["check", *SMALL])
    assert result.exit_code == 3
    assert result.stdout.startswith("DOES NOT FIT tiny")


@pytest.mark.slow
@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_an_8b_model_that_needs_a_fix(app, own_cache):
    asked = ["check", "llama3.1-8b", "--on", "v6e-8", "--batch", "32", "--memory-only", "--json"]
    result = CliRunner().invoke(app, [*asked, "--remat", "none", "--attention", "xla", "--fix"])
    assert result.exit_code == 3, result.output
    data = json.loads(result.stdout)
    memory = data["memory"]
    # Scores of 32 layers, 4 examples and 32 heads are kept: 64 GiB in float32 alone.
    assert memory["purposes"]["activations"] > 64 * 2**30
    assert memory["buffers"][0]["shape"] == "f32[32,4,4,8,2048,2048]"
    best = data["fixes"][0]
    assert best["fits"] is True
    assert best["verified"]["value"] < memory["usable_bytes"]


def test_what_the_user_got_wrong_is_an_error_of_theirs(app, own_cache, tmp_path):
    runner = CliRunner()
    unknown = runner.invoke(app, ["check", "lama3.1-8b", "--on", "v6e-8"])
    assert isinstance(unknown.exception, TPUValidationError)
    path = tmp_path / "own.py"
    path.write_text("def step(x):\n    return x @ x\n")
    wrong = runner.invoke(app, ["check", f"{path}:step", "--on", "v6e-1", "--arg", "f32[8,9]"])
    assert isinstance(wrong.exception, TPUModelError)
    typed = ["check", f"{path}:step", "--arg", "f32[8,8]"]
    mixed = runner.invoke(app, [*typed, "--on", "v6e-1", "--batch", "8"])
    assert isinstance(mixed.exception, TPUValidationError)
    assert "takes no batch_size" in str(mixed.exception)
    no_builder = runner.invoke(app, ["check", f"{path}:step", "--on", "v6e-1"])
    assert "takes x" in str(no_builder.exception)
    assert "--arg" in str(no_builder.exception)
    nowhere = runner.invoke(app, typed)
    assert "needs --on" in str(nowhere.exception)


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_somebodys_own_function(app, own_cache, tmp_path, monkeypatch):
    # Reading every flag of libtpu takes longer than the rest of this file.
    monkeypatch.setattr(
        job_options, "compiler_options", lambda flags: {"xla_tpu_rwb_fusion": False}
    )
    path = tmp_path / "own.py"
    path.write_text("def step(x):\n    return x * 2\n")
    result = CliRunner().invoke(
        app,
        [
            *("check", f"{path}:step", "--on", "v5e-1", "--arg", "f32[1024,1024]", "--json"),
            *("--flags", "--xla_tpu_rwb_fusion=false"),
        ],
    )
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["job"] is None
    assert data["options"] == {"xla_tpu_rwb_fusion": False}
    assert data["next"] == (
        f"tpukit flags tune {path}:step --on v5e-1 --flags --xla_tpu_rwb_fusion=false "
        "--arg 'f32[1024,1024]'"
    )
    assert data["memory"]["argument_bytes"] == 4 * 1024 * 1024
    assert data["memory"]["findings"][0]["kind"] == "not donated"


class _Compiled:
    """A compile with a report that was made up."""

    def __init__(self, report):
        self.memory, self.fits, self.slice = report, report.fits, report.slice
        self.versions = {"jax": "0"}
        self.operations = {"fusions": 0}
        self.name = report.program
        self.facts = SimpleNamespace(argument_bytes=())  # as of a compile that did not keep them

    def to_dict(self):
        unknown = ("compile_s", "stage", "from_cache", "flops_per_device", "code_bytes")
        known = {"operations": self.operations, "versions": self.versions}
        return {**dict.fromkeys(unknown), **known, "memory": self.memory.to_dict()}


def _report(*, fits):
    from tpukit.compiler.memory import MemoryReport
    from tpukit.hardware import Slice

    used = 2**30 if fits else 40 * 2**30
    return MemoryReport(
        program="tiny",
        slice=Slice.parse("v6e-8"),
        fits=fits,
        total_bytes=used,
        usable_bytes=31 * 2**30,
        host_bytes=0,
        argument_bytes=0,
        temp_bytes=used,
        result_bytes=0,
        alias_bytes=0,
        purposes={"activations": used},
        buffers=(),
        peak=None,
        curve=(),
        schedule_length=0,
        findings=(),
    )
