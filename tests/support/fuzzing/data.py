"""Training data: text, conversations, tokenizers, token files, prepared folders."""

import json

import numpy as np

from .kinds import JSON_ATTACKS, command, kind

TEXTS = [{"text": "a line of text, and more", "id": 7}, {"text": [5, 6, 7, 250]}, "plain"]
CHATS = [
    [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello to you."}],
    [{"role": "user", "content": "Schön?"}, {"role": "assistant", "content": "東京 🙂"}],
]
TEMPLATE = "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}"
LONE = b'{"text": "half of a pair: \\ud83d"}\n{"text": "\\udc00 \\ud83d\\ude00"}\n'


@kind(
    "documents",
    *[
        command("data", "prepare", "text.jsonl", "-o", "out", "--tokenizer", "bytes"),
        command("data", "inspect", "text.jsonl", "--tokenizer", "model"),
        command("data", "prepare", "text.txt", "-o", "out", "--tokenizer", "model", "--json"),
    ]
    * 4,
    command("data", "prepare", "chat.jsonl", "-o", "out", "--tokenizer", "model", "--chat"),
    only="*.*l*",
    known=[(f"{name}.jsonl", attack) for attack in (*JSON_ATTACKS, LONE) for name in ("text",) * 3],
)
def _documents(folder):
    _write_tokenizer(folder / "model")
    (folder / "text.jsonl").write_text("".join(json.dumps(one) + "\n" for one in TEXTS * 4))
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": c}) + "\n" for c in CHATS))
    (folder / "text.txt").write_text("Größe 東京 🙂\n" * 20)


def _write_tokenizer(folder):
    from tpukit.training.data.tokenizer import keep_tokenizer

    folder.mkdir()
    keep_tokenizer("bytes", folder)
    about = {"eos_token": {"content": "<|endoftext|>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def _read_template():
    from tpukit.models.huggingface.chat import load_chat_template
    from tpukit.models.huggingface.config import end_tokens, read_generation_config

    load_chat_template("model")
    end_tokens(read_generation_config("model"))


@kind(
    "tokenizer",
    command("data", "inspect", "text.txt", "--tokenizer", "model"),
    command("data", "inspect", "tokens.npy", "--tokenizer", "model/tokenizer.json", "--json"),
    _read_template,
    only="*.j*",
    known=[
        (f"model/{name}.json", attack)
        for attack in JSON_ATTACKS
        for name in ("tokenizer", "tokenizer_config", "tokenizer_config")
    ],
)
def _tokenizer(folder):
    _write_tokenizer(folder / "model")
    (folder / "model" / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "text.txt").write_text("Größe 東京 🙂\n" * 20)
    np.save(folder / "tokens.npy", np.arange(2000, dtype=np.uint16) % 250)


@kind(
    "tokens",
    command("data", "inspect", "tokens.npy"),
    command("data", "inspect", "tokens.uint16.bin", "--json"),
    command("data", "inspect", "llmc.bin"),
)
def _tokens(folder):
    tokens = np.arange(2000, dtype=np.uint16) % 250
    np.save(folder / "tokens.npy", tokens)
    (folder / "tokens.uint16.bin").write_bytes(tokens.tobytes())
    head = np.zeros(256, np.int32)
    head[:3] = 20240520, 1, len(tokens)
    (folder / "llmc.bin").write_bytes(head.tobytes() + tokens.tobytes())


def _first_batch():
    from tpukit.training import open_data

    data = open_data("out", sequence_length=8, batch_size=2, vocab_size=257, packing="documents")
    next(data.stream())


@kind(
    "prepared folder",
    command("data", "inspect", "out"),
    _first_batch,
    known=[("out/tokens.json", attack) for attack in JSON_ATTACKS],
)
def _prepared(folder):
    from tpukit.training.data.prepare import prepare_tokens

    texts = "".join(json.dumps({"text": "document " * n}) + "\n" for n in range(1, 30))
    (folder / "text.jsonl").write_text(texts)
    prepare_tokens(folder / "text.jsonl", folder / "out", tokenizer="bytes", shard_tokens=700)
    (folder / "text.jsonl").unlink()
