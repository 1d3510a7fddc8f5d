"""The chat template of a Hugging Face folder: messages in, the text of a prompt out.

A template is a program from the checkpoint's author. It is rendered in jinja2's sandbox, in a child
process with limited memory and time, so that a hostile template can read nothing and cannot hang.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ...errors import MissingExtraError, TPUModelError
from ...plain_data import JsonMapping, JsonObject, read_json, read_limited
from ...runtime.child import ChildError, run_child

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILE = "tokenizer_config.json"
LONGEST_RENDERING_S = 20.0
_MOST_TEMPLATE_BYTES = 1 << 20
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_NO_JINJA = "No module named 'jinja2'"

Message = JsonMapping  # "role", "content", and other entries that a template reads


@dataclass(frozen=True)
class ChatTemplate:
    """The format of a model's conversations.

    Attributes:
        source: The template, in jinja2's language.
        special_tokens: The texts of special tokens by role.
        file: The file of the template.
    """

    source: str = field(repr=False)
    special_tokens: Mapping[str, str]
    file: str

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **more: Any
    ) -> str:
        """Return the text of a conversation, as `transformers` would write it.

        Args:
            messages: Messages with a "role" (system, user, assistant) and a "content".
            add_generation_prompt: Whether the text ends with the start of the model's answer.
            **more: Other variables of the template: `enable_thinking`, `tools`, ….

        Raises:
            TPUModelError: The template rejects the messages, or is invalid.
            MissingExtraError: jinja2 is not installed.
        """
        return self.render_all([(messages, add_generation_prompt)], **more)[0]

    def render_all(
        self, conversations: Sequence[tuple[Sequence[Message], bool]], **more: Any
    ) -> list[str]:
        """Return the texts of conversations, each given with its `add_generation_prompt`.

        Raises:
            TPUModelError: The template rejects a conversation, or is invalid.
            MissingExtraError: jinja2 is not installed.
        """
        every = [
            {
                **self.special_tokens,
                "messages": [dict(message) for message in messages],
                "add_generation_prompt": add_generation_prompt,
                "tools": None,
                "documents": None,
                **more,
            }
            for messages, add_generation_prompt in conversations
        ]
        request = {"source": self.source, "names": every}
        try:
            reply = run_child(f"{__package__}.chat_worker", request, timeout_s=LONGEST_RENDERING_S)
        except ChildError as error:
            if _NO_JINJA in str(error):
                raise MissingExtraError(
                    "data", needed_for="A chat template", module="jinja2"
                ) from None
            raise TPUModelError(
                f"the chat template in {self.file} cannot be rendered ({error.kind}): "
                f"{str(error).splitlines()[0] if str(error) else 'no message'}; use --prompt "
                "without --chat, or fix the template."
            ) from None
        return [str(text) for text in reply["texts"]]


def load_chat_template(folder: str | Path) -> ChatTemplate:
    """Return the chat template of a folder.

    Raises:
        TPUModelError: The folder has none, or several without a default.
    """
    folder = Path(folder)
    about = _read_json(folder / TOKENIZER_FILE)
    special = {name: text for name in _SPECIAL if (text := _text_of(about.get(name))) is not None}
    own = folder / TEMPLATE_FILE
    if own.is_file():
        return ChatTemplate(_read_text(own), special, str(own))
    found = about.get("chat_template")
    if isinstance(found, list):  # several, each with a name
        named = [one for one in cast("list[Any]", found) if isinstance(one, dict)]
        by_name = {str(one.get("name")): one.get("template") for one in named}
        found = by_name.get("default")
        if found is None:
            raise TPUModelError(
                f"{folder / TOKENIZER_FILE} has the chat templates {', '.join(map(str, by_name))} "
                f"but no default; copy the one to use to {TEMPLATE_FILE}."
            )
    if not isinstance(found, str):
        raise TPUModelError(
            f"{folder} has neither {TEMPLATE_FILE} nor 'chat_template' in {TOKENIZER_FILE}; leave "
            "--chat out, or use the folder of an instruction-tuned model."
        )
    return ChatTemplate(found, special, str(folder / TOKENIZER_FILE))


def _read_text(path: Path) -> str:
    try:
        return read_limited(path, _MOST_TEMPLATE_BYTES).decode()
    except ValueError as error:
        raise TPUModelError(f"{path} cannot be read ({error}); download it again.") from None


def _text_of(token: object) -> str | None:
    """Return the text of a special token, which is a string or an object with a `content`."""
    if isinstance(token, Mapping):
        token = cast("Mapping[str, object]", token).get("content")
    return token if isinstance(token, str) else None


def _read_json(path: Path) -> JsonObject:
    if not path.is_file():
        return {}
    try:
        found = read_json(path)
    except ValueError as error:
        raise TPUModelError(f"{path} is not JSON ({error}); download it again.") from None
    return cast("JsonObject", found) if isinstance(found, dict) else {}
