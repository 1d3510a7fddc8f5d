"""A kept capture without programs, for tests of what is asked of the processes that read one."""

import json


def write_capture(folder, *, on="v6e-8", libtpu_init_args=""):
    """Write the files that `tpukit check --keep` leaves, as its reader expects them."""
    empty = ("programs", "listed", "reads", "written", "refused", "notes")
    result = {
        **{name: [] for name in empty},
        "jax": "0.10.2",
        "python": "3.11.7",
        "processes": 1,
        "seconds": 1.0,
        "written_count": 0,
        "failure": "",
        "libtpu_init_args": libtpu_init_args,
    }
    folder.mkdir(parents=True)
    (folder / "capture.json").write_text(json.dumps(result))
    (folder / "settings.json").write_text(json.dumps({"format": 1, "on": on, "command": ["x"]}))
    return folder
