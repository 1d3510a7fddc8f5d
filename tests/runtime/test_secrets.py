"""What looks like a credential, in the formats that services publish, anywhere in a file."""

import base64
import time
from pathlib import Path

import pytest

import tpukit
from tpukit.runtime import secrets
from tpukit.runtime.secrets import find_secret, find_secret_in_file, is_secret_name

HEX = "0123456789abcdef0123456789abcdef01234567"
WORD = "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7aB0cD3eF6gH9j"
# Written in two halves each: a scanner of this repository should find none.
SAMPLES = {
    "a private key": "-----BEGIN OPENSSH " + "PRIVATE KEY-----",
    "a Google service account": '{"type": ' + '"service_account"}',
    "a Google API key": "AI" + "za" + WORD[:35],
    "a Google access token": "ya" + "29." + WORD,
    "a Google client secret": "GOC" + "SPX-" + WORD[:28],
    "a refresh token": '"refresh_' + 'token": "1//abcdefghijk"',
    "a Hugging Face token": "hf" + "_" + WORD[:34],
    "a GitHub token": "github" + "_pat_" + WORD[:22] + "_" + WORD + WORD[:19],
    "a GitLab token": "gl" + "pat-" + WORD[:20],
    "a Slack token": "xo" + "xb-123456789012-1234567890123-" + WORD[:24],
    "an AWS key": "AK" + "IAIOSFODNN7EXAMPLE",
    "an OpenAI-style key": "s" + "k-" + WORD,
    "a Weights & Biases key": "machine api.wandb.ai\n  login user\n  password " + HEX,
    "an npm token": "np" + "m_" + WORD[:36],
    "a Databricks token": "da" + "pi" + HEX[:32],
    "a JSON web token": ".".join(
        base64.urlsafe_b64encode(part).decode().rstrip("=")
        for part in (b'{"alg":"HS256","typ":"JWT"}', b'{"sub":"1234567890","name":"x"}', b"x" * 32)
    ),
    "a Docker registry login": '{"auths": {"host": {"auth": "' + 'dXNlcjpwYXNz"}}}',
    "a Kubernetes login": "client-key" + "-data: " + WORD,
    "a URL with a password": "postgres://" + "me:h4nter22@db.internal/runs",
}
MORE = (
    *("gh" + "p_" + WORD[:36], "wandb.login(key='" + HEX + "')", "WANDB_API_KEY=" + HEX),
    *("wandb" + "_v1_" + WORD, "redis://" + ":h4nter22@cache:6379", "xo" + "xp-1-2-3-" + WORD),
    "current-context: a\nusers:\n- user:\n    token: " + WORD,
    "aws_secret_access" + "_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
)
HARMLESS = (
    *("https://user:password@host/", "https://{user}:{password}@host", "http://127.0.0.1:8780/a@b"),
    *("https://example.org:8080/x", "ssh://git@github.com/a/b", "hf_model_name", "task-force"),
    *(f"wandb==0.19 --hash=sha256:{HEX}{HEX[:24]}", f"pip install wandb@{HEX}", "AIzawa", "ghp_x"),
    *("MAX_TOKENS=4096", '"author": "me"', "sk-learn", "risk-" + "a" * 40),
)


@pytest.mark.parametrize("what", SAMPLES)
def test_every_kind_is_found_in_the_middle_of_text(what):
    text = f"import os\nvalue = '{SAMPLES[what]}'\nprint(value)\n"
    assert find_secret(text.encode()) == what
    assert find_secret(bytes(3000) + SAMPLES[what].encode() + bytes(3000)) == what


@pytest.mark.parametrize("text", MORE)
def test_other_spellings_are_found(text):
    assert find_secret(f"{text}\n".encode())


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_looks_similar_is_not(text):
    assert find_secret(f"{text}\n".encode()) is None


@pytest.mark.parametrize("place", [-30, -1, 0, 5])
def test_it_is_found_beyond_the_first_mebibyte_and_across_chunks(tmp_path, place):
    file = tmp_path / "weights.bin"
    file.write_bytes(bytes(2 * secrets.CHUNK + place) + b" " + SAMPLES["a GitLab token"].encode())
    assert find_secret_in_file(file) == "a GitLab token"


def test_the_source_of_tpukit_is_clean_but_for_the_emulated_key():
    folder = Path(tpukit.__file__).parent
    found = {file.name for file in folder.rglob("*.py") if find_secret_in_file(file)}
    assert found <= {"identity.py"}  # writes service accounts of the emulated cloud


def test_large_text_full_of_keywords_takes_time_in_proportion():
    text = b"https://a:" * 100_000 + b"wandb key " * 100_000 + b"eyJ" * 300_000
    began = time.process_time()
    assert find_secret(text) is None
    assert time.process_time() - began < 5


def test_names_are_told_by_whole_words():
    secret = ("HF_TOKEN", "wandb_api_key", "DB_PASSWORD", "TOKEN", "AWS_SECRET_ACCESS_KEY")
    plain = ("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "MONKEY", "KEYBOARD", "SECRETARY", "PATH")
    assert all(map(is_secret_name, secret))
    assert not any(map(is_secret_name, plain))
