"""What free text of published rows tells, and predictions in words."""

from types import SimpleNamespace
from typing import cast

import pytest

from megalite.planner.kept import DEEPSPEED_FLOAT32_SUM
from megalite.planner.predict import Prediction
from megalite.planner.programs import EAGER_NORMS, EAGER_SOFTMAX, PROGRAMS
from megalite.planner.texts import money, step_text
from megalite.planner.words import cluster_of, mode_of, program_of

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "network", "power", "bandwidth", "memory"),
    [
        ("A100-80GB (Selene DGX, 8x200Gb HDR IB)", 25e9, 400, 2039e9, 80),
        ("A100-80GB, 8/node, 800 Gbps IB per node", 12.5e9, 400, 2039e9, 80),
        ("H100-SXM 96GB HBM2e 500W, 2.4TB/s, 400Gb/s RDMA per GPU", 50e9, 500, 2.4e12, 95.04),
        ("a100_40gb / 1600 Gbps RoCE per node", 25e9, 400, 1555e9, 40),
        ("B200-SXM 180GB, single node NVLink5", 50e9, 1000, 7700e9, 179.1),
        ("H100 with NVLink of 900 GB/s", 50e9, 700, 3350e9, 79.65),
        ("MI325X, 256GB, 6 TB/s, 1000 W", 50e9, 1000, 6e12, 253.44),
        ("A800-80GB SXM, 4x100Gb RoCE", 6.25e9, 400, 2039e9, 80),
    ],
)
def test_a_cluster_is_told_in_words(text: str, network: float, power: float, bandwidth: float, memory: float) -> None:
    cluster = cluster_of(text)
    assert cluster.network.bandwidth == pytest.approx(network)
    assert (cluster.gpu.power, cluster.gpu.bandwidth) == (power, bandwidth)
    assert cluster.gpu.memory == pytest.approx(memory * GIB, rel=0.003)


def test_nothing_impossible_is_taken_from_words() -> None:
    assert cluster_of("H100 0 TB/s, 000W, 0x0Gb, 0GB, 0 Gbps per node") == cluster_of("H100")


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("zero3(FSDP2)", "zero3"),
        ("FULL_SHARD", "zero3"),
        ("SHARD_GRAD_OP", "zero3"),
        ("ZeRO-3", "zero3"),
        ("zero2", "zero2"),
        ("zero1", "zero1"),
        ("distributed optimizer", "zero1"),
        ("zero0", "ddp"),
        ("0", "ddp"),
        ("NO_SHARD", "ddp"),
        ("", "ddp"),
    ],
)
def test_sharding_is_told_in_words(text: str, mode: str) -> None:
    assert mode_of(text) == mode


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"source": "torchtitan 2024-12", "notes": "eager"}, "torchtitan"),
        ({"source": "torchtitan 2024-12", "notes": "compile + async TP"}, "torchtitan with torch.compile"),
        ({"source": "Korthikanti22", "recompute": "selective+SP"}, "Megatron-LM 2022"),
        ({"source": "Megatron SC21", "fsdp_zero": "zero3"}, "DeepSpeed ZeRO-3 of 2021"),
        ({"source": "somebody", "fsdp_zero": "full"}, "an unknown program that shards weights"),
        ({"source": "torchtitan 2025-06", "notes": "compile"}, "torchtitan of 2025 with torch.compile"),
        ({"source": "NeMo 25.02"}, "NeMo"),
        ({"source": "NeMo 24.07 H100"}, "NeMo of 2024"),
        ({"source": "NeMo 24.12 recipes"}, "NeMo of late 2024"),
        ({"source": "InternEvo"}, "InternEvo"),
        ({"source": "Megatron-Turing NLG (Megatron-DeepSpeed)"}, "Megatron-DeepSpeed"),
        ({"source": "Megatron-Bridge"}, "NeMo"),
        ({"source": "SimuMax", "provenance": "Megatron-LM 0.14"}, "Megatron-LM with Transformer Engine"),
        ({"source": "Megatron-LM"}, "Megatron-LM with Transformer Engine"),
        ({"source": "Megatron-LM", "notes": "--tp-comm-overlap"}, "Megatron-LM with overlap"),
        ({"source": "Megatron-LM", "provenance": "NVIDIA/Megatron-LM README.md"}, "Megatron-LM with overlap"),
        ({"source": "MegaScale (Megatron-LM)"}, "Megatron-LM 2023"),
        ({"source": "Llama 3 paper"}, "Meta's of Llama 3"),
        ({"source": "somebody"}, "an unknown program"),
        ({"source": "Hagemann et al. 2023 (AA-Scaling)"}, "Aleph Alpha Scaling"),
        ({"source": "Efficient Parallelization Layouts"}, "Aleph Alpha Scaling"),
        ({"source": "NeMo Megatron 22.08"}, "Megatron-LM 2022"),
        ({"source": "NeMo 2023.05"}, "Megatron-LM 2022"),
        ({"source": "NeMo framework 22.11"}, "Megatron-LM 2022"),
        ({"source": "NeMo_22.11"}, "Megatron-LM 2022"),
        ({"source": "NeMo Megatron (2022)"}, "Megatron-LM 2022"),
        ({"source": "NeMo 23.11", "precision": "fp8"}, "NeMo of 2024"),
        ({"source": "NeMo Megatron 24.05"}, "NeMo of 2024"),
        ({"source": "NeMo, 22 GPUs"}, "NeMo"),
        ({"source": "Nemotron-22B, NeMo"}, "NeMo"),
        ({"source": "Vocabulary Parallelism (Megatron-LM)"}, "Megatron-LM 2023"),
    ],
)
def test_a_program_is_told_in_words(fields: dict[str, str], name: str) -> None:
    plain = dict.fromkeys(("source", "notes", "precision", "fsdp_zero", "recompute", "provenance"), "")
    assert program_of(plain | fields).name == name


