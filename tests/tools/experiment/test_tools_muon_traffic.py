"""What a step sends, counted in the code that trains, is what sizes say."""

import pytest

from megalite.base.errors import InputError
from megalite.base.exit_codes import ExitCode
from megalite.config.model_schema import Model
from megalite.config.parallel_schema import DataParallel, Parallel
from megalite.config.schema import Batch, Config, Run, Train
from megalite_tools.experiment.muon_traffic import main, traffic

MODEL = Model(layers=2, width=64, heads=4, kv_heads=4, ffn=128, vocab_size=128, sequence_length=8)
MATRICES = 2 * (4 * 64 * 64 + 3 * 64 * 128)
PARAMETERS = MATRICES + 2 * 128 * 64 + 5 * 64


def config(mode: str, device: str = "cpu", precision: str = "fp32", **layout: int) -> Config:
    parallel = Parallel(**{"dp_shard": 8, **layout}, data=DataParallel(mode))
    micros = parallel.dp_replicate * parallel.dp_shard * 4
    batch, train = Batch(1, micros), Train(steps=1, precision=precision)
    return Config(Run(device=device), MODEL, parallel=parallel, batch=batch, train=train)


@pytest.mark.parametrize(
    ("mode", "device", "precision", "each", "muon"),
    [
        ("zero1", "cpu", "fp32", 4 + 4, 2 * 4 / 8),
        ("zero1", "cuda", "bf16", 2 + 4, 2 * 2 / 8),
        ("zero2", "cuda", "bf16", 2 + 4 * 4, 2 * 2 / 8),
        ("ddp", "cuda", "bf16", 2 * 4, 2),  # nothing is gathered, and all ranks receive all results
    ],
)
def test_bytes_of_a_parameter(mode: str, device: str, precision: str, each: float, muon: float) -> None:
    """In a step of four micro-batches. What else is reduced, the signs of a step, is a few numbers."""
    adamw, mean, most = traffic(config(mode, device, precision))
    assert adamw == pytest.approx(7 / 8 * each * PARAMETERS, rel=1e-3)
    assert mean - adamw == pytest.approx(7 / 8 * muon * MATRICES, rel=1e-3)
    assert mean <= most


def test_zero3_gathers_layers_again_in_every_micro_batch() -> None:
    zero2, zero3 = (traffic(config(mode))[0] for mode in ("zero2", "zero3"))
    assert zero3 - zero2 > 7 / 8 * 4 * 6 * MATRICES


def test_other_axes_are_refused() -> None:
    with pytest.raises(InputError, match="with pp, tp and cp of 1"):
        traffic(config("zero1", tp=2))


def test_sizes_have_to_be_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parallel.dp_shard=auto"]) == ExitCode.BAD_INPUT
    assert "have to be numbers" in capsys.readouterr().err


def test_a_table_has_a_row_for_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["model.layers=1", "model.width=32", "model.heads=4", "model.ffn=32", "model.sequence_length=8"]
    shared = ["parallel.dp_shard=2", "batch.micro=1", "run.device=cpu", "train.precision=fp32"]
    assert main([*small, *shared, "--modes", "zero1", "zero3", "--micros", "1", "2"]) == 0
    rows = [line.split(" | ")[:2] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [["| zero1", "1"], ["| zero1", "2"], ["| zero3", "1"], ["| zero3", "2"]]
