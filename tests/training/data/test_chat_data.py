"""Conversations: the template's text, transformers' tokens, and loss on answers only."""

import json

import numpy as np
import pytest

from tpukit.errors import ConfigError, TPUValidationError
from tpukit.models.huggingface.chat import ChatTemplate
from tpukit.training import open_data
from tpukit.training.data.chat import render_conversations
from tpukit.training.data.prepare import prepare_tokens

TEMPLATE = (
    "{% for one in messages %}<|start|>{{ one.role }}\n"
    "{% if one.role == 'assistant' %}{% generation %}{{ one.content }}<|end|>\n{% endgeneration %}"
    "{% else %}{{ one.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CHATS = [
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is two and two?"},
        {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "And three?"},
        {"role": "assistant", "content": "Seven, if added."},
    ],
    [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello to you."}],
    [{"role": "user", "content": "Schön?"}, {"role": "assistant", "content": "東京 🙂"}],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tokenizer and a chat template, as an instruction-tuned model has them."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|start|>", "<|end|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    texts = [one["content"] for chat in CHATS for one in chat]
    tokenizer.train_from_iterator([*texts, "user assistant system"] * 5, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**about, "chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def prepared(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    lines = [json.dumps({"messages": chat}) for chat in CHATS]
    (folder / "chat.jsonl").write_text("\n".join(lines) + "\n")
    made = prepare_tokens(folder / "chat.jsonl", folder / "tokens", tokenizer=model, chat=True)
    return folder / "tokens", made


def theirs(model):
    """Tokens and which of them an assistant says, by transformers."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(model / "tokenizer.json"), chat_template=TEMPLATE
    )
    return [
        tokenizer.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
        )
        for chat in CHATS
    ]


def test_tokens_and_answers_are_those_of_transformers(model, prepared):
    folder, made = prepared
    assert made.answers_not_learnt == 0
    assert made.num_documents == len(CHATS)
    data = open_data(
        folder, sequence_length=128, batch_size=1, packing="documents", shuffle=False, num_epochs=1
    )
    batch = next(iter(data.stream()))
    found = {}
    for segment in (1, 2, 3):
        at = batch["segment_ids"][0] == segment
        found[tuple(batch["inputs"][0][at].tolist())] = batch["targets"][0][at]
    for one in theirs(model):
        tokens, mask = np.asarray(one["input_ids"]), np.asarray(one["assistant_masks"], bool)
        expected = np.where(mask[1:], tokens[1:], -1)
        np.testing.assert_array_equal(found[tuple(tokens[:-1].tolist())], expected)


def test_one_long_run_leaves_out_the_same(prepared):
    folder, made = prepared
    whole = open_data(
        folder, sequence_length=made.num_tokens - 1, batch_size=1, shuffle=False, num_epochs=1
    )
    targets = next(iter(whole.stream()))["targets"][0]
    edges = np.load(folder / "answers.npy").reshape(-1, 2)
    expected = np.zeros(made.num_tokens, bool)
    for begin, end in edges:
        expected[begin:end] = True
    np.testing.assert_array_equal(targets >= 0, expected[1:])
    assert 0 < expected.mean() < 0.7


def test_answers_that_are_written_otherwise_later_are_not_learnt():
    forgets = ChatTemplate(
        "{% for one in messages %}{% if one.role == 'assistant' and not loop.last %}[said]"
        "{% else %}{{ one.role }}: {{ one.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        {},
        "here",
    )
    [found] = render_conversations(forgets, CHATS[:1])
    assert found.skipped_answers == 1
    [(begin, end)] = found.answers
    assert found.text[begin:end] == "Seven, if added.\n"


def test_data_whose_answers_were_touched_are_refused(prepared, tmp_path):
    folder, _ = prepared
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edges = np.load(tmp_path / "answers.npy")
    np.save(tmp_path / "answers.npy", edges + 1)
    with pytest.raises(TPUValidationError, match="answers"):
        open_data(tmp_path, sequence_length=8, batch_size=1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"text": "no messages"}, "list of messages"),
        ({"messages": [{"role": "user", "content": "x"}]}, "assistant"),
        ({"messages": "hello"}, "list of messages"),
        ([1, 2], "list of messages"),
    ],
)
def test_lines_that_are_no_conversations(model, tmp_path, line, words):
    (tmp_path / "bad.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(TPUValidationError, match=words):
        prepare_tokens(tmp_path / "bad.jsonl", tmp_path / "out", tokenizer=model, chat=True)


def test_bytes_have_no_template(tmp_path):
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": CHATS[0]}) + "\n")
    with pytest.raises(ConfigError, match="template"):
        prepare_tokens(tmp_path / "chat.jsonl", tmp_path / "out", tokenizer="bytes", chat=True)
