"""One job with several toolchains: what is asked of each, what is shown, how it ends."""

import copy
import json
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import every_command
from jax_environments import users_cache
from page_reader import PageReader
from rich.console import Console
from sample_capture import write_capture
from sample_report import sample_report
from trainers import ONE_STEP
from typer.testing import CliRunner

from tpukit.checker import toolchains
from tpukit.checker.report.html import render_comparison
from tpukit.cli.app import app
from tpukit.errors import ConfigError, TPUValidationError
from tpukit.runtime.toolchains import EndedProgram, parse_toolchain
from tpukit.runtime.toolchains.environments import is_made

NEW = "jax-0.12.0.1"
CHECK = ["check", "tiny", "--on", "v6e-4", "--batch-size", "8"]


def newer_report():
    report = copy.deepcopy(sample_report())
    report["memory"]["total_bytes"] += 2**29
    report["memory"]["purposes"]["temporaries"] += 2**29
    report["prediction"]["step_time_s"] = 0.08
    report["operations"]["fusions"] = 90
    report["versions"] = {"jax": "0.12.0.1", "libtpu": "0.0.50.1"}
    return report


class Machine:
    """Interpreters of toolchains that answer what a test says, and what they were asked."""

    def __init__(self):
        self.asked = []
        self.answers = {
            "default": EndedProgram(0, json.dumps(sample_report()), ""),
            NEW: EndedProgram(0, json.dumps(newer_report()), ""),
        }
        self.refused_flags = {}

    @contextmanager
    def environment(self, toolchain, *, progress):
        yield Path(toolchain.name)

    def run(self, python, arguments, *, progress):
        self.asked.append((str(python), list(arguments)))
        if arguments[0] == "flags":
            refused = self.refused_flags.get(str(python), ())
            names = [flag.strip("-").partition("=")[0] for flag in arguments[3:]]
            flags = [
                {"name": one, "problem": "No flag" if one in refused else None} for one in names
            ]
            return EndedProgram(2 if refused else 0, json.dumps({"flags": flags}), "")
        progress("   1.0 s  compile")
        return self.answers[str(python)]

    def checks(self):
        return {name: words for name, words in self.asked if words[0] == "check"}


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    monkeypatch.setattr(toolchains, "environment", made.environment)
    monkeypatch.setattr(toolchains, "run_tpukit", made.run)
    return made


def compare(**how):
    both = [parse_toolchain("default"), parse_toolchain(NEW)]
    return toolchains.compare_toolchains(both, ["tiny", "--set", 'on="v6e-4"'], **how)


def shown(comparison):
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(comparison)
    return [" ".join(line.split()) for line in captured.get().splitlines()]


def test_figures_stand_side_by_side_under_the_versions_they_come_from(machine):
    lines = shown(compare())
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert lines[0] == f"default Python {here}: jax 0.10.2, libtpu 0.0.42.1"
    assert lines[1].endswith("jax 0.12.0.1, libtpu 0.0.50.1")
    assert "verdict fits fits compiler" in lines
    assert "HBM per device 3 GiB 3.5 GiB +512 MiB (+16.7 %) compiler" in lines
    assert "temporaries 1 GiB 1.5 GiB +512 MiB (+50.0 %) compiler" in lines
    assert "parameters 1 GiB 1 GiB compiler" in lines, "also what is the same"
    assert "step 100 ms 80 ms −20 ms (−20.0 %) model" in lines
    assert "fusions 120 90 −30 (−25.0 %) compiler" in lines
    assert "all-gather over 8, bytes 762.9 MiB 762.9 MiB compiler" in lines
    assert not [line for line in lines if line.startswith("batch_size")], "asked of all alike"


def test_a_machine_gets_whole_reports_and_what_changed(machine):
    data = json.loads(json.dumps(compare().to_dict()))
    first, second = data["checks"]
    assert (first["toolchain"], first["changes"]) == ("default", [])
    assert second["report"]["versions"]["jax"] == "0.12.0.1"
    steps = [one for one in second["changes"] if one["name"] == "step"]
    assert [(one["before"], one["after"]) for one in steps] == [(0.1, 0.08)]


