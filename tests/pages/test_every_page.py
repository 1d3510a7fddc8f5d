"""What holds for every page: one frame, one policy, and no text of a user's becomes markup."""

import ast
import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from page_reader import PageReader

import tpukit

SOURCE = Path(tpukit.__file__).parent
POLICY = {
    "default-src": {"'none'"},
    "base-uri": {"'none'"},
    "form-action": {"'none'"},
    "img-src": {"data:"},
    "require-trusted-types-for": {"'script'"},
    "trusted-types": {"'none'"},
}
ATTACK = "x</script></title><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&"
PIECES = (
    "<script>",
    "</script>",
    "</title>",
    "<!--",
    "-->",
    '"',
    "'",
    "&",
    "&lt;",
    "\0",
    "\x1b[1m",
)
# Names of models and files, and notes: any characters, and what means something to a browser.
texts = st.lists(
    st.one_of(st.sampled_from(PIECES), st.text(st.characters(exclude_categories=()))), max_size=6
).map(lambda pieces: "x" + "".join(pieces))
REORDERING = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def harmless(text):
    """As long, cut by the same slashes and white space, and nothing but letters otherwise."""
    return re.sub(r"[^/\s]", "x", text)


def is_shown(character):
    unprintable = unicodedata.category(character) in ("Cc", "Cs") and character not in "\t\n\r"
    return not unprintable and unicodedata.bidirectional(character) not in REORDERING


def as_shown(text):
    return " ".join("".join(one if is_shown(one) else "\ufffd" for one in text).split())


def test_the_policy_is_the_same_everywhere(kinds):
    for name, render in kinds.items():
        page = PageReader(render("x"))
        policy = page.policy
        # Pages differ in which styles and scripts they hold, and may run those alone.
        assert policy.pop("style-src") == page.digests("style") != set(), name
        assert policy.pop("script-src") == page.digests("script") != set(), name
        assert policy == POLICY, name


def test_the_frame_is_the_same_everywhere(kinds):
    pages = [PageReader(render("x")) for render in kinds.values()]
    for name in ("style", "script"):
        held = [page.verbatim[name] for page in pages]
        shared = set(held[0]).intersection(*held[1:])
        assert len(shared) == 1, f"one {name} of the kit on every page"
    heads = [[tag for tag, _ in page.elements if tag in ("meta", "link", "nav")] for page in pages]
    assert heads == [heads[0]] * len(heads)


def test_a_page_asks_nobody_for_anything(render):
    for tag, attributes in PageReader(render("x")).elements:
        assert attributes.keys().isdisjoint(("src", "srcset", "action", "style", "poster")), tag
        assert attributes.get("href", "#").startswith(("#", "data:,"))
        assert attributes.get("href", "#")[:5] != "data:" or attributes["href"] == "data:,"


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=texts)
@example(text=ATTACK)
def test_no_text_of_a_user_becomes_markup(render, text):
    written = render(text)
    page, other = PageReader(written), PageReader(render(harmless(text)))
    assert page.structure == other.structure
    assert page.policy == other.policy
    assert page.verbatim["style"] == other.verbatim["style"]
    assert page.digests("script") == other.digests("script")
    assert all(is_shown(character) for character in written)
    assert as_shown(text) in page.text


@pytest.mark.browser
@pytest.mark.xdist_group("browser")
def test_a_browser_sees_no_more_elements_than_without_the_attack(browser, render, tmp_path):
    counts = []
    for number, text in enumerate((ATTACK, harmless(ATTACK))):
        path = tmp_path / f"{number}.html"
        path.write_text(render(text))
        browser.open(path)
        assert browser.run("document.documentElement.dataset.ready") == "true"
        assert browser.run("document.title") != "owned"
        assert browser.run("document.documentElement.dataset.error ?? null") is None
        assert browser.run("document.documentElement.dataset.blocked ?? null") is None
        assert browser.complaints == browser.requests == []
        counts.append(browser.run("document.querySelectorAll(':not(wbr)').length"))
    assert counts[0] == counts[1]


@pytest.mark.browser
@pytest.mark.xdist_group("browser")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 420])
def test_pages_look_alike_and_fit(browser, kinds, tmp_path, width, dark):
    seen = set()
    for name, render in kinds.items():
        path = tmp_path / f"{name}.html"
        path.write_text(render("a-name-of-some-length/" * 3))
        browser.open(path, width=width, dark=dark)
        assert browser.run("document.documentElement.scrollWidth") <= width, name
        looks = "(({font, color, backgroundColor}) => [font, color, backgroundColor].join())"
        seen.add(browser.run(f"{looks}(getComputedStyle(document.body))"))
    assert len(seen) == 1


def test_only_the_kit_makes_pages_and_markup_out_of_strings():
    for path in SOURCE.rglob("*.py"):
        if path.is_relative_to(SOURCE / "pages"):
            continue
        source = path.read_text()
        assert "<!doctype" not in source.lower(), path
        assert "Content-Security-Policy" not in source, path
        calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        assert "Markup" not in {ast.unparse(call).rsplit(".")[-1] for call in calls}, path
