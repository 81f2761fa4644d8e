"""The address or file at which a run offers its metrics to Prometheus."""

from pathlib import Path
from typing import NamedTuple

LOOPBACK = "127.0.0.1"
MAX_PORT = (1 << 16) - 1


class Address(NamedTuple):
    """An address of TCP to listen at."""

    host: str
    port: int


def exposed_at(where: int | str) -> Address | Path:
    """The address or file that `log.prometheus` names. Raises ValueError, with the rule, for what is neither."""
    if isinstance(where, int):
        return Address(LOOPBACK, where)
    if where.endswith(".prom") and where.isprintable():
        return Path(where)
    host, _, port = where.rpartition(":")
    if host.strip() and host.isprintable() and port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT:
        return Address(host, int(port))
    raise ValueError(f"must be a port, HOST:PORT with a port from 1 to {MAX_PORT}, or a file whose name ends in .prom")
