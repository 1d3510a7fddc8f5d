"""The dashboard in a real browser: every page, by mouse and keyboard, live, saved to files."""

import contextlib
import csv
import json
import time
from functools import partial
from urllib.parse import urlencode

import pytest
from sample_runs import make_run, metric, reading, write_lines
from served import Served

from tpukit.observe.dashboard.access import Token
from tpukit.observe.dashboard.app import look
from tpukit.observe.dashboard.library import Library
from tpukit.observe.dashboard.live import Pulse

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

DRAWN = "document.documentElement?.dataset.drawn"
# Each page with what shows that it is there.
PAGES = {
    "fleet": "document.querySelectorAll('td .spark').length === 3",
    "run?run=first": "document.querySelectorAll('[data-chart] canvas').length === 5",
    "chips?run=first": "document.querySelectorAll('.chip').length === 16",
    "plan": "document.querySelector('iframe')",
    "compile": "document.querySelector('iframe')",
    "compare?a=first&b=second": "document.querySelectorAll('[data-chart] canvas').length === 4",
}


def opened(browser, served, path, until="true", **options):
    browser.open(f"{served.url}/{path}", **options)
    browser.wait_until("document.documentElement.dataset.ready")
    browser.wait_until(until)


def nothing_went_wrong(browser, served):
    away = [url for url in browser.requests if not url.startswith((served.url, "blob:"))]
    assert away == []
    assert browser.complaints == []
    for sign in ("error", "blocked"):
        assert browser.run(f"document.documentElement.dataset.{sign} ?? null") is None