def test_a_page_shows_the_same(machine):
    page = PageReader(render_comparison(compare()))
    text = " ".join(page.text.split())
    for words in ("tiny on v6e-8", "libtpu 0.0.50.1", "+512 MiB (+16.7 %)", "fusions 120 90"):
        assert words in text


def test_three_toolchains_have_three_columns(machine):
    older = copy.deepcopy(machine.answers[NEW])
    machine.answers["jax-0.11.2"] = EndedProgram(
        0, older.output.replace("0.12.0.1", "0.11.2").replace("0.08", "0.12"), ""
    )
    three = [parse_toolchain(name) for name in ("default", "jax-0.11.2", NEW)]
    found = toolchains.compare_toolchains(three, ["tiny"])
    assert found.side_by_side.headings == ("default", "jax-0.11.2", "change", NEW, "change")
    assert "step 100 ms 120 ms +20 ms (+20.0 %) 80 ms −20 ms (−20.0 %) model" in shown(found)


@pytest.mark.parametrize(("code", "verdict"), [(0, "fits"), (3, "does not fit")])
def test_the_exit_code_is_that_of_the_worst(machine, code, verdict):
    report = {**newer_report(), "verdict": verdict}
    machine.answers[NEW] = EndedProgram(code, json.dumps(report), "")
    assert compare().exit_code == code


def test_a_compiler_that_fails_is_a_column_with_its_reason(machine):
    machine.answers[NEW] = EndedProgram(
        4, "", "  1.0 s  compile\ncould not tell: libtpu crashed.\n"
    )
    found = compare()
    assert (found.exit_code, found.checks[1].refusal) == (4, "libtpu crashed.")
    lines = shown(found)
    assert lines[1].endswith(": libtpu crashed.")
    assert "verdict fits could not tell compiler" in lines
    assert "step 100 ms – model" in lines


def test_an_installed_pair_too_old_for_a_capture_does_not_decide_the_exit_code(machine):
    machine.answers["default"] = EndedProgram(4, "", "could not tell: captured with jax 0.12.\n")
    found = compare()
    assert (found.exit_code, found.checks[0].refusal) == (0, "captured with jax 0.12.")


def test_a_job_that_is_wrong_for_the_first_is_not_tried_with_the_others(machine):
    machine.answers["default"] = EndedProgram(2, "", "error: which slice? Give on='v6e-8'.\n")
    with pytest.raises(ConfigError, match=r"^which slice"):
        compare()
    assert NEW not in machine.checks()


def test_a_flag_that_one_compiler_does_not_take_is_left_out_there_and_named(machine):
    machine.refused_flags = {NEW: ("xla_old",)}
    found = compare(flags={"xla_old": True, "xla_kept": "3"})
    asked = machine.checks()
    assert asked["default"][-3:] == ["--flags", "--xla_old=true --xla_kept=3", "--json"]
    assert asked[NEW][-3:] == ["--flags", "--xla_kept=3", "--json"]
    assert "flags rejected none xla_old compiler" in shown(found)
    machine.refused_flags = {NEW: ("xla_old", "xla_kept")}
    compare(flags={"xla_old": True, "xla_kept": "3"})
    assert machine.checks()[NEW][-3:] == ["--set", "options={}", "--json"]


def test_an_environment_that_runs_another_jax_is_found_out(machine):
    machine.answers[NEW] = machine.answers["default"]
    with pytest.raises(TPUValidationError, match=r"ran with jax 0\.10\.2.*PYTHONPATH"):
        compare()


def test_what_was_typed_is_said_to_each(machine, tmp_path):
    page = tmp_path / "page.html"
    typed = [*CHECK, "--mesh", "fsdp=4", "--set", "train.z_loss=0.0001", "--no-cache"]
    done = CliRunner().invoke(app, [*typed, "--toolchain", NEW, "--html", str(page), "--json"])
    assert done.exit_code == 0, done.output
    words = ["check", "tiny", "--set", "train.z_loss=0.0001", "--set", 'on="v6e-4"']
    words += ["--set", "batch_size=8", "--set", 'mesh="fsdp=4"', "--no-cache", "--json"]
    assert machine.checks() == {"default": words, NEW: words}
    assert json.loads(done.stdout)["checks"][1]["toolchain"] == NEW
    assert page.read_text().startswith("<!doctype html>")
    assert f"{NEW}: compile" in done.stderr


