"""What tests of pages share: questions, and reading a page strictly."""

from argparse import Namespace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

from megalite.commands.plan.request import Asked, ask

VOID = {"meta", "br", "img", "link", "hr", "input"}
SVG = "{http://www.w3.org/2000/svg}"
LOADING = {"src", "href", "srcset", "action", "data", "poster", "background"}  # attributes that load something


def asked_of(*overrides: str, **options: Any) -> Asked:
    """A question about a small model, as the command line would ask it."""
    usual = dict.fromkeys(("cluster", "max_memory", "tokens", "days", "budget", "routing")) | {"offload": False}
    files = ["configs/model/small_60m.yaml"]
    return ask(Namespace(files=files, overrides=["batch.global=64", *overrides], **usual | options))


class Page(HTMLParser):
    """A page whose elements are all closed in order. text: what people read. tags: with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open, f"not closed: {self.open}"
        self.pictures = [self._svg(part) for part in page.split("<svg")[1:]]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += "" if self.open[-1:] == ["style"] else data

    @staticmethod
    def _svg(part: str) -> ElementTree.Element:
        return ElementTree.fromstring("<svg" + part.partition("</svg>")[0] + "</svg>")

    @property
    def loaded(self) -> list[str]:
        """What a browser would fetch or run."""
        found = [tag for tag, _ in self.tags if tag in {"script", "iframe", "link", "object", "embed", "img"}]
        return found + [
            name for _, attributes in self.tags for name in attributes if name in LOADING or name[:2] == "on"
        ]
