"""Seconds in which parameters and gradients that live in host memory are on their way. Imports no torch."""

from megalite.config.schema import Config
from megalite.cost.cluster import Cluster
from megalite.cost.stage_time import Piece
from megalite.plan.parts.sizes import PRECISION_BYTES
from megalite.plan.pipeline import micro_batches

HOST_SHARE = 0.8  # share of the bandwidth to host memory that copies reach; an assumption
HOST_BANDWIDTH = 25e9  # bytes/s of host memory that a GPU's process gets; an assumption for eight on a node


class HostCopies:
    """Copies of the parameters of a piece that a rank shares with `shards` − 1 others, over its link to the host."""

    def __init__(self, config: Config, cluster: Cluster, shards: int) -> None:
        self._config, self._shards = config, shards
        self._element = PRECISION_BYTES[config.train.dtype]
        self._wide = max(self._element, 4)
        self._bus = cluster.gpu.host * HOST_SHARE

    def arriving(self, piece: Piece) -> float:
        """Seconds in which a rank's share of a piece comes from host memory; 0 where it does not live there."""
        if not self._config.on_host(trained=False):
            return 0.0
        trained = piece.trained * self._config.on_host(trained=True)
        return (self._element * (piece.parameters - piece.trained) + self._wide * trained) / self._shards / self._bus

    def waited(self, piece: Piece) -> float:
        """Seconds of a micro-batch, on average, in which the host adds reduced gradients to those before, and launches
        nothing: FSDP2 waits for each layer's."""
        config, m = self._config, micro_batches(self._config)
        if not config.on_host(trained=True) or config.parallel.data_mode == "zero1":
            return 0.0
        return (1 - 1 / m) * self._wide * piece.trained / self._shards * (1 / self._bus + 3 / HOST_BANDWIDTH)
