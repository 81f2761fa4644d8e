"""Weights in four bits where FSDP2 shards no integers, which is refused there: tests of them are skipped."""

import pytest

from megalite.config.schema import Config
from megalite.parallel.fsdp import shards_integers
from megalite.plan.pipeline import uses_fsdp

needs_integers = pytest.mark.skipif(not shards_integers(), reason="FSDP2 of PyTorch 2.11 shards no integers")


def can_shard(config: Config) -> bool:
    """Return whether FSDP2 shards the weights of `config`."""
    return shards_integers() or config.adapter is None or config.adapter.base != "nf4" or not uses_fsdp(config)


def skip_if_refused(config: Config) -> None:
    """Skip a test of `config` if FSDP2 does not shard its weights."""
    if not can_shard(config):
        pytest.skip("FSDP2 of PyTorch 2.11 shards no integers")
