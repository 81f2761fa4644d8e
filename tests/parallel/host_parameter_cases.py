"""Jobs whose parameters live in host memory, beside the same jobs with parameters on the device."""

from dataclasses import replace
from typing import Literal
from unittest.mock import patch

from file_cases import LARGER, SPARSE, case, placed, trained, unlike
from four_bits import can_shard

from megalite.config.layout import Layout
from megalite.config.model_schema import Adapter
from megalite.config.parallel_schema import Pipeline, Placement
from megalite.config.schema import Config, Train
from megalite.parallel import host_parameters

Home = Literal["device", "host", "files", "updated on the host"]  # of the optimizer's states
TIED = replace(LARGER, tie_embeddings=True)
WIDE = replace(LARGER, width=128, ffn=128)  # ranks share rows in four bits by whole blocks
FACTORS, NF4 = Adapter(rank=4), Adapter(rank=4, base="nf4")


def scheduled(config: Config, name: str) -> Config:
    return replace(config, parallel=replace(config.parallel, pipeline=Pipeline(name)))


CASES: dict[str, tuple[Config, Home]] = {
    "adamw, one rank": (case(Layout()), "updated on the host"),
    "adamw, bf16": (case(Layout(), train=Train(steps=6, precision="bf16")), "host"),
    "adamw, zero1": (case(Layout(dp_shard=4), "zero1"), "host"),
    "adamw, zero2": (case(Layout(dp_shard=2, cp=2), "zero2"), "files"),
    "adamw, zero3, tied": (case(Layout(dp_shard=4), model=TIED), "host"),
    "adamw, replicas": (case(Layout(dp_replicate=2, tp=2)), "updated on the host"),
    "adamw, tp": (case(Layout(tp=2, dp_shard=2)), "host"),
    "adamw, pp, tied": (case(Layout(pp=2, dp_shard=2), "zero1", model=TIED), "updated on the host"),
    "adamw, pp, split backward": (scheduled(case(Layout(pp=2)), "zb_h1"), "host"),
    "adamw, experts": (case(Layout(dp_shard=4, ep=2), model=SPARSE), "files"),
    "adamw, experts whole": (case(Layout(dp_shard=2, ep=2), model=SPARSE), "host"),
    "adamw, experts of tp, made again": (  # backward begins with what comes after experts
        case(Layout(tp=2, ep=2), model=replace(SPARSE, norm="post"), train=Train(6, "fp64", recompute="full")),
        "host",
    ),
    "muon, one rank": (case(Layout(), "zero3", "muon"), "host"),
    "muon, zero1": (case(Layout(dp_shard=2, tp=2), "zero1", "muon"), "files"),
    "muon, experts": (case(Layout(dp_shard=4, ep=2), "zero3", "muon", model=SPARSE), "host"),
    "adapters, one rank": (case(Layout(), adapter=FACTORS), "device"),
    "adapters, muon": (case(Layout(pp=2, dp_shard=2), "zero2", "muon", adapter=FACTORS), "device"),
    "four bits": (case(Layout(tp=2, dp_shard=2), model=WIDE, adapter=NF4), "device"),
    "four bits, pp": (case(Layout(pp=2), model=WIDE, adapter=NF4), "host"),
}


def on_host(config: Config) -> Config:
    return replace(config, parallel=replace(config.parallel, placement=Placement("host")))


def differences(folder: str) -> list[str]:
    """Cases in which losses, norms, or any bit of weights and states differ from those on the device."""
    found = []
    for name, (config, home) in CASES.items():
        if not can_shard(on_host(config)):
            continue
        placement = {"files": folder, "updated on the host": "host"}.get(home, home)
        there = placed(config, placement, update_on="host" if home == "updated on the host" else "device")
        with patch.object(host_parameters, "CAST_BYTES", 1000):  # a part of most matrices
            found += [f"{name}: {what}" for what in unlike(trained(on_host(there)), trained(config))]
    return found
