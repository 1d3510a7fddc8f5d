"""Prefill and decode through the compiler: its own figures against what the shapes come to."""

import json

import pytest
import typer
from typer.testing import CliRunner

from tpukit.checker.decoding import check_decoding
from tpukit.checker.decoding.checking import serving_mesh
from tpukit.cli import check
from tpukit.errors import ConfigError, ShardingError, TPUModelError, TPUValidationError
from tpukit.hardware import Slice
from tpukit.models import get_preset

ROWS, SLOTS = 8, 256


@pytest.fixture(scope="module")
def config():
    """Sizes that tiles of a TPU hold without padding."""
    return get_preset(
        "tiny", n_layers=2, d_model=256, n_heads=4, n_kv_heads=2, head_dim=128, d_ff=512,
        vocab_size=1024, max_seq_len=SLOTS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def found(config):
    return check_decoding(config, on="v6e-4", batch_size=ROWS - 1, prompt=100)


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
class TestOneRealCheck:
    def test_it_is_what_generate_runs(self, found):
        assert dict(found.mesh) == {"data": 2, "tensor": 2}  # two heads of keys
        assert (found.batch_size, found.rows) == (ROWS - 1, ROWS)  # as many on both of data
        assert (found.prompt, found.context) == (128, SLOTS)  # rounded as generate rounds
        assert found.fits
        assert found.exit_code == 0

    def test_memory_is_what_the_shapes_come_to(self, found, config):
        purposes = found.decode.memory.purposes
        cache = 2 * config.n_layers * ROWS * SLOTS * config.n_kv_heads * config.head_dim * 2
        assert purposes["cache"] == cache / 4  # rows by two, heads by two
        weights = config.parameter_count().total * 2
        assert purposes["parameters"] == pytest.approx(weights / 2, rel=0.02)  # norms are whole
        # Decode writes the cache in place: nothing of its size is made beside it.
        assert found.decode.memory.total_bytes < 1.5 * (weights / 2 + cache / 4)

    def test_a_turn_of_the_loop_is_timed(self, found):
        step = found.decode.prediction
        assert not step.caveats  # no loop without a length, no kernel without a time
        assert found.token_s == step.step_time_s
        assert 0 < found.token_s < found.decode.compiled.predict().step_time_s
        # Weights and cache are read once at least.
        chip = found.slice.chip
        read = sum(found.decode.memory.purposes[name] for name in ("parameters", "cache"))
        assert found.token_s > read / (chip.hbm_gbps.value * 1e9)
        assert found.tokens_per_s == (ROWS - 1) / found.token_s
        assert found.prefill_s > 0

    def test_it_shows_itself(self, found):
        data = json.loads(json.dumps(found.to_dict()))
        assert data["decode"]["memory"]["purposes"]["cache"]
        assert data["origin"] == "model"
        assert "7 sequences (filled up to 8) of 256 tokens" in found.headline()

    def test_the_command_says_the_same(self, tmp_path):
        app = typer.Typer()
        app.command()(check.check)
        page = tmp_path / "decode.html"
        typed = ["tiny", "--on", "v6e-1", "--decode", "--batch", "2", "--sequence", "64"]
        ran = CliRunner().invoke(app, [*typed, "--json", "--memory-only", "--html", str(page)])
        assert ran.exit_code == 0, ran.output
        data = json.loads(ran.stdout)
        assert (data["rows"], data["context"], data["mesh"]) == (2, 64, {"tensor": 1})
        assert data["token_s"] is None  # not asked for
        assert page.is_file()
        assert (tmp_path / "decode-prefill.html").is_file()

    @pytest.mark.slow
    def test_what_does_not_fit_says_what_could(self):
        found = check_decoding(
            "llama3.2-1b",
            on="v6e-1",
            batch_size=512,
            context=8192,
            prefill_rows=1,
            memory_only=True,
        )
        assert not found.decode.fits
        assert found.prefill.fits
        assert found.exit_code == 3
        advised = int(found.advice[0].split()[1].rstrip(":"))
        room = found.decode.memory.usable_bytes
        weights = found.decode.memory.purposes["parameters"]
        # Heads of 64 channels lie side by side and fill whole tiles: a row takes its own bytes.
        a_row = 2 * 16 * 8192 * 8 * 64 * 2
        assert found.decode.memory.purposes["cache"] == 512 * a_row
        assert 0.8 * (room - weights) / a_row < advised < (room - weights) / a_row


@pytest.mark.parametrize(
    ("name", "on", "expected"),
    [
        ("llama3.1-8b", "v6e-8", {"tensor": 8}),
        ("llama3.1-8b", "v6e-16", {"data": 2, "tensor": 8}),  # eight heads of keys
        ("llama3.1-405b", "v5p-64", {"data": 2, "tensor": 16}),  # eight parts would not fit
        ("deepseek-v3", "v5p-128", {"tensor": 64}),  # all heads share one latent
    ],
)
def test_the_usual_mesh_splits_keys_and_repeats_the_rest(name, on, expected):
    assert serving_mesh(get_preset(name), Slice.parse(on)) == expected


def test_wrong_questions_are_answered_before_anything_is_compiled(config):
    with pytest.raises(ConfigError, match="which slice"):
        check_decoding(config)
    with pytest.raises(TPUModelError, match="a context of 512 tokens is more than the 256"):
        check_decoding(config, on="v6e-4", context=512)
    with pytest.raises(TPUValidationError, match="prompts of 200 tokens do not fit"):
        check_decoding(config, on="v6e-4", context=128, prompt=200)
    with pytest.raises(TPUValidationError, match="'fp9' is not a cache format"):
        check_decoding(config, on="v6e-4", kv="fp9")
    with pytest.raises(ShardingError, match="does not support the mesh axis stage=4"):
        check_decoding(config, on="v6e-4", mesh={"stage": 4})
    app = typer.Typer()
    app.command()(check.check)
    for typed, reason in {
        ("--decode", "--remat", "full", "--fix"): "has no remat, --fix",
        ("--prompt-length", "4"): "--prompt-length is of --decode",
        ("--kv", "fp8"): "--kv is of --decode",
        ("--decode", "--toolchain", "jax-0.12.0.1"): "--decode is for one check",
    }.items():
        ran = CliRunner().invoke(app, ["tiny", "--on", "v6e-4", *typed])
        assert isinstance(ran.exception, ConfigError)
        assert reason in str(ran.exception)
