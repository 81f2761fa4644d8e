import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest
from frozen_roles import ENDS, frozen

from megalite.base import terminal
from megalite.base.errors import InputError
from megalite.commands.main import main
from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.cost.order_costs import costing_of
from megalite.plan import pipeline
from megalite.plan.parts import roles
from megalite.plan.pipeline import table_of
from megalite.schedule.file import read
from megalite.schedule.generate import build

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs/run/quickstart.yaml")
LLAMA3_8B = str(ROOT / "configs/model/llama3_8b.yaml")

Show = Callable[..., str]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    def run(*arguments: str) -> str:
        assert main(["show", *arguments]) == 0
        return capsys.readouterr().out

    return run


def row(output: str, first: str) -> list[str]:
    """The cells of the table row that begins with `first`."""
    (line,) = [line for line in output.splitlines() if line.split()[:1] == [first]]
    return re.split(r"\s{2,}", line.strip())[1:]


def test_the_configuration_shown_is_the_resolved_one(show: Show, tmp_path: Path) -> None:
    overrides = ["parallel.dp_shard=auto", "batch.global=128", "optim.lr=0.5", "run.name='[bold]'"]
    output = show(QUICKSTART, "--world-size", "16", *overrides)
    path = tmp_path / "shown.yaml"
    path.write_text(output.partition("Configuration\n")[2].partition("\nLayout: ")[0])
    expected = check(load([QUICKSTART], overrides), 16)
    assert load([str(path)]) == expected
    assert expected.run.name == "[bold]"


def test_the_mesh_has_sizes_strides_and_groups(show: Show) -> None:
    output = show(LLAMA3_8B, "parallel.pp=4", "parallel.tp=4", "--world-size", "512", "batch.global=32")
    assert "\nLayout: pp 4 · dp_shard 32 · tp 4\n" in output
    assert row(output, "pp") == ["4", "128", "0, 128, 256, 384"]
    assert row(output, "dp_shard") == ["32", "4", "0, 4, 8, 12, ..., 124"]
    assert row(output, "tp") == ["4", "1", "0, 1, 2, 3"]
    assert row(output, "cp") == ["1", "4", "0"]
    assert row(output, "ranks") == ["512", "0-511"]


def test_parameters_by_component_and_stage(show: Show) -> None:
    output = show(LLAMA3_8B, "parallel.pp=4", "parallel.tp=2")
    assert row(output, "mlp") == ["5,637,144,576", "176,160,768", "70.2%"]
    assert row(output, "total") == ["8,030,261,248", "218,112,000", "100.0%"]
    assert row(output, "0") == ["0-1", "0-7", "embedding", "2,270,232,576", "0.89"]
    assert row(output, "1") == ["2-3", "8-16", "1,963,008,000", "1.00"]
    assert row(output, "3") == ["6-7", "26-31", "final norm, head", "1,834,012,672", "0.90"]


def test_collectives_that_are_to_be_fused_are_told_of(show: Show) -> None:
    asked = LLAMA3_8B, "parallel.tp=2", "parallel.tensor.overlap=auto"
    assert "Collectives of tensor parallelism are fused with matrix products" in show(*asked)
    on_cpu = show(*asked, "run.device=cpu")
    assert "as with parallel.tensor.overlap = pieces, since a CPU has no symmetric memory." in " ".join(on_cpu.split())
    assert "Tensor parallelism\n" not in show(*asked[:2])


def test_states_in_files_are_told_of(show: Show) -> None:
    files = show(LLAMA3_8B, "--world-size", "8", "optim.placement=/mnt/nvme", "batch.micro=1")
    assert "Optimizer states in files" in files
    assert "15.0 GiB in /mnt/nvme for a rank, 120 GiB on a node of 8" in files
    assert "one assumed drive" in files
    assert "in files" not in show(LLAMA3_8B, "--world-size", "8", "batch.micro=1")


