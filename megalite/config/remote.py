"""Servers: URLs of token stores, the packages that read them, and URLs that take models. Imports no torch."""

from urllib.parse import urlsplit

# Package that fsspec reads each with, and megalite's extra that has it.
SCHEMES = {
    "s3": ("s3fs", "s3"),
    "gs": ("gcsfs", "gs"),
    "https": ("aiohttp", "http"),
    "http": ("aiohttp", "http"),
}


def is_address(url: str) -> bool:
    """Return whether `url` is one of http or https with a host, and without a user, password or unprintable text."""
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False
    plain = url.isascii() and url.isprintable() and not set(url) & set(" @")
    return parts.scheme in ("http", "https") and named and plain


def scheme_of(path: str) -> str | None:
    """The scheme of a URL that a token store may have; None: `path` is a path on this machine."""
    scheme, separator, _ = path.partition("://")
    return scheme if separator and scheme in SCHEMES else None
