"""Code in the documents: what says that it runs runs, and everything else names what is there."""

import ast
import builtins
import importlib
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO

import pytest
from snippets import ALL, ROOT

PYTHON = [one for one in ALL if one.language == "python"]
RUN = {page: [one for one in ALL if one.page == page and one.run] for page in {o.page for o in ALL}}
WITH_PYTHON = sorted(page for page, found in RUN.items() if any(o.run == "python" for o in found))
WITH_SHELL = sorted(page for page, found in RUN.items() if any(o.run == "shell" for o in found))


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


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_that_says_so_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtins, "input", None)
    names = {"__name__": "__main__"}
    for one in RUN[page]:
        if one.run == "python":
            with redirect_stdout(StringIO()):
                exec(compile(one.code, named(one), "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_SHELL)
def test_commands_that_say_so_run(page, tmp_path):
    for one in RUN[page]:
        kind, _, name = one.run.partition(" ")
        if kind == "file":
            (tmp_path / name).write_text(one.code)
        if kind != "shell":
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