def test_trained_parameters_are_shown_apart(show: Show) -> None:
    sizes = ["model.layers=4", "model.width=32", "model.heads=4", "model.ffn=64", "model.vocab_size=512"]
    assert "trained" not in show(*sizes)
    with frozen(ENDS | {roles.QUERY}):
        output = show(*sizes)
    assert row(output, "embedding")[:2] == [f"{512 * 32:,}", "0"]
    total, trained = (int(cell.replace(",", "")) for cell in row(output, "total")[:2])
    assert total - trained == 4 * 32 * 32 + 2 * 512 * 32 + 32
    weights = 4 * (4 * 32 * 32 + 3 * 32 * 64) + 512 * 32
    assert row(output, "full") == [f"{6 * weights - 2 * (4 * 32 * 32 + 512 * 32) + 4 * 12 * 32 * 256:,}"]
    assert ", 4 · those that are not trained, +" in output


def test_active_parameters_are_shown_beside_all(show: Show) -> None:
    assert " active " not in show(LLAMA3_8B)
    output = show("qwen3_30b_a3b", "model.experts.first_dense=1")
    dense, experts, router = 3 * 2048 * 6144, 3 * 2048 * 768, 128 * 2048
    whole, active = (dense + 47 * (count * experts + router) for count in (128, 8))
    assert row(output, "mlp")[:3] == [f"{whole:,}", f"{active:,}", f"{128 * experts + router:,}"]
    others = 2 * 151936 * 2048 + 48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 2048 + 2 * 128) + 2048
    assert row(output, "total")[:2] == [f"{others + whole:,}", f"{others + active:,}"]
    assert "6 · active weights of matrices, with the head, without the embedding" in output


def test_experts_that_routers_do_not_choose_are_told(show: Show) -> None:
    assert "\nExperts\nmodel.experts.force_balance: tokens take" in show("tiny_moe", "model.experts.force_balance=true")


def test_factors_of_a_parametrization_by_parameter(show: Show) -> None:
    assert "Parametrization" not in show()
    overrides = ["model.parametrization=completep", "model.base={width: 32, layers: 2, head_width: 16}"]
    told = " ".join(show(*overrides, "model.qkv_bias=true", "model.qk_norm=true").split())
    assert "Parametrization: completep, 4× as wide as the base of 32, and 2× as deep as its 2 layers" in told
    assert "embedding and head 0.02 0.0003 0.1 2.5e-09" in told
    assert "q, k, v, o, gate, up and down 0.01 7.5e-05 0.4 1.25e-09" in told
    assert "biases all 0 0.0003 0 1.25e-09" in told
    assert "the final norm all 1 0.0003 0 2.5e-09" in told
    assert (
        "The embedding's output is multiplied by 1, scores by 0.125, what attention and MLP add to the residual stream "
        "by 0.5, and logits by 0.25."
    ) in told
    told = " ".join(show(*overrides, "optim.name=muon", "model.parametrization=mup").split())
    assert "q, k, v, gate and up 0.01 0.00015 0.2 Muon" in told
    assert "o and down 0.003536 0.00015 0.2 Muon" in told
    assert "Parametrization: standard" in show("model.logits_multiplier=2")


def test_stages_of_an_explicit_split_may_have_no_layers(show: Show) -> None:
    output = show("parallel.pp=3", "parallel.pipeline.split=[0, 3, 1]")
    assert row(output, "0")[:3] == ["0", "none", "embedding"]
    assert row(output, "1")[:2] == ["1", "0-2"]
    assert row(output, "2")[:3] == ["2", "3", "final norm, head"]


def test_a_tied_head_is_marked(show: Show) -> None:
    assert "head (the embedding's weight)" in show(str(ROOT / "configs/model/tiny_tied.yaml"))
    assert "head (the embedding's weight)" not in show(QUICKSTART)


def test_flops_come_with_their_convention(show: Show) -> None:
    output = show(LLAMA3_8B)
    assert row(output, "causal") == ["51,470,401,536"]
    assert row(output, "full") == ["57,912,852,480"]
    counted = "6 · weights of matrices, with the head, without the embedding"
    assert f"\n{counted}, + 6 (causal) or 12 (full) · layers · q · s\n" in output
    assert "6 · weights of matrices, with the head 3 times," in show(LLAMA3_8B, "model.mtp.depth=2")


