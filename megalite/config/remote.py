"""Token stores on servers: their URLs, and the packages that read them. Imports no torch."""

# Package that fsspec reads each with, and megalite's extra that has it.
SCHEMES = {
    "s3": ("s3fs", "s3"),
    "gs": ("gcsfs", "gs"),
    "https": ("aiohttp", "http"),
    "http": ("aiohttp", "http"),
}


def scheme_of(path: str) -> str | None:
    """The scheme of a URL that a token store may have; None: `path` is a path on this machine."""
    scheme, separator, _ = path.partition("://")
    return scheme if separator and scheme in SCHEMES else None
