"""Files of a run are copied to a store while they grow, and from there to a reader."""

import threading

import pytest

from tpukit.errors import TPUStorageError, TPUValidationError
from tpukit.observe.dashboard.library import Library
from tpukit.records import upload as upload_module
from tpukit.records.metrics import MetricsFile, read_metrics
from tpukit.records.mirror import RunMirror, address_of, readable
from tpukit.records.upload import FolderUpload
from tpukit.runtime.object_store import ObjectStore


@pytest.fixture
def written(tmp_path):
    folder = tmp_path / "written" / "run"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def copy(store, tmp_path):
    return RunMirror(store, tmp_path / "copy" / "run")


def content(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in files
        if not path.name.startswith(".")
    }


def add(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def test_a_copy_follows_what_is_written(store, written, copy):
    upload = FolderUpload(written, store, epoch=1)
    for turn in range(3):
        add(written / "metrics.jsonl", f'{{"step": {turn}}}\n')
        add(written / "hosts" / "0" / "steps.jsonl", f"{turn}\n")
        if not turn:
            (written / "run.json").write_text("{}")
            (written / "empty.log").touch()
        upload.flush()
        assert copy.pull()
        assert content(copy.folder) == content(written)
    assert not copy.pull(), "nothing is new"
    assert oct((copy.folder / "metrics.jsonl").stat().st_mode)[-3:] == "600"


def test_only_new_segments_are_read(store, written, copy, monkeypatch):
    upload = FolderUpload(written, store, epoch=1)
    read, calls = ObjectStore.read, []

    def counted(self, name, *span):
        calls.append(name)
        return read(self, name, *span)

    monkeypatch.setattr(ObjectStore, "read", counted)
    for turn in range(3):
        add(written / "events.jsonl", f"{turn}\n")
        upload.flush()
        copy.pull()
    assert len(calls) == len(set(calls)) == 3


def test_a_rollback_reaches_the_copy(store, written, copy):
    upload = FolderUpload(written, store, epoch=1)
    metrics = MetricsFile(written / "metrics.jsonl")
    for step in range(1, 9):
        metrics.write({"step": step, "loss": 1.0})
    upload.flush()
    copy.pull()
    metrics.roll_back(3)
    for step in range(4, 12):
        metrics.write({"step": step, "loss": 2.0})
    metrics.close()
    upload.flush()
    copy.pull()
    losses = [record["loss"] for record in read_metrics(copy.folder)]
    assert losses == [1.0] * 3 + [2.0] * 8
    versions = {name.split("/")[-1][:11] for name in store.objects("records/metrics.jsonl")}
    assert versions == {"000001.0001"}, "the version before is deleted"


def test_small_segments_are_merged(store, written, copy, monkeypatch):
    monkeypatch.setattr(upload_module, "MERGED", 3)
    upload = FolderUpload(written, store, epoch=1)
    for turn in range(13):
        add(written / "events.jsonl", f"line {turn}\n")
        upload.flush()
        if turn % 4 == 0:
            copy.pull()
    assert content(copy.folder) == content(written)
    assert len(store.objects("records")) == 3, "9 lines, 3 lines and 1 line"


def test_a_kill_between_merging_and_deleting_loses_nothing(store, written, copy, monkeypatch):
    monkeypatch.setattr(upload_module, "MERGED", 3)
    upload = FolderUpload(written, store, epoch=1)
    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "remove", lambda *_: None)
        for turn in range(4):
            add(written / "events.jsonl", f"line {turn}\n")
            upload.flush()
    assert len(store.objects("records")) == 5
    copy.pull()
    assert content(copy.folder) == content(written)


def test_a_later_attempt_continues_and_an_earlier_one_changes_nothing(store, written, tmp_path):
    first = FolderUpload(written, store, epoch=1)
    add(written / "events.jsonl", "first\n")
    (written / "run.json").write_text("{}")
    first.flush()

    again = RunMirror(store, tmp_path / "again" / "run")
    again.pull()
    stamps = {
        name: upload_module.stamp_of(again.folder / name) for name in ("events.jsonl", "run.json")
    }
    second = FolderUpload(again.folder, store, epoch=2, known=stamps)
    add(again.folder / "events.jsonl", "second\n")
    second.flush()
    add(written / "events.jsonl", "the first attempt still writes\n")
    first.flush()

    copy = RunMirror(store, tmp_path / "copy" / "run")
    copy.pull()
    assert (copy.folder / "events.jsonl").read_text() == "first\nsecond\n"
    assert len(store.objects("records/run.json")) == 1, "an unchanged file is not sent again"


def test_hosts_do_not_touch_each_other(store, tmp_path, copy):
    for host in range(3):
        folder = tmp_path / f"host{host}"
        add(folder / "hosts" / str(host) / "steps.jsonl", f"{host}\n" * 3)
        FolderUpload(folder, store, epoch=1).flush()
    copy.pull()
    assert content(copy.folder) == {
        f"hosts/{host}/steps.jsonl": f"{host}\n".encode() * 3 for host in range(3)
    }


def test_a_deleted_file_is_deleted_in_the_copy(store, written, copy):
    upload = FolderUpload(written, store, epoch=1)
    (written / "events.jsonl").write_text("of another run\n")
    upload.flush()
    copy.pull()
    (written / "events.jsonl").unlink()
    upload.flush()
    copy.pull()
    assert content(copy.folder) == {}


def test_lines_wait_while_the_store_is_away(store, written, copy, monkeypatch):
    upload = FolderUpload(written, store, epoch=1)

    def away(*_):
        raise TPUStorageError("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "write", away)
        add(written / "events.jsonl", "1\n")
        with pytest.raises(TPUStorageError):
            upload.flush()
    add(written / "events.jsonl", "2\n")
    upload.flush()
    copy.pull()
    assert (copy.folder / "events.jsonl").read_text() == "1\n2\n"


def test_a_thread_sends_without_being_told(store, written, copy):
    upload = FolderUpload(written, store, epoch=1)
    upload.start()
    add(written / "events.jsonl", "1\n")
    pause = threading.Event()
    while not copy.pull():  # the time limit of all tests ends it
        pause.wait(0.05)
    assert (copy.folder / "events.jsonl").read_text() == "1\n"
    add(written / "events.jsonl", "2\n")
    upload.close()
    copy.pull()
    assert (copy.folder / "events.jsonl").read_text() == "1\n2\n"


def test_a_folder_of_runs_is_readable(store, written, tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("one", "two"):
        (written / "run.json").write_text(f'"{name}"')
        FolderUpload(written, ObjectStore(f"{store.address}/{name}"), epoch=1).flush()
    folder = readable(store.address)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"one", "two"}
    assert address_of(folder / "one") == f"{store.address}/one"
    assert {*Library([folder]).runs()} == {"one", "two"}, "the dashboard's list"
    assert (readable(f"{store.address}/two") / "run.json").read_text() == '"two"'
    with pytest.raises(TPUValidationError, match=r"contains no run \(run\.json is missing"):
        readable(f"{store.address}/three")
    assert readable(tmp_path) == tmp_path
    assert address_of(tmp_path) == str(tmp_path)
