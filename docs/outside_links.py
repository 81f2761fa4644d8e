"""Makes text of links to files outside of docs/, which the site does not hold. mkdocs calls it for every page."""

import re
from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's text without such links. Links of pages in a folder, which may go up, stay."""
    if "/" in page.file.src_uri:
        return markdown
    return re.sub(r"\[([^\]]*)\]\(\.\./[^)]*\)", r"\1", markdown)
