"""Markup: what is text stays text, whatever it holds, and nothing can run or load."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_reader import PageReader

from tpukit.pages.markup import Markup, escape, join, slug, tag

anything = st.text(st.characters(exclude_categories=()))


def test_a_string_is_escaped_and_markup_is_not():
    made = tag("a", "<b>", tag("i"), ["&", ("x", tag("wbr"))], href='#"', hidden=True, id=None)
    assert made.html == '<a href="#&quot;" hidden>&lt;b&gt;<i></i>&amp;x<wbr/></a>'
    assert join("<", tag("i")) == Markup("&lt;<i></i>")


def test_markup_is_no_string():
    assert not isinstance(tag("i"), str)
    with pytest.raises(TypeError):
        _ = tag("i") + "<b>"
    # Put into a string by mistake, it is text like any other, not markup again.
    assert "<i>" not in join(f"{tag('i')}").html


@given(anything)
def test_any_text_comes_back_as_it_was_but_for_what_nobody_can_show(text):
    made = tag("p", text, title=text).html
    made.encode()  # halves of surrogate pairs would refuse
    page = PageReader(made)
    assert page.structure == [("p", ["title"])]
    assert "".join(page.words[1:]) == page.elements[0][1]["title"]
    for was, shown in zip(text, page.elements[0][1]["title"], strict=True):
        assert shown in (was, "\ufffd")
        assert shown == was or not was.isprintable()


@pytest.mark.parametrize("hidden", ["\0", "\x1b", "\x9b", "\ud800", "\u202e", "\u2066"])
def test_controls_and_marks_that_reverse_reading_are_shown_as_what_they_are_not(hidden):
    assert escape(f"a{hidden}b") == "a\ufffdb"


def test_what_could_run_or_load_is_no_part_of_a_page():
    for name in ("script", "style", "SCRIPT", "p onclick=x", ""):
        with pytest.raises(ValueError, match="is no element of a page"):
            tag(name)
    for attribute in ("onclick", "style", "src", "a b", 'x"'):
        with pytest.raises(ValueError, match="is not allowed in a page"):
            tag("p", **{attribute: "x"})
    for link in ("javascript:alert(1)", " javascript:alert(1)", "data:text/html,x", "file:///x"):
        with pytest.raises(ValueError, match=r"A link to .* is refused"):
            tag("a", href=link)


@given(anything)
def test_a_slug_is_safe_anywhere(text):
    assert set(slug(text)) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
