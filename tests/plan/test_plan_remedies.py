"""What a GPU without memory is told: every setting that is named is predicted to fit, and the others are not."""

import re

from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.plan.memory.fit import TENSOR_SHARE, peak_bytes
from megalite.plan.memory.remedies import RELIEF, out_of_memory_text

SETTINGS = (
    "model.layers=8", "model.width=512", "model.heads=8", "model.kv_heads=8", "model.ffn=1408",
    "model.vocab_size=8192", "model.sequence_length=1024", "batch.micro=8", "batch.global=32",
    "run.device=cuda", "parallel.data.mode=zero1", "train.precision=bf16",
)  # fmt: skip
WORLD = 4


def configured(*settings: str) -> Config:
    return check(load([], [*SETTINGS, *settings]), WORLD)


def named(text: str) -> list[str]:
    return re.findall(r"(\w+\.[\w.]+=\w+(?: \w+\.[\w.]+=\w+)*)", text)


def test_settings_that_are_named_fit_and_others_do_not() -> None:
    present = peak_bytes(configured())
    total = round(0.6 * present / TENSOR_SHARE)
    text = out_of_memory_text(configured(), total)
    assert re.match(r"out of memory: pipeline rank 0 needs .* largest are \w.*; one of these would fit: ", text)
    found = named(text)
    assert found[0].startswith("batch.micro=")
    micro = int(found[0].partition("=")[2])
    assert peak_bytes(configured(f"batch.micro={2 * micro}")) > TENSOR_SHARE * total, "a larger one would do"
    for setting in found:
        assert peak_bytes(configured(*setting.split())) <= TENSOR_SHARE * total
    for setting in {"parallel.data.mode=zero2", "parallel.data.mode=zero3", "optim.placement=host"} - set(found):
        assert peak_bytes(configured(setting)) > TENSOR_SHARE * total


def test_a_prediction_that_was_wrong_asks_for_less_than_before() -> None:
    """The GPU is large enough, as predicted, and yet it is full."""
    present = peak_bytes(configured())
    for setting in named(out_of_memory_text(configured(), 10 * present)):
        assert peak_bytes(configured(*setting.split())) <= RELIEF * present


def test_a_base_that_is_too_large_goes_to_the_host() -> None:
    small = ("adapter.rank=4", "batch.micro=1", "train.recompute=full", "model.sequence_length=64")
    remedy = "parallel.placement.parameters=host parallel.data.mode=zero3"
    total = round(1.01 * peak_bytes(configured(*small, *remedy.split())) / TENSOR_SHARE)
    assert remedy in named(out_of_memory_text(configured(*small), total))


def test_trained_parameters_go_to_the_host_with_their_states() -> None:
    remedy = "parallel.placement.parameters=host parallel.data.mode=zero3 optim.placement=host"
    small = ("batch.micro=1", "train.recompute=full", "train.offload_activations=true", "model.sequence_length=64")
    large = (*small, "model.vocab_size=262144", "model.width=1024")
    total = round(1.01 * peak_bytes(configured(*large, *remedy.split())) / TENSOR_SHARE)
    assert remedy in named(out_of_memory_text(configured(*large), total))


def test_nothing_fits() -> None:
    text = out_of_memory_text(configured(), 1000)
    assert text.endswith("; more ranks must share the model")
    assert named(text) == []
