"""The page in a real browser: it runs, asks nobody for anything, and needs no mouse."""

import struct

import pytest

from tpukit.checker.report import write_html

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
SELECTED = "document.getElementById('timeline-details').textContent"
INK = "getComputedStyle(document.body).backgroundColor"
# How many different colours a piece of the timeline has: a blank one has one.
COLORS = """(() => {
  const canvas = document.querySelector('#timeline-view canvas');
  const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  return new Set(new Uint32Array(data.buffer)).size;
})()"""


@pytest.fixture
def page(report, tmp_path):
    return write_html(report, tmp_path / "report.html")


def healthy(browser):
    assert browser.run("document.documentElement.dataset.ready") == "true"
    assert browser.run("document.documentElement.dataset.error ?? null") is None
    assert browser.run("document.documentElement.dataset.blocked ?? null") is None
    assert browser.requests == []
    assert browser.complaints == []


def test_it_runs_and_shows_the_figures(browser, page):
    browser.open(page)
    healthy(browser)
    visible = browser.run("document.body.innerText")
    for words in ("FITS", "100 ms", "30.0%", "20,480", "31.25 GiB", "model.py:40"):
        assert words in visible, words
    assert browser.run(COLORS) > 4


@pytest.mark.parametrize("width", [1400, 600])
def test_nothing_sticks_out_of_the_page(browser, page, width):
    browser.open(page, width=width)
    healthy(browser)
    assert browser.run("document.documentElement.scrollWidth") <= width


def test_dark_follows_the_system_and_the_button(browser, page):
    browser.open(page)
    light = browser.run(INK)
    browser.open(page, dark=True)
    dark = browser.run(INK)
    assert light != dark
    for theme, color in (("light", light), ("dark", dark), ("auto", dark)):
        browser.run("document.getElementById('theme').click()")
        assert browser.run("document.documentElement.dataset.theme") == theme
        assert browser.run(INK) == color
    healthy(browser)


def test_the_timeline_is_read_by_keyboard(browser, page):
    browser.open(page)
    browser.run("document.getElementById('timeline-view').focus()")
    browser.press("ArrowRight")
    assert "embed" in browser.run(SELECTED)
    browser.press("ArrowRight")
    assert "while.1" in browser.run(SELECTED)
    assert "a loop of 4 iterations, 20 ms each" in browser.run(SELECTED)
    browser.press("ArrowDown")
    assert "fusion.2  15 ms × 4 = 60 ms  [model]" in browser.run(SELECTED)
    assert "533 TFLOP/s" in browser.run(SELECTED)  # 8e12 FLOP / 15 ms
    for key in ("Enter", "+", "-", "0"):
        browser.press(key, key if len(key) == 1 else "")
    browser.run("document.getElementById('timeline-fold').click()")
    assert browser.run(COLORS) > 4
    healthy(browser)


def test_pointing_at_an_op_tells_of_it(browser, page):
    browser.open(page)
    place = browser.run("""(() => {
        const view = document.getElementById('timeline-view');
        view.scrollIntoView({block: 'center', behavior: 'instant'});
        const box = view.getBoundingClientRect();
        return [box.left, box.top, box.width];
    })()""")
    left, top, width = place
    # The last fourth of the folded step (10 + 20 + 10 ms) is adam, on the core's first row.
    browser.call(
        "Input.dispatchMouseEvent", type="mouseMoved", x=left + 0.9 * width, y=top + 24 + 18 + 8
    )
    assert "adam" in browser.run(SELECTED)
    healthy(browser)


def test_what_a_program_calls_itself_never_runs(browser, report, tmp_path):
    attack = "</script><script>document.title = 'owned'</script><img src=x onerror=alert(1)>"
    report["program"] = attack
    report["spans"][0]["name"] = report["spans"][0]["op_name"] = attack
    browser.open(write_html(report, tmp_path / "report.html"))
    healthy(browser)
    assert browser.run("document.title").startswith("</script><script>")
    assert attack in browser.run("document.querySelector('h1').innerText")


def test_without_scripts_everything_but_the_controls_is_there(browser, page):
    browser.open(page, scripts=False)
    visible = browser.run("document.body.innerText")
    assert "100 ms" in visible
    assert "Whole step" not in visible
    assert browser.run("document.querySelectorAll('.picture rect').length") == 8


def test_a_screenshot_is_a_picture(browser, page, tmp_path):
    browser.open(page, width=800)
    browser.screenshot(tmp_path / "page.png", selector="main")
    width, height = struct.unpack(">II", (tmp_path / "page.png").read_bytes()[16:24])
    assert width == 800
    assert height > 1000