def captured_report(report, versions=("0.10.2", "3.11.7")):
    rows = [
        {"name": name, "calls": 1, "fits": True, "total_bytes": size, "step_time_s": 0.05}
        for name, size in (("loss", 3 * 2**30), ("apply", report["memory"]["total_bytes"]))
    ]
    capture = {
        "versions": dict(zip(("jax", "python"), versions, strict=True)),
        "programs": rows,
        "step_time_s": {"value": report["prediction"]["step_time_s"] + 0.1, "origin": "model"},
    }
    return {**report, "capture": capture}


def test_a_kept_capture_is_compiled_by_each(machine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_capture(tmp_path / "kept")
    machine.answers = {
        "default": EndedProgram(0, json.dumps(captured_report(sample_report())), ""),
        NEW: EndedProgram(0, json.dumps(captured_report(newer_report())), ""),
    }
    typed = ["check", "kept", "--toolchain", NEW, "--memory-only", "--per-step", "512"]
    done = CliRunner().invoke(app, [*typed, "--flags", "--xla_kept=3", "--html", "page.html"])
    assert done.exit_code == 0, done.output
    words = ["check", str(folder), "--per-step", "512", "--memory-only"]
    words += ["--flags", "--xla_kept=3", "--json"]
    assert machine.checks() == {"default": words, NEW: words}
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    traced = "captured jax 0.10.2 traced the program, once for all; only the compiler differs"
    assert traced in lines
    assert "step of all programs 200 ms 180 ms −20 ms (−10.0 %) model" in lines
    assert "apply, HBM per device 3 GiB 3.5 GiB +512 MiB (+16.7 %) compiler" in lines
    assert "once for all" in PageReader((tmp_path / "page.html").read_text()).text


def test_a_flag_of_the_program_that_a_compiler_does_not_take_is_left_out_there(
    machine, tmp_path, monkeypatch
):
    seen = {}
    run = machine.run

    def remember(python, arguments, *, progress):
        if arguments[0] == "check":
            data = json.loads((Path(arguments[1]) / "capture.json").read_text())
            seen[str(python)] = data["libtpu_init_args"]
        return run(python, arguments, progress=progress)

    monkeypatch.setattr(toolchains, "run_tpukit", remember)
    machine.refused_flags = {NEW: ("xla_old",)}
    folder = write_capture(tmp_path / "kept", libtpu_init_args="--xla_old=1 --xla_kept=2")
    both = [parse_toolchain("default"), parse_toolchain(NEW)]
    found = toolchains.compare_captured(both, folder, [])
    assert seen == {"default": "--xla_old=1 --xla_kept=2", NEW: "--xla_kept=2"}
    assert "flags rejected none xla_old compiler" in shown(found)
    assert json.loads((folder / "capture.json").read_text())["libtpu_init_args"].startswith("--xla")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--toolchain", NEW, "--perfetto", "x.json"], "is for one check"),
        (["--toolchain", NEW, "--list-programs"], "is for one check"),
        (["--toolchain", NEW, "--on", "v6e-8,v5e-8"], "expected one slice"),
        (["--toolchain", "jax-new"], "is not a toolchain"),
    ],
)
def test_what_a_comparison_of_a_capture_refuses(machine, tmp_path, monkeypatch, words, reason):
    monkeypatch.chdir(tmp_path)
    write_capture(tmp_path / "kept")
    done = CliRunner().invoke(app, ["check", "kept", *words])
    assert reason in str(done.exception)
    assert not machine.asked