@pytest.mark.parametrize(("capped", "plain"), [("A800-80GB", "A100-80GB"), ("H800 SXM", "H100 SXM")])
def test_cards_for_export_have_slower_links(capped: str, plain: str) -> None:
    slow, fast = (cluster_of(text).levels[-1].link for text in (capped, plain))
    assert slow.bandwidth == 200e9
    assert slow.reached / fast.reached == pytest.approx(200e9 / fast.bandwidth)


@pytest.mark.parametrize(
    ("notes", "attention", "scores", "norms", "sequence_parallel"),
    [
        ("", "flash2", (9, 11), "fused", False),
        ("FlashAttention 2, fused RMSNorm", "flash2", (9, 11), "fused", False),
        ("flash_attention2 + RMS kernel, sequence_parallel", "flash2", (9, 11), "fused", True),
        ("FlashAttention 2, RMS kernel, no sequence parallelism", "flash2", (9, 11), "fused", False),
        ("flash-attn v1", "flash1", (9, 11), "eager", False),
        ("flash_attn 2 without sequence parallelism", "flash2", (9, 11), "eager", False),
        ("flash_attentionv1.0.8", "flash1", (9, 11), "eager", False),
        ("FlashAttention 1", "flash1", (9, 11), "eager", False),
        ("FlashAttention (v1)", "flash1", (9, 11), "eager", False),
        ("FlashAttention-2, not FlashAttention-1", "flash2", (9, 11), "eager", False),
        ("FlashAttention 2, unfused RMSNorm", "flash2", (9, 11), "eager", False),
        ("FlashAttention 2, norms not fused", "flash2", (9, 11), "eager", False),
        ("FlashAttention 2, fused layer norm", "flash2", (9, 11), "fused", False),
        ("softmax in fp32", "flash2", (9, 11), "fused", False),
        ("RMS kernel, sequence_parallel=False", "flash2", (9, 11), "fused", False),
        ("unfused softmax", "unfused", EAGER_SOFTMAX, "eager", False),
        ("Megatron-LM's fused softmax", "unfused", (9, 11), "eager", False),
        ("unfused attention of PyTorch", "unfused", EAGER_SOFTMAX, "eager", False),
    ],
)
def test_kernels_are_read_from_notes(
    notes: str, attention: str, scores: tuple[int, int], norms: str, sequence_parallel: bool
) -> None:
    plain = dict.fromkeys(("source", "notes", "precision", "fsdp_zero", "recompute", "provenance"), "")
    program = program_of(plain | {"source": "AA-Scaling", "notes": notes})
    best = PROGRAMS["scaling"]
    assert (program.attention, program.scores, program.sequence_parallel) == (attention, scores, sequence_parallel)
    more = EAGER_NORMS if norms == "eager" else (0, 0)
    assert (program.forward - best.forward, program.backward - best.backward) == more
    assert program.kept.stream + program.kept.gathered == best.kept.stream + (8 if norms == "eager" else 0)
    assert (program.kept.gathered > 0) == sequence_parallel
    assert program.gathers_again != sequence_parallel == program.scatters  # what is kept gathered is not gathered again


