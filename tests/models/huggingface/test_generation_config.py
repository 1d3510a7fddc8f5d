"""What folders say about generation."""

import json

from tpukit.models.huggingface.config import (
    GENERATION_FILE,
    end_tokens,
    read_generation_config,
    with_end_tokens,
)


def test_end_tokens_are_those_of_the_folder(tmp_path):
    def found():
        return end_tokens(read_generation_config(tmp_path))

    assert found() == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert found() == (7,)
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 9}}')
    assert found() == (9,)
    (tmp_path / GENERATION_FILE).write_text('{"eos_token_id": [3, 4]}')
    assert found() == (3, 4)


def test_what_one_file_lacks_is_in_the_other(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    (tmp_path / GENERATION_FILE).write_text(json.dumps({"eos_token_id": 5, "top_p": 0.9}))
    found = read_generation_config(tmp_path)
    assert found == {"bos_token_id": 1, "eos_token_id": 5, "top_p": 0.9}
    assert with_end_tokens(found, (5, 6))["eos_token_id"] == [5, 6]
    assert with_end_tokens({}, ()) == {}
    assert with_end_tokens({}, (3,)) == {"eos_token_id": 3}
