"""Files and folders of tokens: what they are taken for, and how a bad one is refused."""

import numpy as np
import pytest

from tpukit.errors import ConfigError, TPUValidationError
from tpukit.training.data import open_data, open_tokens

TOKENS = np.arange(300)


def test_every_integer_dtype_reads_the_same(tmp_path):
    for dtype in ("uint16", "uint32", "int32", "int64"):
        np.save(tmp_path / f"{dtype}.npy", TOKENS.astype(dtype))
        TOKENS.astype(dtype).tofile(tmp_path / f"{dtype}.bin")
        for suffix in ("npy", "bin"):
            store = open_tokens(tmp_path / f"{dtype}.{suffix}", dtype=dtype)
            assert store.kind == suffix
            assert np.array_equal(store.read([0], [300])[0], TOKENS)


def test_big_endian_files_read_the_same(tmp_path):
    np.save(tmp_path / "t.npy", TOKENS.astype(">u4"))
    assert np.array_equal(open_tokens(tmp_path / "t.npy").read([5], [300])[0], TOKENS[5:])


def test_files_made_for_llm_c_say_what_they_are(tmp_path):
    for magic, dtype in ((20240520, "<u2"), (20240801, "<u4")):
        header = np.zeros(256, "<i4")
        header[:3] = magic, 1, 300
        path = tmp_path / f"{magic}.bin"
        path.write_bytes(header.tobytes() + TOKENS.astype(dtype).tobytes())
        assert np.array_equal(open_tokens(path).read([0], [300])[0], TOKENS)
        path.write_bytes(path.read_bytes()[:-2])
        with pytest.raises(TPUValidationError, match="corrupt: its header has 300"):
            open_tokens(path)


def test_shards_of_a_folder_are_one_run(tmp_path):
    for number, part in enumerate(np.split(TOKENS, [7, 7, 250])):
        np.save(tmp_path / f"part-{number}.npy", part.astype(np.int32))
    store = open_tokens(tmp_path)
    assert np.array_equal(store.read([0], [300])[0], TOKENS)
    data = open_data(
        tmp_path, sequence_length=50, batch_size=1, shuffle=False, process_index=0, process_count=1
    )
    stream = data.stream()
    assert np.array_equal(next(stream)["inputs"][0], TOKENS[:50])  # crosses three files
    stream.close()


def test_a_folder_with_tokens_npy_is_that_file_with_its_documents(tmp_path):
    np.save(tmp_path / "tokens.npy", TOKENS.astype(np.uint16))
    np.save(tmp_path / "more.npy", TOKENS.astype(np.uint16))
    np.save(tmp_path / "documents.npy", np.array([0, 100, 300]))
    store = open_tokens(tmp_path)
    assert store.num_tokens == 300
    assert store.documents is not None
    assert store.documents.tolist() == [0, 100, 300]
    np.save(tmp_path / "documents.npy", np.array([0, 100, 299]))
    with pytest.raises(TPUValidationError, match="rise from 0 to 300"):
        open_tokens(tmp_path)


def test_files_past_four_gigabytes_are_read_at_their_end(tmp_path):
    path = tmp_path / "t.bin"
    with path.open("wb") as file:
        file.truncate(2 * 3_000_000_001)  # a hole: takes no space
        file.seek(-40, 2)
        file.write(np.arange(20, dtype=np.uint16).tobytes())
    data = open_data(
        path, sequence_length=20, batch_size=1, shuffle=False, process_index=0, process_count=1
    )
    assert data.describe().num_examples == 150_000_000
    stream = data.stream()
    stream.restore({**stream.state(), "consumed_examples": 150_000_000 - 1})
    assert np.array_equal(next(stream)["targets"][0], np.arange(20))
    stream.close()


def test_a_missing_file_names_its_neighbour(tmp_path):
    np.save(tmp_path / "tokens.npy", TOKENS)
    with pytest.raises(TPUValidationError, match=r"no data at .*Did you mean 'tokens.npy'"):
        open_tokens(tmp_path / "token.npy")


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (TOKENS.astype(np.float32), "contains float32; expected"),
        (TOKENS.reshape(2, 150), "is 2-dimensional"),
        (np.array(["a", "b"]), "contains str"),
    ],
)
def test_arrays_that_are_no_tokens_are_refused(tmp_path, array, why):
    np.save(tmp_path / "t.npy", array)
    with pytest.raises(TPUValidationError, match=why):
        open_tokens(tmp_path / "t.npy")


def test_pickles_are_not_opened(tmp_path):
    np.save(tmp_path / "t.npy", np.array([{}, None], dtype=object), allow_pickle=True)
    with pytest.raises(TPUValidationError, match="contains object"):
        open_tokens(tmp_path / "t.npy")


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "t.npy"
    np.save(path, TOKENS)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(TPUValidationError, match="corrupt: its header has 300 int64"):
        open_tokens(path)
    path.write_bytes(b"hello")
    with pytest.raises(TPUValidationError, match=r"is not an \.npy file"):
        open_tokens(path)
    odd = tmp_path / "t.bin"
    odd.write_bytes(b"abc")
    with pytest.raises(TPUValidationError, match="not a multiple of the 2 bytes"):
        open_tokens(odd)


def test_a_bin_file_of_32_bits_is_not_read_as_16(tmp_path):
    TOKENS.astype(np.uint32).tofile(tmp_path / "t.bin")
    with pytest.raises(TPUValidationError, match="looks like 32-bit tokens"):
        open_tokens(tmp_path / "t.bin")
    with pytest.raises(TPUValidationError, match="Did you mean 'uint32'"):
        open_tokens(tmp_path / "t.bin", dtype="unt32")
    assert open_tokens(tmp_path / "t.bin", dtype="uint16").num_tokens == 600
    (tmp_path / "t.bin").rename(tmp_path / "t.uint32.bin")
    assert np.array_equal(open_tokens(tmp_path / "t.uint32.bin").read([0], [300])[0], TOKENS)


def test_folders_that_are_no_data_set_are_refused(tmp_path):
    with pytest.raises(TPUValidationError, match="is empty"):
        open_tokens(tmp_path)
    (tmp_path / "notes.rst").write_text("hello")
    with pytest.raises(TPUValidationError, match=r"no data of a known kind \(notes.rst\)"):
        open_tokens(tmp_path)
    for name in ("train.bin", "val.bin"):
        TOKENS.astype(np.uint16).tofile(tmp_path / name)
    with pytest.raises(TPUValidationError, match="look like splits"):
        open_tokens(tmp_path)
    (tmp_path / "val.bin").rename(tmp_path / "a.txt")
    with pytest.raises(TPUValidationError, match="several kinds of data"):
        open_tokens(tmp_path)


def test_text_needs_a_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ConfigError, match="tokenizer='bytes'"):
        open_tokens(tmp_path / "a.txt")


def test_other_addresses_are_refused():
    with pytest.raises(ConfigError, match="neither a local path nor gs://"):
        open_tokens("s3://bucket/tokens.npy")
