"""Code in the documents: every block of Python runs here, or says why it cannot."""

import ast
import builtins
import importlib
import os
import re
import shlex
import subprocess
import sys
from unittest.mock import patch

import pytest
import snippets
from snippets import ALL, PAGES, ROOT, run_python

PYTHON = [one for one in ALL if one.language == "python"]
RUN = {page: [one for one in ALL if one.page == page and one.run] for page in {o.page for o in ALL}}
WITH_PYTHON = sorted({one.page for one in ALL if one.kind == "python"})
WITH_SLOW = sorted({one.page for one in ALL if one.slow})
WITH_QUICK = sorted({one.page for one in ALL if one.kind == "python" and not one.slow})
WITH_SHELL = sorted({one.page for one in ALL if one.kind == "shell"})


def named(snippet):
    return f"{snippet.page}:{snippet.line}"


@pytest.mark.parametrize("snippet", PYTHON, ids=named)
def test_python_is_python_and_imports_what_there_is(snippet):
    for node in ast.walk(ast.parse(snippet.code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tpukit"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                found = hasattr(module, alias.name) or _is_module(f"{node.module}.{alias.name}")
                assert found, f"{node.module} has no {alias.name}"


def _is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("snippet", PYTHON, ids=named)
def test_python_runs_or_says_why_not(snippet):
    if snippet.kind == "file":
        assert snippet.page in WITH_SHELL, "no command on the page has a use for the file"
    elif snippet.kind == "no":
        assert len(snippet.run.partition(", ")[2].split()) >= 3, "a reason, in words"
    else:
        assert snippet.kind == "python", "say above it that it runs: tests/support/snippets.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_python_is_overlooked(page):
    text = page.read_text("utf-8")
    fences = re.findall(r"^[ >]*(?:```+|~~~+) *(?:python|py)\b", text, re.MULTILINE)
    setups = text.count("<!-- run: setup")
    assert len([one for one in PYTHON if ROOT / one.page == page]) == len(fences) + setups


@pytest.mark.parametrize("page", WITH_QUICK)
def test_python_that_says_so_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtins, "input", None)
    with patch.dict(os.environ):
        run_python(page, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_SLOW)
def test_slow_python_that_says_so_runs(page, tmp_path):
    """In a process of its own: clouds are emulated and jobs launched, which leaves traces."""
    command = [sys.executable, "-W", "error", snippets.__file__, page]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_SHELL)
def test_commands_that_say_so_run(page, tmp_path):
    for one in RUN[page]:
        if one.kind == "file":
            (tmp_path / one.run.partition(" ")[2]).write_text(one.code)
        if one.kind != "shell":
            continue
        for line in one.code.splitlines():
            words = shlex.split(line, comments=True)
            into = tmp_path / words.pop() if ">" in words else None
            words = [word for word in words if word != ">"]
            if words[0] in ("tpukit", "python"):
                words[0:1] = [sys.executable, *(["-m", "tpukit"] if words[0] == "tpukit" else [])]
            done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 0, (line, done.stderr[-2000:])
            if into is not None:
                into.write_text(done.stdout)


def test_pages_by_task_have_code_that_runs():
    tasks = ("quick-start", "choose-a-slice", "fine-tune", "survive-spot", "troubleshooting")
    assert {f"docs/{name}.md" for name in tasks} <= {*WITH_PYTHON, *WITH_SHELL}
    assert (ROOT / "mkdocs.yml").is_file()