def recorded(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def focused(browser):
    return browser.run("document.activeElement.textContent || document.activeElement.tagName")


@pytest.mark.parametrize(("width", "dark"), [(1440, False), (390, True)])
def test_every_page_is_whole_and_fits(browser, served, width, dark):
    for path, there in PAGES.items():
        opened(browser, served, path, there, width=width, dark=dark)
        assert browser.run("document.documentElement.scrollWidth") <= width, path
        assert browser.run("document.querySelector('[aria-current=page]').textContent"), path
        nothing_went_wrong(browser, served)


def test_the_pages_of_plans_and_checks_are_their_own(browser, served):
    for kind, words in (("plan", "Made by tpukit plan"), ("compile", "Made by tpukit check")):
        opened(browser, served, f"{kind}/page?file={'check' if kind == 'compile' else kind}.json")
        browser.wait_until("document.documentElement.dataset.ready")
        assert words in browser.run("document.body.textContent")
        assert browser.run("self.origin") == "null"
        nothing_went_wrong(browser, served)


def test_clicks_lead_through_and_back(browser, served):
    opened(browser, served, "", PAGES["fleet"])
    browser.run("document.documentElement.dataset.stays = 'yes'")
    browser.click("a[href='/run?run=second']")
    browser.wait_until(f"{DRAWN} === 'second'")
    browser.click("a.tab[data-page=chips]")
    browser.wait_until("document.querySelectorAll('.chip').length === 16")
    browser.click("[data-chip='2:1']")
    browser.wait_until("document.querySelector('[data-chart=duty_cycle] canvas')")
    assert browser.run("location.search") == "?run=second&chip=2%3A1"
    browser.run("history.back(); history.back()")
    browser.wait_until("document.querySelectorAll('[data-chart] canvas').length === 5")
    browser.run("history.forward(); history.forward()")
    browser.wait_until("document.querySelector('.chip.is-chosen')?.dataset.chip === '2:1'")
    assert browser.run("document.documentElement.dataset.stays") == "yes"
    nothing_went_wrong(browser, served)


def test_the_address_holds_what_is_shown(browser, served):
    opened(browser, served, "run?run=first&by=step&from=100&to=200&charts=loss,mfu", f"{DRAWN}")
    browser.wait_until("document.querySelectorAll('[data-chart] canvas').length === 2")
    assert (
        browser.run("document.querySelector('.switch [aria-pressed=true]').textContent") == "step"
    )
    low, high = shown_steps(browser)
    assert (low, high) == (100, 200)
    browser.drag("[data-chart=loss] .u-over", 0.25, 0.5)
    browser.wait_until("new URLSearchParams(location.search).get('to') !== '200'")
    zoomed = browser.run("location.search")
    browser.wait_until("!document.querySelector('.plots').hasAttribute('aria-busy')")
    low, high = shown_steps(browser)
    assert 120 <= low <= 130
    assert 145 <= high <= 155
    browser.run("history.back()")
    browser.wait_until("new URLSearchParams(location.search).get('to') === '200'")
    opened(browser, served, f"run{zoomed}", f"{DRAWN}")
    browser.wait_until("document.querySelectorAll('[data-chart] canvas').length === 2")
    assert shown_steps(browser) == (low, high)


def value_at(browser, key):
    """What the chart of the loss says after a key."""
    browser.run("document.querySelector('[data-chart=loss] .chart-ground').focus()")
    browser.press(key)
    return browser.run("document.querySelector('[data-chart=loss] .chart-value').textContent")


def shown_steps(browser):
    """The first and the last step that is drawn."""
    said = [value_at(browser, key) for key in ("Home", "End")]
    return tuple(int(one.split()[1].replace(",", "")) for one in said)


def test_everything_is_reached_by_keyboard(browser, served):
    opened(browser, served, "fleet", PAGES["fleet"])
    reached = []
    for _ in range(8):
        browser.press("Tab")
        reached.append(focused(browser))
    names = ["Fleet", "Run", "Chips", "Plan", "Compile", "Compare"]
    assert reached == ["Skip to content", "tpukit", *names]
    assert browser.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.press("?", "?")
    assert browser.run("document.querySelector('dialog').open")
    browser.press("Escape")
    browser.wait_until("!document.querySelector('dialog').open")
    browser.press("3", "3")
    browser.wait_until("document.querySelector('.chip')")
    assert browser.run("location.pathname") == "/chips"


def test_the_torus_is_walked_by_keyboard(browser, served):
    opened(browser, served, "chips?run=cube", "document.querySelectorAll('.chip').length === 64")
    browser.run("document.querySelector('.chip[tabindex=\"0\"]').focus()")
    at = "document.activeElement.dataset.chip"
    assert browser.run(at) == "0:0"
    browser.press("ArrowRight")
    assert browser.run(at) == "0:1"
    browser.run("window.cell = document.activeElement; null")
    browser.run("document.querySelector('#metric').dispatchEvent(new Event('change'))")
    browser.wait_until("!document.contains(window.cell)")
    assert browser.run(at) == "0:1", "drawn anew, the cursor stays"
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")  # around the ring, from x = 0 to x = 3
    assert "(3, 0, 0)" in browser.run("document.activeElement.getAttribute('aria-label')")
    browser.press("Enter")
    browser.wait_until("document.querySelector('[data-chart=duty_cycle] canvas')")
    assert "chip=1%3A1" in browser.run("location.search")


def test_a_chart_is_read_by_keyboard(browser, served, folder):
    opened(browser, served, "run?run=second&by=step&charts=loss", f"{DRAWN}")
    browser.wait_until("document.querySelector('[data-chart=loss] canvas')")
    records = recorded(folder / "runs/second/metrics.jsonl")
    assert value_at(browser, "Home") == f"step 1 · {records[0]['loss']:.4g}"
    assert value_at(browser, "ArrowRight").startswith("step 2 · ")
    browser.press("+", "+")
    browser.wait_until("new URLSearchParams(location.search).get('to')")
    browser.press("0", "0")
    browser.wait_until("!new URLSearchParams(location.search).get('to')")


def test_what_is_written_appears_by_itself(browser, tmp_path):
    run = make_run(tmp_path / "moving", steps=30)
    with Served([tmp_path]) as served:
        opened(browser, served, "run?by=step&charts=loss", f"{DRAWN} === 'moving'")
        shown = "document.querySelector('[data-figure=step] .figure').textContent"
        assert browser.run(shown) == "30"
        at = time.time()
        write_lines(run / "metrics.jsonl", [metric(31, began=at)])
        browser.wait_until(f"{shown} === '31'")
        deadline = time.monotonic() + 30
        while not value_at(browser, "End").startswith("step 31 "):
            assert time.monotonic() < deadline, "the chart did not move"
            time.sleep(0.05)
        make_run(tmp_path / "newcomer", steps=3)
        browser.wait_until("document.querySelector('#picker option[value=newcomer]')")
        nothing_went_wrong(browser, served)


def test_a_server_that_comes_back_is_found_again(browser, folder):
    lamp = "document.querySelector('.lamp').dataset.state"
    with Served([folder]) as served:
        opened(browser, served, "fleet", f"{lamp} === 'live'")
        port = served.port
    browser.wait_until(f"{lamp} !== 'live'")
    with Served([folder], port=port):
        browser.wait_until(f"{lamp} === 'live'")


def test_a_page_that_was_left_listens_no_longer(browser, folder):
    """A browser has six lines to a server: pages that keep theirs would block the seventh."""
    pulse = Pulse(partial(look, Library([folder])))
    with Served([folder], pulse=pulse) as served:
        for _ in range(8):
            opened(browser, served, "plan", PAGES["plan"])
        deadline = time.monotonic() + 30
        while pulse.viewers > 1:
            assert time.monotonic() < deadline, f"{pulse.viewers} pages still listen"
            time.sleep(0.02)


def is_written(path):
    with contextlib.suppress(FileNotFoundError):  # it was another's name for a moment
        return path.stat().st_size > 0
    return False


def saved(browser, folder, button):
    """Click a button, and return the file that it saves."""
    browser.save_downloads_in(folder)
    before = set(folder.iterdir())
    browser.click(button)
    deadline = time.monotonic() + 30
    while True:
        new = set(folder.iterdir()) - before
        # A file gets its name first and its content a moment later.
        if new and all(one.suffix != ".crdownload" and is_written(one) for one in new):
            return new.pop()
        assert time.monotonic() < deadline, "nothing was saved"
        time.sleep(0.02)


def test_what_is_saved_is_what_is_shown(browser, served, folder, tmp_path):
    opened(browser, served, "run?run=second&by=step&charts=loss&from=50&to=80", f"{DRAWN}")
    browser.wait_until("document.querySelector('[data-chart=loss] canvas')")
    records = recorded(folder / "runs/second/metrics.jsonl")
    part = [(one["step"], one["loss"]) for one in records if 50 <= one["step"] <= 80]
    button = "[data-chart=loss] button[aria-label$={}]".format
    rows = list(csv.reader(saved(browser, tmp_path, button("CSV")).read_text().splitlines()))
    assert rows[0] == ["step", "loss"]
    assert [(int(step), float(loss)) for step, loss in rows[1:]] == part
    data = json.loads(saved(browser, tmp_path, button("JSON")).read_text())
    assert [tuple(row) for row in data["rows"]] == part
    assert data["lines"][0]["origin"] == "measured"
    picture = saved(browser, tmp_path, button("PNG"))
    assert picture.name == "second-loss.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_chips_are_saved_with_their_places(browser, served, tmp_path):
    opened(browser, served, "chips?run=first", PAGES["chips?run=first"])
    text = saved(browser, tmp_path, "button[aria-label$=CSV]").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    found = {(row["process"], row["chip"]): row for row in rows}
    assert len(rows) == 16
    assert float(found["2", "1"]["duty_cycle"]) == 0.41
    assert found["2", "1"]["coordinates"] == "1 2"


def test_markup_in_names_is_only_text(browser, tmp_path):
    attack = "<img src=x onerror=document.title='owned'>&\"'"
    run = make_run(tmp_path / attack, steps=3, slice_name=attack, hosts=1, chips=1)
    odd = reading(0.0, 0, 1).to_dict() | {"host": attack, "missing": {"power_watts": attack}}
    write_lines(run / "hosts/0/readings.jsonl", [odd])
    write_lines(run / "metrics.jsonl", [{**metric(4, began=time.time()), attack: 1.0}])
    write_lines(run / "events.jsonl", [{"time": 1.0, "event": attack, "text": attack, "step": 1}])
    make_run(tmp_path / "other", steps=3)
    shown = {
        "fleet": "td a",
        "run?by=step": "aside td .details",
        "chips?metric=power_watts": ".chip title",
        "compare": "th",
    }
    with Served([tmp_path]) as served:
        for page, where in shown.items():
            name = "a" if page == "compare" else "run"
            path = f"{page}{'&' if '?' in page else '?'}{urlencode({name: attack})}"
            words = f"[...document.querySelectorAll({where!r})].map((one) => one.textContent)"
            there = f"{words}.some((one) => one.includes({json.dumps(attack)}))"
            opened(browser, served, path, there)
            assert browser.run("document.querySelectorAll('img, [onerror]').length") == 0
            assert "owned" not in browser.run("document.title").replace(attack, "")
            nothing_went_wrong(browser, served)


def test_a_viewer_signs_in_once(browser, folder):
    token = "a-token-for-the-browser"
    with Served([folder], token=Token(token)) as served:
        browser.open(f"{served.url}/run?run=first")
        assert browser.run("document.title") == "tpukit: token"
        type_token(browser, "not-the-right-token")
        browser.wait_until("document.getElementById('said').textContent")
        type_token(browser, token)
        browser.wait_until(f"{DRAWN} === 'first'")
        opened(browser, served, "chips?run=first", PAGES["chips?run=first"])


def test_the_address_that_the_command_prints_signs_in(browser, folder):
    token = "another-token-for-the-browser"
    with Served([folder], token=Token(token)) as served:
        # Not `open`, which waits for a page that stays: this one goes on to the list.
        browser.call("Page.navigate", url=f"{served.url}/login#{token}")
        browser.wait_until("location.pathname === '/'")
        browser.wait_until("document.querySelectorAll('table a').length")
        browser.wait_until("document.querySelector('svg.spark[aria-label$=sampled]')")
        assert token not in browser.run("location.href")


def type_token(browser, text):
    browser.run(
        "document.getElementById('token').value = ''; document.getElementById('token').focus()"
    )
    browser.call("Input.insertText", text=text)
    browser.press("Enter")


def test_the_theme_is_kept(browser, served):
    ground = "getComputedStyle(document.body).backgroundColor"
    opened(browser, served, "fleet", dark=False)
    light = browser.run(ground)
    browser.press("t", "t")
    browser.press("t", "t")
    dark = browser.run(ground)
    assert dark != light
    opened(browser, served, "plan", PAGES["plan"])
    assert browser.run(ground) == dark
    browser.press("t", "t")
    assert browser.run(ground) == light


def test_an_empty_folder_teaches_the_next_command(browser, tmp_path):
    with Served([tmp_path]) as served:
        commands = {
            "fleet": "tpukit train",
            "run": "tpukit train",
            "chips": "tpukit train",
            "plan": "tpukit plan",
            "compile": "tpukit check",
            "compare": "tpukit train",
        }
        for page, command in commands.items():
            shown = "[...document.querySelectorAll('.empty .command code')]"
            there = f"{shown}.some((one) => one.textContent.includes({command!r}))"
            opened(browser, served, page, there)
            nothing_went_wrong(browser, served)
