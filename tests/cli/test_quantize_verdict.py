"""What `tpukit quantize --verdict` says, as JSON and as a table."""

import json

import pytest

from tpukit.cli.quantize import show_verdict
from tpukit.errors import SliceError

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024, "rope_theta": 1e4, "hidden_act": "silu",
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128},
}  # fmt: skip


@pytest.fixture
def source(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_json_and_table(source, capsys):
    show_verdict(source, "v6e,7x", 4, 8192, json=True)
    said = json.loads(capsys.readouterr().out)
    assert [one["on"] for one in said["chips"]] == ["v6e", "7x"]
    assert said["context"] == 1024  # no more than the model takes
    assert {one["held_as"] for one in said["chips"]} == {"int4"}
    show_verdict(source, None, 1, 512, json=False)
    assert "emulated" in capsys.readouterr().out


def test_a_chip_that_is_none(source):
    with pytest.raises(SliceError):
        show_verdict(source, "v9q", 1, 512, json=True)