# What is said again as a key of the job, as itself, or not at all.
AS_KEYS = {
    *("on", "batch", "sequence", "mesh", "strategy", "remat", "optimizer", "moment_dtype"),
    *("microbatches", "attention", "set_"),
}
AS_TYPED = {"target", "torch", "arg", "donate", "flags", "memory_only", "no_cache", "timeout"}
REFUSED = {"fix", "perfetto", "handover", "dump", "decode", "prompt_length", "kv", "weights"}
REFUSED |= {"baseline", "program", "list_programs", "network", "keep"}
OF_CAPTURES = {"per_step"}  # said again for a captured program, refused for a job
OWN = {"toolchain", "html", "json"}


def test_no_option_of_a_check_is_forgotten():
    """A new one has to reach the other interpreters too, or be refused there."""
    names = {one.name for one in every_command()["check"].parameters}
    assert names == AS_KEYS | AS_TYPED | REFUSED | OF_CAPTURES | OWN


@pytest.mark.parametrize(
    "option", [["--fix"], ["--perfetto", "x.json"], ["--dump", "x"], ["--decode"]]
)
def test_what_only_one_check_leaves_is_refused(machine, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*CHECK, "--toolchain", NEW, *option])
    assert isinstance(done.exception, ConfigError)
    assert "is for one check" in str(done.exception)


def test_saved_reports_compare_with_their_versions_above(tmp_path):
    for name, report in (("a", sample_report()), ("b", newer_report())):
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    paths = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    page = tmp_path / "diff.html"
    done = CliRunner().invoke(app, ["report", "diff", *paths, "--html", str(page)])
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[:2] == [
        "before jax 0.10.2, libtpu 0.0.42.1",
        "after jax 0.12.0.1, libtpu 0.0.50.1",
    ]
    assert "libtpu 0.0.50.1" in PageReader(page.read_text()).text


@pytest.fixture
def second_toolchain(monkeypatch):
    """`make test-toolchains` makes the environments; without one there is nothing to compare."""
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(users_cache()))
    there = (f"{NEW}-py{python}" for python in ("3.13", "3.12"))
    name = next((one for one in there if is_made(parse_toolchain(one))), None)
    if name is None:
        pytest.skip("no second toolchain here; `make test-toolchains` makes them")
    return name


@pytest.mark.slow
@pytest.mark.libtpu
def test_a_real_check_with_a_real_second_toolchain(second_toolchain):
    done = CliRunner().invoke(
        app, ["check", "tiny", "--on", "v6e-4", "--toolchain", second_toolchain, "--json"]
    )
    assert done.exit_code == 0, done.stderr
    default, newer = (one["report"] for one in json.loads(done.stdout)["checks"])
    assert newer["versions"]["libtpu"].startswith("0.0.50")
    assert newer["memory"]["total_bytes"] > 0
    # The schedule of so small a program is the same, loop by loop and collective by collective.
    assert newer["operations"]["loops"] == default["operations"]["loops"] == 2
    times = [sum(row["times"] for row in one["collectives"]) for one in (default, newer)]
    assert times[0] == times[1]


@pytest.mark.slow
@pytest.mark.libtpu
def test_a_real_program_with_a_real_second_toolchain(second_toolchain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_FLAGS")
    (tmp_path / "one.py").write_text(ONE_STEP)
    words = ["--toolchain", second_toolchain, "--json"]
    behind = ["--on", "v6e-8", "--keep", "kept", "--", sys.executable, "one.py"]
    done = CliRunner().invoke(app, ["check", *words, *behind])
    assert done.exit_code == 0, done.stderr
    default, newer = (one["report"] for one in json.loads(done.stdout)["checks"])
    assert newer["versions"]["libtpu"].startswith("0.0.50")
    assert {one["capture"]["versions"]["jax"] for one in (default, newer)} == {"0.10.2"}
    # What the program holds does not depend on the compiler; its temporaries may.
    for purpose in ("parameters", "optimizer state", "batch inputs"):
        assert newer["memory"]["purposes"][purpose] == default["memory"]["purposes"][purpose]
    assert newer["prediction"]["step_time_s"] > 0
    again = CliRunner().invoke(app, ["check", "kept", *words])
    assert json.loads(again.stdout)["checks"][1]["report"]["memory"] == newer["memory"]
