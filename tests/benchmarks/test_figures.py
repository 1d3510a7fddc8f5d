"""Figures of README, CHANGELOG and docs against the result files of benchmarks."""

import ast
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import figures
import harness
import pytest
from harness import SAMPLES, SIDES, Result, Run, Subcommand, read_command_line
from run_all import QUICK, scripts

ROOT = Path(harness.__file__).parents[1]
KNOWN = figures.figures()


def test_pages_state_the_figures_of_the_result_files():
    changed = [
        path.name
        for path in figures.pages()
        if path != figures.PAGE
        and path.read_text("utf-8") != figures.filled(path.read_text("utf-8"), KNOWN)
    ]
    assert not changed, "run `python tools/figures.py`"
    assert figures.PAGE.read_text("utf-8") == figures.page(), "run `python tools/figures.py`"


def test_every_marker_is_closed_and_as_many_figures_are_filled_as_were_guarded_before():
    marked = 0
    for path in figures.pages():
        text = path.read_text("utf-8")
        marked += len(figures.MARKED.findall(text))
        assert text.count("<!--/-->") == len(figures.MARKED.findall(text)), path
    assert marked >= 195


def test_figures_say_what_they_compare_how_and_when():
    for script, run, figure in harness.all_figures():
        where = f"{script}: {figure.name}"
        assert date(2026, 11, 1) <= date.fromisoformat(run.date), where
        assert run.command.startswith(f"python benchmarks/{script}.py"), where
        if figure.compares:
            assert set(figure.compares.split(" : ")) <= set(SIDES), where
            assert figure.sample in SAMPLES, where


def test_a_key_is_kept_once_and_its_command_exists():
    names = [(script, figure.name) for script, _, figure in harness.all_figures()]
    assert len(names) == len(set(names))
    commands = scripts()
    for script, run, _ in harness.all_figures():
        words = run.command.split()[2:]
        assert commands[script] == [""] or words[0] in commands[script], run.command
    for line in QUICK:
        script, *words = line.split()
        assert commands[script] == [""] or words[0] in commands[script]


def test_every_script_that_a_page_cites_exists_with_its_command():
    commands = scripts()
    for path in figures.pages():
        for script, word in re.findall(
            r"benchmarks/(\w+)\.py(?: ([a-z][\w-]*))?", path.read_text()
        ):
            assert (ROOT / "benchmarks" / f"{script}.py").exists(), (path.name, script)
            if commands.get(script, [""]) != [""] and word:
                assert word in commands[script], (path.name, script, word)


def test_a_figure_without_a_result_is_refused():
    with pytest.raises(KeyError):
        figures.filled("<!--predict/nothing-->1 %<!--/-->", KNOWN)


def test_figures_of_kept_rows_follow_from_them():
    """Recompute what needs no compiler: scored steps, planned layouts, captured trainers."""
    import captured
    import plan

    from tpukit.hardware.rates import ScoredSteps

    steps = ScoredSteps.shipped()
    errors = sorted(one.error for one in steps.counted)
    assert kept("predict", "largest_error") == f"{100 * errors[-1]:.1f} %"
    assert kept("predict", "median_error") == f"{100 * errors[len(errors) // 2]:.1f} %"
    assert kept("predict", "mean_error") == f"{100 * sum(errors) / len(errors):.1f} %"
    assert kept("predict", "in_band") == f"{steps.covered} of {len(errors)}"
    gains = plan.gains(plan.json.loads(plan.FOUND.read_text())).values()
    for side, name in enumerate(("timeline", "run")):
        values = [pair[side] for pair in gains]
        faster = sum(value >= 0 for value in values)
        assert kept("plan", f"layouts_over_{name}") == f"{faster} of {len(values)}"
        median = plan.statistics.median(values)
        assert kept("plan", f"layouts_gain_{name}") == f"{100 * median:.0f} %"
    rows = captured.json.loads(captured.ROWS.read_text())
    for (_, trainer), ratios in captured.ratios_of(rows).items():
        spread = dict.fromkeys((f"{min(ratios):.3f}", f"{max(ratios):.3f}"))
        assert kept("captured", trainer.split()[0]) == " to ".join(spread)


def kept(script, key):
    return KNOWN[script, key][1].text


@pytest.mark.parametrize(
    ("bar", "verdict"),
    [
        ({"at_most": 1.0}, "MISSED"),
        ({"at_most": 2.0}, "met"),
        ({"at_least": 2.0}, "met"),
        ({"at_least": 3.0}, "MISSED"),
        ({}, ""),
    ],
)
def test_a_bar_is_cleared_or_missed_by_the_worst_number(bar, verdict):
    for value in (2.0, (2.0, 2.0)):
        result = Result("what", value, "s", **bar)
        assert result.verdict == verdict
        assert bool(result.target) == bool(bar)
        assert not verdict or str(result).endswith(verdict)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (Result("", (0.58, 0.94), form=".2f"), "0.58 to 0.94"),
        (Result("", (3.9, 3.9), "s", form=".1f"), "3.9 s"),
        (Result("", (47, 49), form=".0f", joint=" of "), "47 of 49"),
        (Result("", (-0.0003, 0.0031), form="+.4f", joint=" ± "), "−0.0003 ± 0.0031"),
        (Result("", 8.1e-8, form=".1e"), "8.1e-8"),
        (Result("", -7.4, "%", form=".1f"), "-7.4 %"),
    ],
)
def test_a_result_is_written_as_pages_state_it(result, text):
    assert result.text == text


def test_runs_are_kept_and_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    result = Result("a thing", (1.0, 2.0), "s", at_most=3, key="thing", form=".1f")
    run = Run(
        "python benchmarks/x.py", "2026-11-18", {"load": 1.0}, {"jax": "1"}, {"thing": result}
    )
    harness.write_runs("x", [run])
    assert harness.read_runs("x") == [run]
    assert [figure.text for _, _, figure in harness.all_figures()] == ["1.0 to 2.0 s"]


def test_a_missing_package_is_refused_in_one_sentence(capsys):
    command = Subcommand("fast", needs=("a_package_of_nobody",))
    with pytest.raises(SystemExit) as ended:
        read_command_line("__main__", "Speed of it.", command, words=["fast"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "Speed of it: needs a_package_of_nobody, which is not on this machine\n"
    )


def test_a_script_that_is_imported_reads_no_command_line():
    assert not vars(read_command_line("plan", "Plans.", Subcommand("x"), words=["nonsense"]))


def test_nothing_heavy_is_imported_before_the_command_line_is_read():
    """So that `--help` is quick, and a missing package is refused instead of failing to import."""
    allowed = {*sys.stdlib_module_names, "harness"}
    for script in scripts():
        path = ROOT / "benchmarks" / f"{script}.py"
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMMAND_LINE":
                break
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert {name.split(".")[0] for name in names} <= allowed, (script, names)


def test_help_runs_nothing():
    command = [sys.executable, str(ROOT / "benchmarks" / "predict.py"), "score", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--recorded" in done.stdout
    assert "--json" in done.stdout
