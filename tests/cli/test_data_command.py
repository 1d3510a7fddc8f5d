"""`tpukit data`: prepare, then inspect, for people, for machines and as a page."""

import json

import pytest
from typer.testing import CliRunner

from tpukit.cli.data import app
from tpukit.errors import TPUValidationError


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"body": "hello"}\n{"body": "world"}\n')
    return path


def test_text_is_prepared_and_inspected(corpus, tmp_path):
    out = tmp_path / "out"
    made = run("prepare", corpus, "-o", out, "--tokenizer", "bytes", "--text-key", "body", "--json")
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["num_tokens"] == 12
    page = tmp_path / "page.html"
    seen = run("inspect", out, "--json", "--html", page)
    assert seen.exit_code == 0, seen.output
    assert json.loads(seen.stdout)["num_documents"] == 2
    assert "<svg" in page.read_text()
    shown = run("inspect", out).stdout
    assert "most frequent tokens" in shown
    assert "108 'l'" in shown


def test_nothing_is_replaced_unless_told(corpus, tmp_path):
    arguments = ("prepare", corpus, "-o", tmp_path / "out", "--tokenizer", "bytes")
    arguments = (*arguments, "--text-key", "body")
    assert run(*arguments).exit_code == 0
    again = run(*arguments)
    assert isinstance(again.exception, TPUValidationError)
    assert "--force" in str(again.exception)
    assert run(*arguments, "--force").exit_code == 0


def test_a_wrong_field_names_the_right_one(corpus, tmp_path):
    wrong = run("prepare", corpus, "-o", tmp_path / "out", "--tokenizer", "bytes")
    assert "has no field 'text', only body" in str(wrong.exception)
    assert not (tmp_path / "out").exists()
