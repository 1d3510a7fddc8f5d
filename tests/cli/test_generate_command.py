"""`tpukit generate` and `tpukit export`: what a run learnt comes out as text and as safetensors."""

import json

import jax
import numpy as np
import pytest
import typer
from safetensors.numpy import load_file
from typer.testing import CliRunner

from tpukit.cli.export import export
from tpukit.cli.generate import generate
from tpukit.errors import ConfigError, TPUCheckpointError, TPUModelError, TPUValidationError
from tpukit.job import TrainingSettings
from tpukit.models import get_preset, import_huggingface
from tpukit.parallel import create_mesh
from tpukit.training import TPUTrainer
from tpukit.training.trained_model import load_trained

# One worker: the fixture that all of them share is dear.
pytestmark = pytest.mark.xdist_group("generate")

TEXT = "abcdefghij" * 400


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that learnt to count on from a to j."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(TEXT)
    trainer = TPUTrainer(
        model=get_preset("tiny", n_layers=1, vocab_size=257),
        use_bf16=False,
        run_dir=folder / "run",
        settings=TrainingSettings(
            tokenizer="bytes", learning_rate=1e-2, checkpoint_every=30, weight_decay=0.0
        ),
        progress=False,
        devices=jax.devices()[:1],
    )
    trainer.train(folder / "text.txt", num_steps=60, batch_size=8, sequence_length=32)
    return folder / "run", trainer.state.params


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(generate)
    app.command()(export)

    def invoke(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return invoke


def test_a_run_says_what_it_learnt(run, trained):
    result = run(
        "generate", trained[0], "--prompt", "abc", "--temperature", 0, "--max-new-tokens", 20
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == "abc" + "defghijabcdefghijabc" + "\n"
    assert "at step 60: 20 tokens" in result.stderr
    assert "(measured" in result.stderr


@pytest.mark.parametrize("below", ["", "checkpoints", "checkpoints/60"])
def test_the_newest_checkpoint_is_found_from_anywhere(trained, below):
    found = load_trained(trained[0] / below)
    assert (found.step, found.tokenizer) == (60, "bytes")
    jax.tree.map(np.testing.assert_array_equal, found.params, trained[1])
    assert load_trained(trained[0] / "checkpoints" / "30").step == 30


def test_json_holds_text_and_tokens(run, trained):
    result = run(
        *("generate", trained[0], "--prompt", "hij", "--temperature", 0, "--json"),
        *("--max-new-tokens", 4, "--step", 60),
    )
    found = json.loads(result.stdout)
    assert (found["text"], found["tokens"]) == ("abcd", [[97, 98, 99, 100]])
    assert (found["step"], found["origin"]) == (60, "measured")


def test_export_is_exact_and_reads_back(run, trained, tmp_path):
    out = tmp_path / "exported"
    result = run("export", trained[0], out, "--json")
    assert result.exit_code == 0, result.output
    about = json.loads(result.stdout)
    assert about["files"] == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    assert about["step"] == 60
    assert about["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(trained[1]))
    jax.tree.map(np.testing.assert_array_equal, import_huggingface(out).params, trained[1])
    kernel = np.asarray(trained[1]["layers"]["mlp"]["down_proj"]["kernel"][0])
    stored = load_file(out / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(stored, kernel.T)

    again = run(
        *("generate", out, "--prompt", "abc", "--temperature", 0),
        *("--max-new-tokens", 6),
    )
    assert again.stdout == "abcdefghi\n"
    refused = run("export", trained[0], out)
    assert isinstance(refused.exception, TPUValidationError)
    assert "not overwritten" in str(refused.exception)
    (out / "tokenizer.json").unlink()
    missing = run("generate", out, "--prompt", "a")
    assert "give --tokenizer bytes" in str(missing.exception)


def test_transformers_reads_bytes_as_we_do(run, trained, tmp_path):
    transformers = pytest.importorskip("transformers")
    assert run("export", trained[0], tmp_path / "out").exit_code == 0
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert str(model.dtype) == "torch.float32"  # what the run computed in
    text = "Größe\n"
    assert words(text)["input_ids"] == list(text.encode())
    out = model.generate(**words("abc", return_tensors="pt"), do_sample=False, max_new_tokens=9)
    assert words.decode(out[0]) == "abcdefghijab"
    assert model.generation_config.eos_token_id == 256


def test_a_failed_export_leaves_nothing(run, trained, tmp_path):
    result = run("export", trained[0], tmp_path / "out", "--step", 7)
    assert isinstance(result.exception, TPUCheckpointError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["{run}x"], TPUValidationError, "does not exist.* Did you mean 'run'"),
        (["{run}/.."], TPUValidationError, "neither a run .* nor a Hugging Face folder"),
        (["{run}", "--prompt", "a", "--step", "7"], TPUCheckpointError, "Complete ones: 30, 60"),
        (["{run}", "--tokenizer", "nothing.json"], ConfigError, "no tokenizer file"),
        (["{run}", "--temperature", "-1"], TPUValidationError, "is -1.0; accepted are 0 to 1,000"),
        (
            ["{run}", "--prompt", "a", "--max-new-tokens", "999"],
            TPUModelError,
            "exceed max_seq_len=128",
        ),
    ],
)
def test_wrong_input_is_one_clear_error(run, trained, arguments, error, message):
    result = run("generate", *(word.format(run=trained[0]) for word in arguments))
    assert isinstance(result.exception, error), result.output
    with pytest.raises(error, match=message):
        raise result.exception


def test_a_model_of_ones_own_is_refused(tmp_path):
    (tmp_path / "run.json").write_text(
        json.dumps({"format": 1, "identity": {"model": "tuple"}, "settings": {}})
    )
    with pytest.raises(TPUModelError, match="trained a user's own model, 'tuple'"):
        load_trained(tmp_path)


def test_a_mesh_says_the_same_and_a_stop_word_ends_it(run, trained):
    typed = ("--prompt", "abc", "--temperature", 0, "--max-new-tokens", 20, "--json")
    result = run("generate", trained[0], *typed, "--mesh", "fsdp=8", "--stop", "ja")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (said["text"], said["stop"], said["ended"]) == ("defghi", "ja", ["stop"])
    keys = load_trained(trained[0], mesh=mesh_of_all()).params["layers"]["self_attention"]["k_proj"]
    assert len(keys["kernel"].sharding.device_set) == 8


def mesh_of_all():
    return create_mesh(mesh_shape=(8,), axis_names=("fsdp",))


def test_a_conversation_needs_a_template(run, trained, tmp_path):
    exported = tmp_path / "exported"
    assert run("export", trained[0], exported).exit_code == 0
    result = run("generate", exported, "--chat", "--tokenizer", "bytes", "--prompt", "a")
    assert isinstance(result.exception, TPUValidationError)
    assert "--chat needs the template" in str(result.exception)
    result = run("generate", exported, "--system", "x", "--prompt", "a")
    assert "--system is part of a conversation" in str(result.exception)


def test_a_template_makes_the_prompt(run, trained, tmp_path):
    """A tokenizer of letters, with a template that says everything twice."""
    exported = tmp_path / "exported"
    assert run("export", trained[0], exported).exit_code == 0
    tokenizers = pytest.importorskip("tokenizers")
    letters = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({chr(one): one for one in range(256)}, unk_token="?")
    )
    letters.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    letters.decoder = tokenizers.decoders.Fuse()
    letters.save(str(exported / "tokenizer.json"))
    (exported / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"
    )
    typed = ("--chat", "--prompt", "abcdefghij", "--temperature", 0, "--max-new-tokens", 3)
    result = run("generate", exported, *typed, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    said = json.loads(result.stdout)
    assert said["prompt"] == "abcdefghij" * 2
    assert said["text"] == "abc"