def test_flops_of_windows_come_with_their_own(show: Show) -> None:
    sizes = ["model.layers=4", "model.width=32", "model.heads=4", "model.ffn=64", "model.vocab_size=512"]
    windows = ["model.sequence_length=48", "model.attention.window=16", "model.attention.full_every=2"]
    output = show(*sizes, "model.kv_heads=2", *windows)
    weights = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64) + 512 * 32
    assert row(output, "full") == [f"{6 * weights + 2 * 12 * 32 * 48 + 2 * 12 * 32 * 16:,}"]
    assert row(output, "causal") == [f"{6 * weights + 2 * 6 * 32 * 48 + 2 * 3 * (4 * 32 * 16 * 80 // 96):,}"]
    assert "in layers with a window of n tokens, 12 · q · n (full) or 12 · q · (n − n² / 2s) (causal)" in output


def test_auto_without_a_world_is_told(show: Show) -> None:
    assert "with dp_shard: auto as 1 (see --world-size)" in show()
    assert "with dp_shard: auto" not in show("--world-size", "2")
    assert "with dp_shard: auto" not in show("parallel.dp_shard=1")


def test_the_batch_in_tokens(show: Show) -> None:
    output = show("parallel.dp_shard=2", "batch.global=24", "batch.micro=3", "train.steps=10")
    assert "24 sequences of 256 tokens make 6,144 tokens a step, as 4 micro-batches of 3 on 2 data" in output
    assert "10 steps see 61,440 tokens." in output
    assert "grow" not in output


def test_one_of_something_is_one(show: Show) -> None:
    output = show("batch.global=1", "train.steps=1")
    assert "1 sequence of 256 tokens make" in output
    assert "as 1 micro-batch of 1 on 1 data-parallel rank.\n1 step sees 256 tokens." in output


def test_graphs_are_told(show: Show) -> None:
    assert "the host launches each micro-batch by one call, as a CUDA graph" in show("train.cuda_graph=true")
    assert "CUDA graph" not in show()
    assert "CUDA graph" not in show("train.cuda_graph=true", "train.steps=1")


def test_the_bubble_is_told(show: Show) -> None:
    assert "The bubble of 1f1b is 27.3% of a step" in show("parallel.pp=4", "batch.global=8")
    assert "bubble" not in show()


def test_the_bubble_of_a_searched_order_is_that_of_the_times_it_is_searched_for(show: Show) -> None:
    auto = ("parallel.pp=4", "batch.global=8", "parallel.pipeline.schedule=auto")
    by_flops = "where stages take the time of their FLOPs, and a rank may hold as many activations as the fullest one"
    assert f"of a step, {by_flops} of 1f1b. Of the named schedules" in show(*auto)
    named, asked = show(*auto, "run.cluster=l40s"), show(*auto, "--cluster", "l40s")
    for output in (named, asked):
        (told,) = (line for line in output.splitlines() if line.startswith("The bubble of auto is "))
        assert "of a step, where stages take the time that is predicted on l40s, and a rank may hold the " in told
        assert "activations that its GPU has room for. Of the named schedules" in told
    assert "cluster: l40s" in named
    assert "cluster: null" in asked, "the configuration is shown as it is given"
    assert named.partition("\nFLOPs per")[2] == asked.partition("\nFLOPs per")[2]


def test_equal_stages_of_many_are_one_row(show: Show) -> None:
    output = show(str(ROOT / "configs/run/llama3_405b_16384gpu.yaml"), "--world-size", "16384")
    assert row(output, "0") == ["0-1023", "0", "embedding", "5,289,050,112", "0.50"]
    assert row(output, "1-62") == ["0-16383", "1-124 (2 each)", "6,375,407,616", "1.00"]
    assert row(output, "63") == ["15360-16383", "125", "final norm, head", "5,289,066,496", "0.82"]


def test_a_model_that_does_not_fit_is_told(show: Show) -> None:
    fits = "fits a GPU of 80 GiB, of which tensors may take 72 GiB; no size is configured, so this one is assumed."
    assert fits in show(str(ROOT / "configs/run/llama3_8b_64gpu.yaml"), "--world-size", "64")
    output = show(str(ROOT / "configs/run/llama3_8b_64gpu.yaml"), "--world-size", "64", "batch.micro=4")
    assert "102 GiB at the peak of a step: does not " + fits.replace("fits", "fit") in output
    assert "To need less: train.recompute" in output
    assert "assumed" not in show(QUICKSTART)
    assert "fits the 100 GiB of batch.memory" in show("batch.micro=auto", "batch.memory=100")