def test_attention_of_an_unknown_program_is_read_from_notes() -> None:
    plain = dict.fromkeys(("source", "notes", "precision", "fsdp_zero", "recompute", "provenance"), "")
    for notes, attention in (
        ("", "flash2"),
        ("FlashAttention 1", "flash1"),
        ("flash-attn 1.0.8", "flash1"),
        ("FlashAttention 3", "flash3"),
        ("without flash attention", "unfused"),
        ("FlashAttention not used", "unfused"),
        ("w/o FlashAttention", "unfused"),
        ("FlashAttention instead of fused softmax", "flash2"),
        ("fused softmax cross-entropy loss", "flash2"),
        ("unfused AdamW, no attention dropout", "flash2"),
    ):
        program = program_of(plain | {"source": "somebody", "notes": notes})
        assert (program.attention, program.known) == (attention, False)


def test_flags_of_megatron_are_read() -> None:
    plain = dict.fromkeys(("source", "notes", "precision", "fsdp_zero", "recompute", "provenance"), "")
    without = program_of(plain | {"source": "Megatron-LM", "notes": "--overlap-grad-reduce"})
    assert (without.attention, without.gradient, without.kept.gradient) == ("flash2", 4, 4)
    notes = "--overlap-grad-reduce --attention-backend fused --grad-reduce-in-bf16"
    program = program_of(plain | {"source": "Megatron-LM", "notes": notes})
    assert (program.attention, program.gradient, program.kept.gradient) == ("cudnn", 2, 2)


def test_weights_are_gathered_in_8_bits_unless_each_row_has_a_scale() -> None:
    plain = {"source": "torchtitan", "notes": "compile", "fsdp_zero": "zero3"}
    assert program_of({**plain, "precision": "float8"}).gathers_fp8
    assert not program_of({**plain, "precision": "float8-rowwise"}).gathers_fp8


def test_gradients_that_are_summed_in_float32_are_kept() -> None:
    plain = {"source": "BLOOM", "notes": "", "fsdp_zero": "zero1", "recompute": "full"}
    assert program_of({**plain, "precision": "bf16 + fp32 grad accum"}).kept == DEEPSPEED_FLOAT32_SUM
    assert program_of({**plain, "precision": "fp16"}).kept.gradient == 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (180_000, "2.1 days (1.8 days – 2.4 days)"),
        (7300, "2.0 hours (1.8 hours – 2.3 hours)"),
        (1100, "18.3 minutes (16.2 minutes – 20.7 minutes)"),
        (950, "950 s (841 s – 1,074 s)"),
        (7.3, "7.30 s (6.46 s – 8.25 s)"),
        (0.95, "950 ms (841 ms – 1.07 s)"),
        (0.00095, "950 µs (841 µs – 1.07 ms)"),
    ],
)
def test_an_interval_has_the_unit_of_its_middle(seconds: float, text: str) -> None:
    found = SimpleNamespace(seconds=seconds, low=seconds / 1.13, high=seconds * 1.13)
    assert step_text(cast(Prediction, found)) == text


@pytest.mark.parametrize(
    ("dollars", "text"),
    [
        (0, "$0"),
        (0.004, "under $0.01"),
        (0.014, "$0.01"),
        (12.3, "$12.30"),
        (1234.5, "$1,234"),
        (12.3e6, "$12.30 M"),
        (999.99e6, "$999.99 M"),
        (9.8765e12, "$9,876.50 B"),
    ],
)
def test_money_has_cents_where_they_matter(dollars: float, text: str) -> None:
    assert money(dollars) == text
