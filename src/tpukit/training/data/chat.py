"""Conversations to tokens: what a chat template makes of them, and which parts are answers."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from ...errors import ConfigError, TPUValidationError
from ...models.huggingface.chat import ChatTemplate, load_chat_template
from ...runtime.progress import Counted, Progress
from .documents import json_records
from .token_writer import TokenWriter
from .tokenizer import Tokenizer

ANSWERING = "assistant"
_AT_ONCE = 256
_MESSAGES = "messages"


@dataclass(frozen=True)
class WrittenConversations:
    """What `write_conversations` found.

    Attributes:
        untold: Answers that are not learnt; see `Conversation.untold`.
        ends: The special tokens that end answers, with which a model says that it is done.
    """

    untold: int
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Conversation:
    """A conversation as its template writes it.

    Attributes:
        text: All of it.
        answers: From where to where in the text the model speaks, the end of its turn included.
        untold: Answers that the template writes otherwise once more is said after them (it leaves
            out what was thought, say), which are not learnt.
    """

    text: str
    answers: tuple[tuple[int, int], ...]
    untold: int

    def parts(self) -> list[tuple[str, bool]]:
        """Its text in pieces, and whether each is an answer."""
        edges = [0, *itertools.chain.from_iterable(self.answers), len(self.text)]
        pairs = itertools.pairwise(edges)
        return [(self.text[a:b], bool(n % 2)) for n, (a, b) in enumerate(pairs) if b > a]


def template_of(tokenizer: str | Path | Tokenizer | None) -> ChatTemplate:
    """The chat template beside a tokenizer.

    Raises:
        ConfigError: The tokenizer is no file that something could stand beside.
    """
    if not isinstance(tokenizer, str | Path) or str(tokenizer) == "bytes":
        raise ConfigError(
            "a conversation is written by the chat template beside a tokenizer.json; give "
            "--tokenizer FOLDER of an instruction-tuned model."
        )
    path = Path(tokenizer).expanduser()
    return load_chat_template(path if path.is_dir() else path.parent)


def write_conversations(
    writer: TokenWriter,
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    key: str,
    progress: Progress,
) -> WrittenConversations:
    """Write every conversation as a document whose answers alone are learnt.

    Each part is made into tokens by itself, as a prompt and what follows it are when a model
    answers.
    """
    ends: dict[int, None] = {}
    total, done, untold = sum(path.stat().st_size for path in paths), 0, 0
    for batch in _batches(paths):
        told = render_conversations(template, [_messages(*one, key) for one in batch])
        for conversation, (_, _, size) in zip(told, batch, strict=True):
            parts = conversation.parts()
            for tokens, (_, answer) in zip(
                tokenizer.encode_batch([text for text, _ in parts]), parts, strict=True
            ):
                writer.add(tokens, learnt=answer)
                if answer and (end := _end_of_turn(tokens, tokenizer)) is not None:
                    ends[end] = None
            writer.end_document()
            done, untold = done + size, untold + conversation.untold
        progress(Counted(f"{writer.num_tokens:,} tokens", done=done, total=total))
    return WrittenConversations(untold, tuple(ends))


def _end_of_turn(tokens: np.ndarray, tokenizer: Tokenizer) -> int | None:
    """Return the special token after which an answer holds white space alone; None without one."""
    special: frozenset[int] = getattr(tokenizer, "special_tokens", frozenset())
    for number in range(len(tokens) - 1, -1, -1):
        if int(tokens[number]) in special:
            return int(tokens[number])
        if tokenizer.decode([int(tokens[number])]).strip():
            return None
    return None


def render_conversations(
    template: ChatTemplate, conversations: Sequence[Sequence[Mapping[str, Any]]]
) -> list[Conversation]:
    """Each conversation as the template writes it, and where its answers are.

    An answer is what the template adds to the conversation before it, asked to let the model speak.
    """
    wanted: list[tuple[Sequence[Mapping[str, Any]], bool]] = []
    for messages in conversations:
        wanted.append((messages, False))
        for number in _answers(messages):
            wanted += [(messages[:number], True), (messages[: number + 1], False)]
    texts = iter(template.render_all(wanted))
    found: list[Conversation] = []
    for messages in conversations:
        whole, answers, untold = next(texts), list[tuple[int, int]](), 0
        for _ in _answers(messages):
            before, after = next(texts), next(texts)
            if after.startswith(before) and whole.startswith(after):
                answers.append((len(before), len(after)))
            else:
                untold += 1
        found.append(Conversation(whole, tuple(answers), untold))
    return found


def _answers(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    return [number for number, one in enumerate(messages) if one["role"] == ANSWERING]


def _batches(paths: Sequence[Path]) -> Iterator[list[tuple[Any, str, int]]]:
    records = (record for path in paths for record in json_records(path))
    while batch := list(itertools.islice(records, _AT_ONCE)):
        yield batch


def _messages(record: Any, where: str, size: int, key: str) -> list[dict[str, Any]]:
    del size
    found: Any = cast("dict[str, Any]", record).get(key) if isinstance(record, dict) else record
    messages: list[Any] = cast("list[Any]", found) if isinstance(found, list) else []
    good = messages and all(
        isinstance(one, dict) and isinstance(cast("dict[str, Any]", one).get("role"), str)
        for one in messages
    )
    if not good:
        raise TPUValidationError(
            f"{where} has no list of messages with roles under '{key}': expected "
            '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", …}]}. '
            "Another name is --text-key's to say."
        )
    if not _answers(messages):
        raise TPUValidationError(
            f"{where} has no message of the role '{ANSWERING}', so there is nothing to learn from "
            "it; remove the line."
        )
    return messages


def messages_key(text_key: str) -> str:
    """The field with the messages: what was named, or its usual name."""
    return _MESSAGES if text_key == "text" else text_key