def test_growing_batches_in_tokens(show: Show) -> None:
    output = show(
        "batch.global=24",
        "train.steps=10",
        "batch.rampup={start: 8, tokens: 6144}",
        "batch.curriculum={start: 32, tokens: 9000}",
    )
    assert "The batch grows over the first 6,144 tokens: 8 → 16 → 24 sequences." in output
    assert "Sequences grow over the first 9,000 tokens, from 32 to 256 tokens." in output
    assert f"10 steps see {256 * (2 * 8 + 16 + 7 * 24):,} tokens." in output


def test_an_automatic_micro_batch_is_shown_as_what_it_becomes(show: Show) -> None:
    output = show("batch.micro=auto", "batch.memory=100", "batch.global=24", "parallel.pp=2")
    assert "  micro: 12\n" in output
    assert "as 2 micro-batches of 12 on 1 data" in output


def test_an_automatic_micro_batch_without_a_limit_is_left_to_the_gpu(
    show: Show, capsys: pytest.CaptureFixture[str]
) -> None:
    output = show("batch.micro=auto", "run.device=cuda", "batch.global=24", "parallel.pp=2")
    assert "  micro: auto\n" in output
    assert "as micro-batches as large as fit the GPU on 1 data" in output
    assert main(["show", "batch.micro=auto", "--memory"]) == 2
    assert "batch.memory = null: is needed to fit batch.micro = auto" in capsys.readouterr().err


def test_one_thing_is_shown_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["show", "--schedule", "--memory"])
    assert ended.value.code == 2
    assert "argument --memory: not allowed with argument --schedule" in capsys.readouterr().err


def test_a_pipe_gets_plain_whole_lines(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    path = "/".join(["long folder"] * 40)
    output = show(LLAMA3_8B, f"data.train=[{{path: {path}}}]", "parallel.pp=4")
    assert "\x1b" not in output
    assert "…" not in output
    assert row(output, "3")[-1] == "0.90"
    assert any(line.startswith("6 · weights") and line.endswith("layers · q · s") for line in output.splitlines())


def test_a_bad_configuration_is_told_on_stderr_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "model.heads=6", "model.laers=2"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("megalite: error: 1 problem in the configuration\n  model.laers: unknown key")
    assert main(["show", "parallel.dp_shard=8", "--world-size", "4"]) == 2
    assert "the layout makes 8 ranks, but the job has 4" in capsys.readouterr().err


SCHEDULE = ("parallel.pp=4", "batch.global=8")


def test_the_timeline_of_the_schedule(show: Show) -> None:
    output = show(*SCHEDULE, "--schedule").splitlines()
    assert output[0] == ("1f1b: p = 4 ranks, v = 1 stage per rank, m = 8 micro-batches, bubble 27.3%, makespan 33")
    assert output[4].startswith("rank 3 ·········F0 B0    F1 B1    F2")
    assert output[1].endswith(" bubble 27.3%, peak 4")
    assert "Parameters" not in "".join(output)
    assert show(*SCHEDULE, "parallel.pipeline.schedule=gpipe", "--schedule").startswith("gpipe: ")


def test_the_schedule_is_drawn_or_written_to_a_file(show: Show, tmp_path: Path) -> None:
    svg, yaml = tmp_path / "out.svg", tmp_path / "out.yaml"
    show(*SCHEDULE, "--schedule", str(svg))
    assert "bubble 27.3%" in svg.read_text()
    show(*SCHEDULE, "--schedule", str(yaml))
    assert build(str(yaml), 4, 8) == build("1f1b", 4, 8)
    assert sorted(tmp_path.iterdir()) == [svg, yaml]


def test_the_file_of_a_searched_order_has_the_times_of_the_cluster(show: Show, tmp_path: Path) -> None:
    yaml, overrides = tmp_path / "out.yaml", [*SCHEDULE, "parallel.pipeline.schedule=auto", "run.cluster=l40s"]
    show(*overrides, "--schedule", str(yaml))
    config = check(load([], overrides))
    table = table_of(config, None, costing_of(config))
    assert (read(yaml).orders, read(yaml).times) == (table.orders, table.times)


def test_a_config_is_not_overwritten(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: {layers: 2}\n")
    assert main(["show", "--schedule", str(config)]) == 2
    assert "there is such a file already; CONFIG goes before --schedule" in capsys.readouterr().err
    assert config.read_text() == "model: {layers: 2}\n"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("out.png", "--schedule out.png: must end in .svg for a picture or .yaml for a schedule file; CONFIG goes"),
        (f"{QUICKSTART}/out.svg", "out.svg: cannot be written: File exists"),
    ],
)
def test_a_schedule_that_cannot_be_written(file: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *SCHEDULE, "--schedule", file]) == 2
    assert message in capsys.readouterr().err


