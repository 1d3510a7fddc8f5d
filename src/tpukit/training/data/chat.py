"""Conversations as tokens, through a chat template; only the answers are learned."""

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
from .token_folder import TokenWriter
from .tokenizer import Tokenizer

ANSWERING = "assistant"
_AT_ONCE = 256
_MESSAGES = "messages"


@dataclass(frozen=True)
class WrittenConversations:
    """Counts of `write_conversations`.

    Attributes:
        skipped_answers: Answers that are not learned; see `Conversation.skipped_answers`.
        ends: The special tokens that end answers.
    """

    skipped_answers: int
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Conversation:
    """A conversation as text, in the format of a chat template.

    Attributes:
        text: The full conversation.
        answers: Start and end of each answer in the text, the end-of-turn token included.
        skipped_answers: Answers that the template changes when messages follow, for example by
            removing reasoning; they are not learned.
    """

    text: str
    answers: tuple[tuple[int, int], ...]
    skipped_answers: int

    def parts(self) -> list[tuple[str, bool]]:
        """Return the text in parts, each with whether it is an answer."""
        edges = [0, *itertools.chain.from_iterable(self.answers), len(self.text)]
        pairs = itertools.pairwise(edges)
        return [(self.text[a:b], bool(n % 2)) for n, (a, b) in enumerate(pairs) if b > a]


def template_of(tokenizer: str | Path | Tokenizer | None) -> ChatTemplate:
    """Load the chat template from a tokenizer's folder.

    Raises:
        ConfigError: The tokenizer is not a file or folder.
    """
    if not isinstance(tokenizer, str | Path) or str(tokenizer) == "bytes":
        raise ConfigError(
            "conversations need a chat template from the folder of a tokenizer.json; give "
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
    """Write every conversation as a document of which only the answers are learned.

    Each part is tokenized by itself, as prompt and answer are during generation.
    """
    ends: dict[int, None] = {}
    total, done, skipped_answers = sum(path.stat().st_size for path in paths), 0, 0
    for batch in _batches(paths):
        rendered = render_conversations(
            template, [_messages(record, where, key) for record, where, _ in batch]
        )
        for conversation, (_, _, size) in zip(rendered, batch, strict=True):
            parts = conversation.parts()
            for tokens, (_, answer) in zip(
                tokenizer.encode_batch([text for text, _ in parts]), parts, strict=True
            ):
                writer.add(tokens, learned=answer)
                if answer and (end := _end_of_turn(tokens, tokenizer)) is not None:
                    ends[end] = None
            writer.end_document()
            done, skipped_answers = done + size, skipped_answers + conversation.skipped_answers
        progress(Counted(f"{writer.num_tokens:,} tokens", done=done, total=total))
    return WrittenConversations(skipped_answers, tuple(ends))


def _end_of_turn(tokens: np.ndarray, tokenizer: Tokenizer) -> int | None:
    """Return the last special token of an answer, if only white space follows it."""
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
    """Return each conversation in the template's format, with the positions of its answers.

    An answer is the text that the template adds to the preceding messages and generation prompt.
    """
    wanted: list[tuple[Sequence[Mapping[str, Any]], bool]] = []
    for messages in conversations:
        wanted.append((messages, False))
        for number in _answers(messages):
            wanted += [(messages[:number], True), (messages[: number + 1], False)]
    texts = iter(template.render_all(wanted))
    rendered: list[Conversation] = []
    for messages in conversations:
        full, answers, skipped_answers = next(texts), list[tuple[int, int]](), 0
        for _ in _answers(messages):
            before, after = next(texts), next(texts)
            if after.startswith(before) and full.startswith(after):
                answers.append((len(before), len(after)))
            else:
                skipped_answers += 1
        rendered.append(Conversation(full, tuple(answers), skipped_answers))
    return rendered


def _answers(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    return [number for number, message in enumerate(messages) if message["role"] == ANSWERING]


def _batches(paths: Sequence[Path]) -> Iterator[list[tuple[Any, str, int]]]:
    records = (record for path in paths for record in json_records(path))
    while batch := list(itertools.islice(records, _AT_ONCE)):
        yield batch


def _messages(record: Any, where: str, key: str) -> list[dict[str, Any]]:
    value: Any = cast("dict[str, Any]", record).get(key) if isinstance(record, dict) else record
    messages: list[Any] = cast("list[Any]", value) if isinstance(value, list) else []
    good = messages and all(
        isinstance(message, dict) and isinstance(cast("dict[str, Any]", message).get("role"), str)
        for message in messages
    )
    if not good:
        raise TPUValidationError(
            f"{where} has no list of messages with roles under '{key}': expected "
            '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", …}]}. '
            "Give another field name with --text-key."
        )
    if not _answers(messages):
        raise TPUValidationError(
            f"{where} has no message of the role '{ANSWERING}', so nothing can be learned from "
            "it; remove the line."
        )
    return messages


def messages_key(text_key: str) -> str:
    """Return the field of the messages; "messages" unless `text_key` was given."""
    return _MESSAGES if text_key == "text" else text_key
