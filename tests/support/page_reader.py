"""An independent reader of pages: Python's own parser, which knows nothing of the kit."""

import base64
import hashlib
from html.parser import HTMLParser

INLINE = {"span", "a", "code", "wbr", "strong"}
VOID = {"meta", "link", "input", "wbr"}
VERBATIM = ("script", "style")


class PageReader(HTMLParser):
    """Elements, the words shown, what scripts and styles hold, and that all are closed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.words = [], [], []
        self.verbatim = {name: [] for name in VERBATIM}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.words.append("" if tag in INLINE else " ")
        if tag not in VOID:
            self.open.append(tag)
        if tag in VERBATIM:
            self.verbatim[tag].append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        inside = self.open[-1] if self.open else ""
        if inside in VERBATIM:
            self.verbatim[inside][-1] += data
        else:
            self.words.append(data)

    @property
    def text(self):
        return " ".join("".join(self.words).split())

    @property
    def structure(self):
        """Every element with the names of its attributes, in order; breaks may fall anywhere."""
        return [(tag, sorted(attrs)) for tag, attrs in self.elements if tag != "wbr"]

    @property
    def policy(self):
        """The content-security policy by directive."""
        found = [attrs["content"] for _, attrs in self.elements if "http-equiv" in attrs]
        assert len(found) == 1
        entries = (directive.split() for directive in found[0].split(";"))
        return {name: set(sources) for name, *sources in entries}

    def digests(self, name):
        """What the policy must allow: the digest of each style, or of each script that can run."""
        kinds = [attrs.get("type") for tag, attrs in self.elements if tag == name]
        held = [text for text, kind in zip(self.verbatim[name], kinds, strict=True) if not kind]
        return {
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for text in held
        }
