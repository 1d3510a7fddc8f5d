"""Changes reach every viewer, from one look at the files, and again after a broken line."""

import asyncio
import json

from sample_runs import make_run, metric, write_lines
from served import Served

from tpukit.observe.dashboard.live import Pulse


def parsed(message):
    fields = dict(line.split(": ", 1) for line in message.decode().strip().split("\n"))
    return json.loads(fields["data"]) if fields.get("event") == "runs" else fields


class World:
    """What is looked at, and how often."""

    def __init__(self):
        self.runs = {"a": 1}
        self.looks = 0

    def __call__(self):
        self.looks += 1
        return {
            name: json.dumps({"name": name, "at": at}).encode() for name, at in self.runs.items()
        }


async def first(stream):
    """Past the time to reconnect after, to what everybody is told first."""
    assert (await anext(stream)).startswith(b"retry: ")
    return parsed(await anext(stream))


def test_fifty_viewers_share_one_look():
    async def watch():
        world = World()
        pulse = Pulse(world, every_s=0.01)
        streams = [pulse.follow() for _ in range(50)]
        for stream in streams:
            assert (await first(stream))["whole"]
        world.runs["a"] = 2
        for stream in streams:
            assert parsed(await anext(stream))["runs"] == [{"name": "a", "at": 2}]
        looked, viewers = world.looks, pulse.viewers
        for stream in streams:
            await stream.aclose()
        return looked, viewers, pulse

    looked, viewers, pulse = asyncio.run(watch())
    assert viewers == 50
    assert pulse.viewers == 0
    assert looked < 50


def test_nobody_watching_means_nobody_looking():
    async def watch():
        world = World()
        pulse = Pulse(world, every_s=0.01)
        stream = pulse.follow()
        await first(stream)
        await stream.aclose()
        await asyncio.sleep(0.05)
        before = world.looks
        await asyncio.sleep(0.1)
        assert world.looks == before
        again = pulse.follow()
        assert (await first(again))["runs"] == [{"name": "a", "at": 1}]
        await again.aclose()

    asyncio.run(watch())


def test_only_what_changed_is_told_and_who_fell_behind_hears_everything():
    async def watch():
        world = World()
        pulse = Pulse(world, every_s=0.01)
        quick, slow = pulse.follow(), pulse.follow()
        await first(quick)
        await first(slow)
        world.runs["b"] = 1
        assert parsed(await anext(quick)) == {
            "runs": [{"name": "b", "at": 1}],
            "gone": [],
            "whole": False,
        }
        del world.runs["a"]
        assert parsed(await anext(quick)) == {"runs": [], "gone": ["a"], "whole": False}
        late = parsed(await anext(slow))
        assert late == {"runs": [{"name": "b", "at": 1}], "gone": [], "whole": True}
        await quick.aclose()
        await slow.aclose()

    asyncio.run(watch())


def test_a_quiet_line_beats():
    async def watch():
        pulse = Pulse(World(), every_s=0.01, beat_s=0.02)
        stream = pulse.follow()
        await first(stream)
        assert parsed(await anext(stream))["event"] == "beat"
        await stream.aclose()

    asyncio.run(watch())


def test_a_line_that_is_written_is_told(tmp_path):
    run = make_run(tmp_path / "run", steps=20)
    with Served([tmp_path]) as served:
        told = served.follow()
        event, before = next(told)
        assert event == "runs"
        assert before["runs"][0]["figures"]["step"]["value"] == 20
        write_lines(run / "metrics.jsonl", [metric(21, began=before["runs"][0]["last_seen"])])
        _, after = next(told)
        assert not after["whole"]
        assert after["runs"][0]["figures"]["step"]["value"] == 21
        told.close()


def test_who_comes_back_gets_everything(served):
    told = served.follow(last_event_id="7")
    event, data = next(told)
    told.close()
    assert event == "runs"
    assert data["whole"]
    assert {run["name"] for run in data["runs"]} == {"first", "second", "cube"}
