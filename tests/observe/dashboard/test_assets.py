"""The files of the front end: all loaded at once, none from anywhere else."""

import re

from tpukit.observe.dashboard.answers import assets_folder

ASSETS = assets_folder()
OWN = [path for path in ASSETS.rglob("*") if path.is_file() and "vendor" not in path.parts]
# The first two are loaded by themselves; the third belongs to the page that asks for the token.
NOT_IMPORTED = {"app.js", "theme.js", "login.js"}


def test_modules_are_fetched_at_once_and_not_one_after_another():
    modules = {str(path.relative_to(ASSETS)) for path in OWN if path.suffix == ".js"}
    index = (ASSETS / "index.html").read_text()
    preloaded = set(re.findall(r'modulepreload" href="/assets/([^"]+)"', index))
    assert preloaded == modules - NOT_IMPORTED


def test_nothing_names_another_server():
    namespace = "http://www.w3.org/2000/svg"
    for path in OWN:
        text = path.read_text().replace(namespace, "")
        assert not re.search(r"https?://|[\"'(]//", text), path


def test_no_script_turns_text_into_markup():
    for path in OWN:
        forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
        assert not re.search(forbidden, path.read_text()), path
