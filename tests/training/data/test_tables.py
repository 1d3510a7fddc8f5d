"""Data of models that read no tokens: .npz files, folders of images, functions of the user's."""

import jax
import numpy as np
import pytest

from tpukit.errors import ConfigError, TPUModelError, TPUValidationError
from tpukit.training.data import open_data
from tpukit.training.data.sources import is_data_function, named_data
from tpukit.training.data.tables import ArrayTable, ExampleShape, ImageTable

FLOATS, WHOLE = np.dtype(np.float32), np.dtype(np.int32)


@pytest.fixture
def npz(tmp_path):
    np.savez(
        tmp_path / "data.npz",
        inputs=np.arange(60, dtype=np.float64).reshape(20, 3),
        targets=np.arange(20, dtype=np.uint8),
        more=np.zeros((20, 2)),
    )
    return tmp_path / "data.npz"


@pytest.fixture
def images(tmp_path):
    from PIL import Image

    for number, name in enumerate(["cat", "dog"]):
        (tmp_path / "images" / name).mkdir(parents=True)
        for one in range(3):
            pixels = np.full((6, 4, 3), 51 * (number * 3 + one), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{one}.png")
    (tmp_path / "images/notes.md").write_text("")
    return tmp_path / "images"


def opened(source, **changes):
    return open_data(str(source), **{"sequence_length": None, "batch_size": 4, **changes})


def test_an_epoch_has_every_row_once_and_resumes_exactly(npz):
    shapes = {"inputs": ExampleShape((3,), FLOATS), "targets": ExampleShape((), WHOLE)}
    data = opened(npz, shapes=shapes, seed=3)
    stream = data.stream()
    batches = [next(stream) for _ in range(5)]
    assert set(batches[0]) == {"inputs", "targets"}
    assert (batches[0]["inputs"].dtype, batches[0]["targets"].dtype) == (FLOATS, WHOLE)
    rows = np.concatenate([batch["targets"] for batch in batches])
    assert sorted(rows) == list(range(20))
    assert rows.tolist() != list(range(20))
    np.testing.assert_array_equal(batches[0]["inputs"][:, 0], 3 * batches[0]["targets"])
    state, expected = stream.state(), next(stream)
    again = opened(npz, shapes=shapes, seed=3).stream()
    again.restore(state)
    jax.tree.map(np.testing.assert_array_equal, next(again), expected)
    halves = [
        next(opened(npz, seed=3, process_index=one, process_count=2).stream()) for one in (0, 1)
    ]
    np.testing.assert_array_equal(
        np.concatenate([half["targets"] for half in halves]), batches[0]["targets"]
    )
    with pytest.raises(TPUValidationError, match="the shuffle had another seed"):
        opened(npz, shapes=shapes, seed=4).stream().restore(state)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"images": ExampleShape((3,), FLOATS)}, "has inputs, targets, more.* reads 'images'"),
        ({"inputs": ExampleShape((4,), FLOATS)}, r"has examples \(3,\).* reads \(4,\)"),
        ({"inputs": ExampleShape((3,), WHOLE)}, "of float64, but the model reads .* of int32"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(npz, wanted, message):
    with pytest.raises(TPUValidationError, match=message):
        opened(npz, shapes=wanted)


def test_damaged_pickled_and_uneven_files_are_refused(tmp_path):
    file = tmp_path / "data.npz"
    file.write_bytes(b"PK nothing")
    with pytest.raises(TPUValidationError, match=r"cannot be read as \.npz"):
        opened(file)
    np.savez(file, x=np.array([{"a": 1}], dtype=object))
    with pytest.raises(TPUValidationError, match=r"cannot be read as \.npz"):
        opened(file)
    np.savez(file, x=np.zeros(3), y=np.zeros(4))
    with pytest.raises(TPUValidationError, match="x has 3, y has 4"):
        opened(file)
    np.savez(file, x=np.zeros(20))
    with pytest.raises(TPUValidationError, match=r"20 examples, .* less than one batch of 64"):
        opened(file, batch_size=64, num_epochs=1)


@pytest.mark.parametrize(
    ("shape", "size"), [((8, 5, 3), (8, 5, 3)), ((3, 8, 5), (3, 8, 5)), ((6, 4, 1), (6, 4, 1))]
)
def test_images_take_the_size_that_a_model_reads(images, shape, size):
    wanted = {"pixels": ExampleShape(shape, FLOATS), "label": ExampleShape((), WHOLE)}
    batch = next(opened(images, shapes=wanted, shuffle=False, batch_size=6).stream())
    assert batch["pixels"].shape == (6, *size)
    assert batch["label"].tolist() == [0, 0, 0, 1, 1, 1]
    means = batch["pixels"].reshape(6, -1).mean(axis=1)
    np.testing.assert_allclose(means, np.arange(6) / 5, rtol=1e-5)


def test_images_are_read_as_they_are_and_wrong_folders_are_told(images):
    table = named_data(str(images))
    assert isinstance(table, ImageTable)
    assert table.classes == ["cat", "dog"]
    assert table.shapes["inputs"].shape == (6, 4, 3)
    with pytest.raises(TPUValidationError, match=r"an image .* and its class"):
        table.fitted({"inputs": ExampleShape((8,), FLOATS)})
    (images / "dog/0.png").write_bytes(b"none")
    with pytest.raises(TPUValidationError, match=r"0\.png cannot be read as an image"):
        ImageTable(images).rows([3])
    images.rename(images.parent / "train")
    (images.parent / "split").mkdir()
    (images.parent / "train").rename(images.parent / "split/train")
    with pytest.raises(TPUValidationError, match=r"name one split: .*split/train"):
        named_data(str(images.parent / "split"))


CODE = """
import numpy as np
ROWS = [{"inputs": np.zeros((4, 2))}]
def plain(): return ROWS
def sized(batch_size, seed=0):
    for number in range(3):
        yield {"inputs": np.full((batch_size, 2), seed + number)}
def arrays(): return {"inputs": np.zeros((20, 2)), "targets": np.zeros(20, int)}
def tokens(): return np.arange(100)
def path(): return "data.npz"
def none(): return 3
def other(folder): return []
def broken():
    yield {"inputs": np.zeros((4, 2))}
    raise RuntimeError("no disk")
"""


@pytest.fixture
def code(tmp_path, monkeypatch):
    (tmp_path / "feed.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return "feed.py"


def test_functions_give_batches_tables_arrays_and_paths(code, npz):
    stream = opened(f"{code}:sized", seed=5).stream()
    assert [int(next(stream)["inputs"][0, 0]) for _ in range(4)] == [5, 6, 7, 5]
    assert next(stream)["inputs"].shape == (4, 2)
    assert opened(f"{code}:plain").stream().state()["batches"] == 0
    assert isinstance(named_data(f"{code}:arrays"), ArrayTable)
    assert named_data(f"{code}:tokens").shape == (100,)
    assert named_data(f"{code}:path").path == "data.npz"
    assert named_data(f"{code}:ROWS")[0]["inputs"].shape == (4, 2)


def test_wrong_functions_are_told_with_their_line(code):
    with pytest.raises(TPUValidationError, match="returned int; expected batches"):
        named_data(f"{code}:none")
    with pytest.raises(ConfigError, match="needs the arguments folder"):
        named_data(f"{code}:other")
    with pytest.raises(TPUValidationError, match="Did you mean 'plain'"):
        named_data(f"{code}:plane")
    stream = opened(f"{code}:broken").stream()
    next(stream)
    with pytest.raises(TPUModelError, match=r"feed\.py:broken raised RuntimeError.*feed\.py:\d+"):
        next(stream)


def test_names_of_functions_are_told_from_paths():
    for name in ("a.py:f", "/x/a.py:f", "pack.mod:f"):
        assert is_data_function(name)
    for name in ("gs://bucket/x", "data.npz", "C:/x", "a.py", "s3://a:b"):
        assert not is_data_function(name)
