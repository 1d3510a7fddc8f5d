"""Exported folders generate in transformers exactly as `tpukit generate` does."""

import json

import pytest
from typer.testing import CliRunner

from tpukit.cli.app import app

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.usefixtures("compile_quickly")
ANSWERS = {"name": "I am Ada", "sky": "blue", "two": "one and one"}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|begin|>", "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
BEGIN, END, PAD, _, TURN = range(128, 133)


def run(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base model as transformers saves it: its end token is not the one that ends a turn."""
    folder = tmp_path_factory.mktemp("base") / "base"
    letters = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({chr(one): one for one in range(128)}, unk_token="?")
    )
    letters.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    letters.decoder = tokenizers.decoders.Fuse()
    letters.add_special_tokens(SPECIAL)
    letters.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", BEGIN)]
    )
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, bos_token="<|begin|>", eos_token="<|endoftext|>",
        pad_token="<|pad|>", chat_template=TEMPLATE,
    )  # fmt: skip
    words.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=133, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        bos_token_id=BEGIN, eos_token_id=END, pad_token_id=PAD, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.temperature = 0.6
    model.generation_config.do_sample = True
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tuned(base):
    """A fine-tune on conversations that learns its answers by heart."""
    folder = base.parent
    chats = [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}
        for ask, answer in ANSWERS.items()
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats * 40)))
    run(
        *("data", "prepare", folder / "chats.jsonl", "-o", folder / "chats"),
        *("--tokenizer", base, "--chat"),
    )
    run(
        *("train", base, "--data", folder / "chats", "--steps", 80, "--batch-size", 8),
        *("--sequence-length", 64, "--learning-rate", 0.01, "--run-dir", folder / "run"),
        *("--set", f"train.init_from={base}", "--set", "train.packing=documents"),
        *("--set", "train.precision=float32", "--mesh", "data=8", "--json"),
    )
    return folder / "run"


@pytest.fixture(scope="module")
def exported(tuned):
    run("export", tuned, tuned.parent / "exported", "--json")
    return tuned.parent / "exported"


def generated(source, prompt, *words):
    typed = ("--prompt", prompt, "--temperature", 0, "--max-new-tokens", 40, "--json", *words)
    return json.loads(run("generate", source, *typed))


def greedy(folder, prompt, *, chat):
    """What transformers generates with nothing but the folder, its own settings included."""
    words = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    if chat:
        asked = [{"role": "user", "content": prompt}]
        given = words.apply_chat_template(
            asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        given = words(prompt, return_tensors="pt")
    out = model.generate(**given, do_sample=False, max_new_tokens=40)
    new = out[0, given["input_ids"].shape[1] :].tolist()
    ended = [n for n, token in enumerate(new) if token in (END, TURN)]
    return new[: ended[0]] if ended else new


@pytest.mark.parametrize("prompt", ANSWERS)
def test_a_chat_fine_tune_answers_and_stops_in_both(exported, prompt):
    ours = generated(exported, prompt, "--chat")
    assert ours["tokens"][0] == greedy(exported, prompt, chat=True)
    assert (ours["text"], ours["ended"]) == (ANSWERS[prompt], ["end"])


def test_the_run_itself_answers_alike(tuned):
    assert generated(tuned, "sky", "--chat")["text"] == ANSWERS["sky"]


def test_a_plain_prompt_begins_as_the_tokenizer_begins_it(exported):
    ours = generated(exported, "two")
    assert ours["tokens"][0] == greedy(exported, "two", chat=False)


def test_the_settings_of_the_base_are_kept(base, exported):
    config = json.loads((exported / "config.json").read_text())
    assert (config["bos_token_id"], config["pad_token_id"]) == (BEGIN, PAD)
    assert config["dtype"] == "float32"
    settings = json.loads((exported / "generation_config.json").read_text())
    assert settings["eos_token_id"] == config["eos_token_id"] == [END, TURN]
    assert (settings["temperature"], settings["do_sample"]) == (0.6, True)
    again = exported.parent / "again"
    run("export", exported, again, "--json")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert json.loads((again / name).read_text()) == json.loads((exported / name).read_text())
