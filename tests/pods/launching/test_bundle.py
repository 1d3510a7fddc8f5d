"""What is shipped, and what is not."""

import os
import tarfile

import pytest

from tpukit.errors import ConfigError
from tpukit.job import Job
from tpukit.pods.launching.bundle import Bundle, make_bundle, modules_not_shipped

KEY = "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name, text in {
        "own.py": "import helpers\nimport json\ndef build(): ...\n",
        "helpers.py": "",
        "unrelated.py": "",
        "tokens.npy": "12345",
        "tokenizer.json": "{}",
        "package/__init__.py": "",
        "package/part.py": "",
        "package/__pycache__/x.pyc": "",
        "configs/a.yaml": "",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
    return folder


def job(**values):
    return Job.from_dict({"model": "tiny", "on": "v6e-8", **values})


def names(bundle):
    return sorted(bundle.files)


def test_a_preset_ships_the_job_alone(here):
    assert names(make_bundle(job())) == ["job.yaml"]


def test_what_the_job_names_is_shipped_and_nothing_else(here):
    made = make_bundle(
        job(
            model="own.py:build",
            train={"data": "tokens.npy", "tokenizer": "tokenizer.json", "eval_data": "gs://b/x"},
            launch={"include": ["configs"]},
        )
    )
    assert names(made) == ["configs/a.yaml", "job.yaml", "own.py", "tokenizer.json", "tokens.npy"]
    assert str(made).startswith("5 files, ")


def test_a_package_is_shipped_whole_and_an_installed_one_not(here):
    made = make_bundle(job(model="package.part:build"))
    assert names(made) == ["job.yaml", "package/__init__.py", "package/part.py"]
    assert names(make_bundle(job(model="torch:torch.nn:Linear"))) == ["job.yaml"]
    assert "package/part.py" in names(make_bundle(job(model="torch:package.part:build")))


def test_an_import_that_is_not_shipped_is_told(here):
    made = make_bundle(job(model="own.py:build"))
    assert modules_not_shipped(made) == [
        "own.py imports helpers.py, which is not shipped: launch.include"
    ]
    whole = make_bundle(job(model="own.py:build", launch={"include": ["helpers.py"]}))
    assert modules_not_shipped(whole) == []


def test_the_same_files_give_the_same_bytes(here, tmp_path):
    asked = job(model="package.part:build", launch={"include": ["configs"]})
    first = make_bundle(asked).write(tmp_path / "a.tar")
    os.utime(here / "package" / "part.py", (1, 1))
    second = make_bundle(asked).write(tmp_path / "b.tar")
    assert first == second
    with tarfile.open(tmp_path / "a.tar") as archive:
        assert archive.getnames() == sorted(archive.getnames())
        assert {(one.uid, one.mtime) for one in archive} == {(0, 0)}


def test_secrets_of_the_launch_section_are_not_shipped(here, tmp_path):
    asked = job(launch={"environment": {"TOKEN": "hunter2"}, "project": "p"})
    make_bundle(asked).write(tmp_path / "a.tar")
    assert b"hunter2" not in (tmp_path / "a.tar").read_bytes()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (".env", "X=1"),
        ("id_ed25519", "x"),
        ("key.json", '{"type": "service_account", "private_key": "…"}'),
        ("notes.txt", KEY),
        ("adc.json", '{"refresh_token": "1//abcdefghijk"}'),
        ("settings.py", f"TOKEN = 'hf_{'a' * 34}'"),
        (".kube/config", "apiVersion: v1"),
        (".docker/config.json", "{}"),
        ("late.txt", "x" * (9 << 20) + f" glpat-{'a' * 20}"),
    ],
)
def test_what_looks_like_credentials_is_refused_unless_it_is_named(here, name, text):
    (here / "configs" / name).parent.mkdir(exist_ok=True)
    (here / "configs" / name).write_text(text)
    with pytest.raises(ConfigError, match=f"configs/{name} is not shipped, because") as refused:
        make_bundle(job(launch={"include": ["configs"]}))
    assert text not in str(refused.value) or text == "x"
    named = make_bundle(job(launch={"include": ["configs", f"configs/{name}"]}))
    assert f"configs/{name}" in names(named)


def test_a_model_with_a_token_in_it_is_refused(here):
    (here / "own.py").write_text(f"TOKEN = 'ghp_{'a' * 36}'\n")
    with pytest.raises(ConfigError, match=r"own\.py is not shipped, because it contains a GitHub"):
        make_bundle(job(model="own.py:build"))


def test_nothing_outside_the_folder_is_shipped(here, tmp_path):
    (tmp_path / "outside.txt").write_text("x")
    with pytest.raises(ConfigError, match="is outside"):
        make_bundle(job(launch={"include": ["../outside.txt"]}))
    (here / "configs" / "link").symlink_to(tmp_path / "outside.txt")
    with pytest.raises(ConfigError, match="is a link to a file outside"):
        make_bundle(job(launch={"include": ["configs"]}))
    with pytest.raises(ConfigError, match="no such file"):
        make_bundle(job(launch={"include": ["missing"]}))


def test_too_much_is_refused(here, monkeypatch):
    monkeypatch.setattr("tpukit.pods.launching.bundle.LARGEST_BYTES", 100)
    (here / "tokens.npy").write_bytes(b"x" * 200)
    with pytest.raises(ConfigError, match="gs://"):
        make_bundle(job(train={"data": "tokens.npy"}))


def test_the_job_file_is_read_back(here):
    made = make_bundle(job(train={"steps": 7}))
    assert isinstance(made, Bundle)
    (here / "back.yaml").write_bytes(made.files["job.yaml"])
    assert Job.from_yaml(here / "back.yaml").train.steps == 7