LONG = [str(ROOT / "configs/run/llama3_405b_16384gpu.yaml")]


def test_what_is_shown_unasked_needs_no_long_schedule(show: Show) -> None:
    """778,240 actions: to make the table takes many seconds."""
    with patch.object(pipeline, "build", side_effect=AssertionError("a table was made")):
        output = show(*LONG, "batch.global=1024", "parallel.pipeline.virtual_stages=7")
    assert "The bubble of interleaved_1f1b is 0.2% of a step" in output
    assert "Not predicted here: along a schedule of " in output


def test_what_takes_long_is_said_before(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(pipeline, "build", side_effect=InputError("no table")):
        assert main(["show", *LONG, "--schedule"]) == 2
        told = capsys.readouterr().err
        assert "megalite: a pipeline schedule of 778,240 actions takes a while" in told
        assert "parallel.dp_shard = auto is 1 without --world-size N" in told
        assert main(["show", *LONG, "--schedule", "parallel.dp_shard=1"]) == 2
        assert "--world-size" not in capsys.readouterr().err
        assert main(["show", *LONG, "--schedule", "--world-size=16384"]) == 2
        assert "takes a while" not in capsys.readouterr().err


def test_sections_are_apart(show: Show) -> None:
    for arguments in ([], ["--memory", "parallel.pp=2"]):
        lines = show(*arguments).splitlines()
        for heading in ("Parameters", "Batch", "Does it fit?", "Conventions"):
            if heading in lines:
                assert lines[lines.index(heading) - 1].strip() == ""
                assert lines[lines.index(heading) - 2].strip() != ""


def test_tables_fit_80_columns(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "UNBOUNDED_WIDTH", 80)
    output = show(LLAMA3_8B, "--memory", "parallel.pp=2") + show(LLAMA3_8B, "parallel.pp=2")
    assert max(map(len, output.splitlines())) <= 80
    assert "…" not in output
    assert "\nSums of live tensors at the peak of a training step, optimizer states included. \nNot counted" in output


def test_a_folder_of_weights_means_a_configuration(show: Show, tmp_path: Path) -> None:
    """What `--write` saves is loaded as the model that is shown, with its overrides."""
    fields = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    fields |= {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 96, "vocab_size": 99, "rope_theta": 5e5}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    path = tmp_path / "model.yaml"
    measured = show(f"hf:{tmp_path}", "model.sequence_length=32", "--memory", "--measure")
    assert re.search(r"^total +[\d.,]+ +100.0% +[\d.,]+ ", measured, flags=re.MULTILINE)
    output = show(f"hf:{tmp_path}", "model.sequence_length=32", "--write", str(path))
    model = load([str(path)]).model
    assert (model.layers, model.qk_norm, model.head_width, model.sequence_length) == (2, True, 8, 32)
    assert "rope_theta: 500000.0" in output
    for arguments, told in (
        ([f"hf:{tmp_path}", "--write", str(path)], "there is such a file already"),
        ([f"hf:{tmp_path}", "--write", str(tmp_path / "model.txt")], "must end in .yaml"),
        ([f"hf:{tmp_path}", f"hf:{tmp_path}"], "have a model each; name one of them"),
        ([f"hf:{tmp_path}/none"], "there is no folder"),
        ([f"hf:{tmp_path}", "parallel.pp=9", "--write", str(tmp_path / "other.yaml")], "parallel.pp = 9: makes 9"),
        (["--schedule", "parallel.pipeline.schedule=mine.yaml"], "is no file; KEY=VALUE goes before --schedule"),
    ):
        with patch("sys.stderr", StringIO()) as errors:
            assert main(["show", *arguments]) == 2
        assert told in errors.getvalue()
