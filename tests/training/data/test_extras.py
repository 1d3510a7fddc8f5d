"""Without the optional libraries: one sentence that names the extra."""

import sys

import numpy as np
import pytest

from tpukit.errors import MissingExtraError
from tpukit.runtime.object_store import open_files
from tpukit.training.data import load_tokenizer, open_data, open_tokens
from tpukit.training.data.documents import read_documents


def draw(_):
    stream = open_data(
        np.arange(99), sequence_length=8, batch_size=1, process_index=0, process_count=1
    ).stream()
    next(stream)


def open_bucket(_):
    open_files.cache_clear()
    open_tokens("gs://bucket/data")


def read_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")
    load_tokenizer(folder)


def read_records(folder):
    list(read_documents("array_record", [folder / "a.array_record"], text_key="text"))


def read_huggingface(folder):
    list(read_documents("huggingface", [folder], text_key="text"))


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("grain", draw),
        ("gcsfs.core", open_bucket),
        ("tokenizers", read_tokenizer),
        ("array_record.python.array_record_module", read_records),
        ("datasets", read_huggingface),
    ],
)
def test_a_missing_library_names_the_extra(monkeypatch, tmp_path, module, use):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tpukit\[data\]'"):
        use(tmp_path)
