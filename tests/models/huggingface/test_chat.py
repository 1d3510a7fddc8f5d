"""Chat templates: transformers says what a conversation looks like; hostile ones are harmless."""

import json

import pytest

from tpukit.errors import TPUModelError
from tpukit.models.huggingface import chat
from tpukit.models.huggingface.chat import ChatTemplate, load_chat_template

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
        "+ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "blocks": (
        "{{- bos_token }}\n{%- for message in messages %}\n    {%- set ns = namespace(n=0) %}\n"
        "    {%- if message.role == 'system' %}\n[SYS]{{ message.content | trim }}[/SYS]\n"
        "    {%- elif loop.last %}\n        {%- set ns.n = loop.index %}\n"
        "<{{ ns.n }}>{{ message.content }}\n    {%- else %}\n        {%- continue %}\n"
        "    {%- endif %}\n{%- endfor %}\n{{ eos_token }}"
    ),
    "json and generation": (
        "{% for m in messages %}{{ m | tojson }}{% generation %}({{ m.content }})"
        "{% endgeneration %}{% endfor %}{{ dict(a=1) | tojson(indent=2) }}{{ tools is none }}"
        "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    ),
    "macro": (
        "{% macro turn(m) -%}\n<{{ m.role }}>{{ m['content'].replace('e', 'E') }}\n{%- endmacro %}"
        "{% for m in messages if m.role != 'tool' %}{{ turn(m) }}{% endfor %}"
    ),
}  # fmt: skip
MESSAGES = [
    {"role": "system", "content": '  Be <brief> & "kind".  '},
    {"role": "user", "content": "Größe? 東京"},
]


def save(folder, template, *, in_file=False):
    """A folder as transformers itself writes one."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1}, "<s>"))
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", chat_template=template
    )
    made.save_pretrained(folder)
    if not in_file:  # where older versions keep it
        file = folder / chat.TEMPLATE_FILE
        about = json.loads((folder / chat.TOKENIZER_FILE).read_text())
        about["chat_template"] = file.read_text() if file.is_file() else template
        (folder / chat.TOKENIZER_FILE).write_text(json.dumps(about))
        file.unlink(missing_ok=True)
    return made


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(name, tmp_path):
    theirs = save(tmp_path, TEMPLATES[name], in_file=name == "chatml")
    more = {"enable_thinking": False} if "generation" in name else {}
    expected = theirs.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True, **more
    )
    found = load_chat_template(tmp_path)
    assert found.render(MESSAGES, **more) == expected


HOSTILE = {
    "__class__": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "__init__": "{{ cycler.__init__.__globals__.os.popen('touch hacked') }}",
    "append": "{{ messages.append(1) }}",
    "'_x'": "{% set n = namespace() %}{% set n._x = 1 %}",
    "memory": "{{ 'a' * 10**11 }}",
    "not for me": "{{ raise_exception('not for me') }}",
    "Expected an expression": "{% if %}",
    "did not answer": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("reason", HOSTILE)
def test_hostile_templates_are_an_error(reason, monkeypatch):
    if reason == "did not answer":
        monkeypatch.setattr(chat, "LONGEST_RENDERING_S", 2.0)
    template = ChatTemplate(HOSTILE[reason], {}, "some/file.jinja")
    with pytest.raises(TPUModelError, match=r"template in some/file\.jinja") as error:
        template.render(MESSAGES)
    assert reason in str(error.value)


def test_a_folder_without_a_template_says_so(tmp_path):
    with pytest.raises(TPUModelError, match="has neither"):
        load_chat_template(tmp_path)
    named = {"chat_template": [{"name": "tool_use", "template": "x"}]}
    (tmp_path / chat.TOKENIZER_FILE).write_text(json.dumps(named))
    with pytest.raises(TPUModelError, match="tool_use but no default"):
        load_chat_template(tmp_path)
    named["chat_template"].append({"name": "default", "template": "{{ messages[0].content }}"})
    (tmp_path / chat.TOKENIZER_FILE).write_text(json.dumps(named))
    assert load_chat_template(tmp_path).source == "{{ messages[0].content }}"
    (tmp_path / chat.TOKENIZER_FILE).write_text("{")
    with pytest.raises(TPUModelError, match="is not JSON"):
        load_chat_template(tmp_path)
