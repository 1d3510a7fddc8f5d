"""`tpukit quantize` from a checkpoint to a model that generates."""

import json

import jax
import pytest
from typer.testing import CliRunner

from tpukit import quantization
from tpukit.cli.app import app
from tpukit.errors import TargetNotReached
from tpukit.models import export_huggingface, get_preset
from tpukit.models.adapters import adapt


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("quantize")
    config = get_preset("tiny").replace(vocab_size=257)
    params = adapt(config, inputs=("inputs",), batch_shapes={}).init(jax.random.key(0)).params
    export_huggingface(params, config, made / "hf")
    (made / "text.jsonl").write_text('{"text": "a line of some text, and more of it"}\n' * 200)
    return made


def run(*words):
    return CliRunner().invoke(app, ["quantize", *map(str, words)])


def test_a_checkpoint_is_quantized_shown_saved_and_generates(folder):
    result = run(
        *(folder / "hf", "--calibration", folder / "text.jsonl", "--tokenizer", "bytes"),
        *("--format", "int8", "--rule", r"\[1\]=int4", "--rule", "nothing=int4"),
        *("--batches", 4, "--batch-size", 4, "--sequence-length", 32),
        *("-o", folder / "out", "--html", folder / "page.html", "--json"),
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["unused_rules"] == ["nothing"]
    assert {row["format"] for row in found["matrices"]} == {"int8", "int4", "skip"}
    assert 0.9 < found["accuracy_retention"] < 1.1
    assert "Bits of each matrix" in (folder / "page.html").read_text()
    words = ["generate", str(folder / "out"), "--prompt", "ab", "--max-new-tokens", "4"]
    made = CliRunner().invoke(app, words)
    assert made.exit_code == 0, made.output


def test_a_target_that_is_missed_exits_1_and_shows_the_best(folder):
    result = run(
        *(folder / "hf", "--calibration", folder / "text.jsonl", "--tokenizer", "bytes"),
        *("--target-retention", 1.0, "--candidate", "int4", "--batches", 2),
        *("--batch-size", 2, "--sequence-length", 16, "--rule", "mlp=skip"),
    )
    assert result.exit_code == 1, result.output
    assert "NOT REACHED" in result.stderr
    assert "missed" in result.stdout


def test_steps_of_tuning_are_handed_on(folder, monkeypatch):
    asked = {}

    def stop(*args, **options):
        asked.update(options)
        raise TargetNotReached("enough")

    monkeypatch.setattr(quantization, "quantize_model", stop, raising=False)
    run(folder / "hf", "--calibration", folder / "text.jsonl", "--tune", 7)
    assert asked["tune"] == 7


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hf"], "--calibration"),
        (["hf", "--calibration", "x", "--format", "int9"], "no format of a plan"),
        (["hf", "--calibration", "x", "--rule", "int8"], "PATTERN=FORMAT"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(words, said):
    result = run(*words)
    assert said in str(result.exception)
