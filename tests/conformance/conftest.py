"""What the documents leave open (`model`, `dataloader`, a bucket), filled in once."""

import numpy as np
import pytest
from flax import nnx

VOCABULARY, WIDTH, LAYERS = 64, 16, 2


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class OwnModel(nnx.Module):
    """Somebody's own language model: no preset, layers by name, no `nnx.List`."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        for number in range(LAYERS):
            setattr(self, f"block{number}", Block(rngs))
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for number in range(LAYERS):
            x = getattr(self, f"block{number}")(x)
        return self.head(x)


@pytest.fixture
def model():
    return OwnModel(nnx.Rngs(0))


@pytest.fixture
def tokens():
    return np.tile(np.arange(VOCABULARY, dtype=np.int32), 4).reshape(8, 32)


@pytest.fixture
def bucket(tmp_path):
    """A folder of token files in place of gs://bucket/data/."""
    folder = tmp_path / "data"
    folder.mkdir()
    np.save(folder / "tokens.npy", np.tile(np.arange(VOCABULARY, dtype=np.uint16), 500))
    return folder


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    """Documents write to relative paths, and set variables of the process."""
    monkeypatch.chdir(tmp_path)
    for name in ("LIBTPU_INIT_ARGS", "XLA_PYTHON_CLIENT_ALLOCATOR"):
        monkeypatch.delenv(name, raising=False)
