from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from megalite.data.store_writer import StoreWriter


@pytest.fixture
def write_store(tmp_path: Path) -> Callable[..., str]:
    """Writes documents (any iterables of ids) to a store and returns its prefix."""

    def write(documents: Iterable[Iterable[int]], name: str = "store", dtype: str = "<i4") -> str:
        prefix = tmp_path / name
        with StoreWriter(prefix, dtype) as writer:
            for document in documents:
                writer.add(np.array(list(document)))
        return str(prefix)

    return write
