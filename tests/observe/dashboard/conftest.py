"""A folder with runs, a plan and a check, and a dashboard over it."""

import json

import pytest
from sample_report import sample_report
from sample_runs import make_run
from served import Served

from tpukit.planner.planning import plan


@pytest.fixture(scope="session")
def plan_data():
    found = plan("llama3.2-1b", tokens=1e9, on="v6e", max_chips=64, verify=False)
    return json.loads(json.dumps(found.to_dict()))


@pytest.fixture(scope="session")
def folder(tmp_path_factory, plan_data):
    made = tmp_path_factory.mktemp("dashboard")
    make_run(made / "runs" / "first", steps=400)
    make_run(
        made / "runs" / "second", steps=200, learning_rate=1e-4, ended="done", began=1.79e9, seed=1
    )
    make_run(made / "runs" / "cube", steps=40, slice_name="v5p-128", chips=64, hosts=16)
    (made / "check.json").write_text(json.dumps(sample_report()))
    (made / "plan.json").write_text(json.dumps(plan_data))
    (made / "secret.json").write_text('{"password": "hunter2"}')
    return made


@pytest.fixture(scope="session")
def served(folder):
    with Served([folder], fleet=fleet) as one:
        yield one


def fleet():
    """Two pods, one of them without a price."""
    pod = {
        "name": "llama",
        "pod_name": "llama-a1",
        "asked_for": "v6e-16",
        "attempt": 1,
        "zone": "us-east5-b",
        "released": False,
        "provider": "gcp",
        "tier": "spot",
        "state": "ready",
        "age_s": 7200.0,
        "usd_per_hour": 21.6,
        "steps": 400,
        "supervised": True,
    }
    other = {**pod, "name": "queued", "state": "wanted", "usd_per_hour": None, "steps": None}
    cost = {"value": 43.2, "unit": "USD", "origin": "third-party", "source": "a list of prices"}
    spent = {"run": "llama", "hours": 2.0, "running": True, "total": cost}
    spent["pods"] = [{"slice": "v6e-16", "tier": "spot"}]
    return {
        "pods": [pod, other],
        "costs": {"runs": [spent], "summary": "$43.20 for 2.00 pod-hours"},
        "problems": [],
    }
