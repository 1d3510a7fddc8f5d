"""Pages that are written from the code, and the site as a whole."""

import importlib.util
import subprocess
import sys

import pytest
import yaml
from snippets import ROOT


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_commands_is_made_of_them():
    written = tool("cli_reference")
    assert written.PAGE.read_text("utf-8") == written.render(), "run `make docs`"


@pytest.mark.slow
def test_the_page_of_names_is_made_of_them():
    written = tool("python_reference")
    assert written.PAGE.read_text("utf-8") == written.render(), "run `make docs`"


def test_every_page_is_in_the_navigation_once():
    pages = []

    def walk(entry):
        for one in entry if isinstance(entry, list) else [entry]:
            if isinstance(one, dict):
                walk(list(one.values()))
            elif isinstance(one, list):
                walk(one)
            else:
                pages.append(one)

    walk(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(pages) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


@pytest.mark.slow
def test_the_site_is_built_with_every_link_whole(tmp_path):
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "reference.html").read_text()
    assert "TPUTrainer" in page
    assert "https://fonts.g" not in (tmp_path / "index.html").read_text()
