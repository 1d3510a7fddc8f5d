"""`--kv`: caches measured, written, generated with, and refused where they keep too little."""

import json

import jax
import pytest
from typer.testing import CliRunner

from tpukit.cli.app import app
from tpukit.errors import TPUCheckpointError, TPUValidationError
from tpukit.models import export_huggingface, get_preset
from tpukit.models.adapters import adapt
from tpukit.quantization import load_cache

CONFIG = get_preset("tiny").replace(vocab_size=257, n_layers=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("kv")
    params = adapt(CONFIG, inputs=("inputs",), batch_shapes={}).init(jax.random.key(0)).params
    export_huggingface(params, CONFIG, made / "hf")
    (made / "text.jsonl").write_text('{"text": "a line of some text, and more of it"}\n' * 200)
    return made


def run(*words):
    return CliRunner().invoke(app, [*map(str, words)])


def generate(folder, *words):
    return run(
        *("generate", folder / "hf", "--tokenizer", "bytes", "--prompt", "abc" * 28),
        *("--max-new-tokens", 8, "--json", *words),
    )


def test_text_says_what_its_cache_changed(folder):
    result = generate(folder, "--kv", "int4", "--kv-target", 0.01)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["kv"]
    assert found["format"] == "int4"
    assert 4 < found["bits"] < 16
    assert 0.01 <= found["choices_kept"] <= 1
    assert found["reached"]


def test_unknown_caches_are_refused_with_the_nearest(folder):
    result = generate(folder, "--kv", "in4")
    assert isinstance(result.exception, TPUValidationError)
    assert "Did you mean 'int4'" in str(result.exception)


@pytest.mark.slow
def test_a_cache_is_measured_written_and_used(folder):
    data = ("--calibration", folder / "text.jsonl", "--tokenizer", "bytes")
    sizes = ("--batches", 4, "--batch-size", 4, "--sequence-length", 96)
    words = ("quantize", folder / "hf", *data, *sizes, "--kv", "pq4", "--json")
    missed = run(*words, "--target-retention", 1.0, "--kv", "pq2")
    found = json.loads(missed.stdout)
    assert [one["format"] for one in found["formats"]] == ["pq4", "pq2"]
    assert found["formats"][0]["kl"]["value"] < found["formats"][1]["kl"]["value"]
    if found["chosen"] is None:
        assert missed.exit_code == 1
        assert "NOT REACHED no" in missed.stderr
    done = run(*words, "--target-retention", 0.0001, "-o", folder / "cache")
    assert done.exit_code == 0, done.output
    said = json.loads(generate(folder, "--kv", folder / "cache", "--kv-target", 0).stdout)["kv"]
    assert (said["format"], said["choices_kept"]) == ("pq4", None)
    with pytest.raises(TPUCheckpointError, match="of another model"):
        load_cache(folder / "cache", CONFIG.replace(n_layers=2))
    about = folder / "cache/kv_cache.json"
    about.write_text("[" * 100_000)
    with pytest.raises(TPUCheckpointError, match="cannot be read"):
        load_cache(folder / "cache", CONFIG)
