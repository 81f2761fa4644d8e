"""`megalite plan`: what it shows, what it writes, and what it refuses."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.status import Status

from megalite.commands.main import main
from megalite.commands.plan.amounts import amount
from megalite.commands.plan.request import Asked
from megalite.commands.plan.tables import layout_text
from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.cost.layout_choice import Choice
from megalite.plan.memory.fit import peak_bytes
from megalite.schedule.file import write
from megalite.schedule.generate import build

MODEL = "configs/model/llama3.2_1b.yaml"
TINY = "configs/model/tiny.yaml"
SMALL = [MODEL, "batch.global=16", "parallel.pp=1"]  # few layouts
Run = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command with these arguments, which are bad; the answer is its message."""

    def run(*arguments: str) -> str:
        try:
            code = main(["plan", *arguments])
        except SystemExit as exit_of_argparse:
            code = exit_of_argparse.code  # type: ignore[assignment]
        captured = capsys.readouterr()
        assert (code, captured.out) == (2, "")
        assert "Traceback" not in captured.err
        assert captured.err.count("error:") == 1
        return captured.err.partition("error:")[2]

    return run


def seconds(output: str) -> list[float]:
    """The times of steps in a ranking."""
    found = re.findall(r"  ([\d.]+) (m?s) \(", output)
    return [float(value) * (1e-3 if unit == "ms" else 1) for value, unit in found]


def test_layouts_are_ranked_by_time(plan: Run) -> None:
    output = plan(*SMALL, "--gpus", "8", "--top", "4")
    times = seconds(output)
    assert len(times) == 4
    assert times == sorted(times)
    assert " on 8 × NVIDIA H100" in output


def test_what_is_pinned_stays(plan: Run) -> None:
    output = plan(*SMALL, "parallel.cp=1", "parallel.tp=4", "parallel.data.mode=zero2", "batch.micro=2", "--gpus", "8")
    layouts = re.findall(r"^\d +(\S.*?)  ", output, flags=re.MULTILINE)
    assert layouts
    assert all("tp 4" in layout and "zero2" in layout and "micro 2" in layout for layout in layouts)


def test_an_explanation_adds_up(plan: Run) -> None:
    output = plan(*SMALL, "--gpus", "8", "--explain")
    rows = output.partition("Where a step's time goes")[2].partition("step ")[0]
    shares = [float(share) for share in re.findall(r"([\d.]+)%", rows)]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert "Single changes that would help most" in output


def test_an_explanation_has_the_wait_for_the_slowest_gpu(plan: Run, tmp_path: Path) -> None:
    text = Path("configs/cluster/h100_sxm.yaml").read_text().replace("gpu:\n", "gpu:\n  spread: 0.04\n", 1)
    (tmp_path / "ours.yaml").write_text(text)
    arguments = (*SMALL, "--gpus", "8", "--top", "1", "--explain")
    told = plan(*arguments, "--cluster", str(tmp_path / "ours.yaml"), "--html", str(tmp_path / "plan.html"))
    assert re.search(r"waiting for the slowest GPU +[\d.]+ +3\.9%", told)  # 1.43 · (4 % - 1.1 %), over the sum
    assert "waiting for the slowest GPU" in (tmp_path / "plan.html").read_text()
    assert "slowest GPU" not in plan(*arguments)


@pytest.mark.parametrize("options", [["--explain"], ["--as-is", "batch.micro=2"], ["--compare", TINY, "batch.micro=2"]])
def test_tiny_models_have_digits_in_units_of_their_own(plan: Run, tmp_path: Path, options: list[str]) -> None:
    page = tmp_path / "plan.html"
    told = plan(TINY, "batch.global=16", "--gpus", "2", "--tokens", "10M", "--html", str(page), *options)
    for text in (told, page.read_text()):
        assert " MiB" in text
        assert re.search(r"\b0\.0+ (GiB|MiB|days|hours|minutes|s)\b|\$0\.00", text) is None


def test_a_run_has_the_unit_of_the_longest(plan: Run) -> None:
    told = plan(TINY, "batch.global=16", "--gpus", "1-4", "--tokens", "2B")
    assert "  minutes  GPU-hours " in told
    assert re.search(r" micro 16 .* 28\.\d \([^)]*\) +0\.4[78]\d +\$1\.9\d \(", told)


def test_the_whole_run_is_told_with_its_tokens(plan: Run) -> None:
    output = plan(*SMALL, "--gpus", "8", "--tokens", "1T", "--top", "1")
    rate = float(re.search(r"\)\s+([\d,]+)", output)[1].replace(",", ""))  # type: ignore[index]
    days = float(re.search(r"([\d,.]+) \([^)]*\)\s+[\d,]+\s+\$", output)[1].replace(",", ""))  # type: ignore[index]
    assert days == pytest.approx(1e12 / rate / 8 / 86_400, rel=0.01)


def test_a_range_tells_the_cheapest_that_keeps_the_limits(plan: Run) -> None:
    arguments = [*SMALL, "--gpus", "2-8", "--tokens", "100B"]
    free = plan(*arguments)
    days = [float(found) for found in re.findall(r"([\d.]+) \([^)]*\)\s+[\d,]+\s+\$", free)]
    assert len(days) == 3
    assert days == sorted(days, reverse=True)
    limited = plan(*arguments, "--days", str((days[0] + days[1]) / 2))
    assert "too late" in limited
    assert "The cheapest that keeps the limits: 4 GPUs," in limited
    assert "No number of GPUs here keeps the limits" in plan(*arguments, "--budget", "1")


def test_a_range_tells_which_of_its_layouts_is_written(plan: Run, tmp_path: Path) -> None:
    path = tmp_path / "best.yaml"
    output = plan(*SMALL, "--gpus", "2-4", "--tokens", "100B", "--days", "1e5", "--write", str(path))
    (gpus,) = re.findall(r"the limits: ([\d,]+) GPU", output)
    assert f"{path}: the layout for {gpus} GPUs" in output
    assert f"planned for {gpus} ×" in path.read_text()


def test_configurations_are_compared_with_the_first(plan: Run, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    narrower = Path(MODEL).read_text().replace("layers: 16", "layers: 8")
    assert narrower != Path(MODEL).read_text()
    other.write_text(narrower)
    output = plan(MODEL, str(other), "--compare", "--gpus", "4")
    ratio = float(re.search(r"tokens/s/GPU.*\(([\d.]+)×\)", output)[1])  # type: ignore[index]
    assert 1.2 < ratio < 2


def test_what_is_written_is_the_best_layout_and_loads(plan: Run, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "best.yaml"
    output = plan(*SMALL, "--gpus", "8", "--write", str(path))
    config = check(load([str(path)], ["run.device=cuda"]), 8)
    assert config.parallel.layout.world_size == 8
    again = plan(str(path), "--as-is", "--gpus", "8")
    assert seconds(again)[0] == seconds(output)[0]


def test_a_pinned_split_has_a_stage_for_each_entry(plan: Run) -> None:
    output = plan(MODEL, "batch.global=16", "parallel.pipeline.split=[9, 7]", "--gpus", "4")
    layouts = re.findall(r"^\d +(\S.*?)  ", output, flags=re.MULTILINE)
    assert layouts
    assert all("pp 2 " in layout for layout in layouts)


def test_layers_are_moved_where_the_default_split_does_not_fit(plan: Run, tmp_path: Path) -> None:
    path, pins = tmp_path / "best.yaml", ["parallel.pp=4", "parallel.pipeline.schedule=1f1b", "parallel.tp=1"]
    pins += ["parallel.cp=1", "batch.micro=1", "train.recompute=none"]
    asked = [MODEL, "batch.global=16", *pins, "--gpus", "4"]
    output = plan(*asked, "--max-memory", "18", "--explain", "--write", str(path))
    told = re.search(r"pp 4 1f1b layers (.*?) · micro 1", output)
    assert told
    config = check(load([str(path)], ["run.device=cuda"]), 4)
    split = config.parallel.pipeline.split
    assert split is not None
    assert told[1].replace("×", "") == " ".join(map(str, split))
    assert f"parallel.pipeline.split={split}: " in output
    assert "and it does not fit" in output
    default = plan(*asked, "--as-is")
    assert "does not fit" in plan(*asked, "--as-is", "--max-memory", "18")
    assert seconds(default)[0] != seconds(output)[0]
    assert seconds(plan(str(path), "--as-is", "--gpus", "4"))[0] == seconds(output)[0]


def test_graphs_of_a_layout_are_planned_as_it_is_and_refused_by_a_search(plan: Run, refused: Run) -> None:
    asked = (TINY, "train.cuda_graph=true", "parallel.tp=2", "--gpus", "2")
    own, compared = plan(*asked, "--as-is"), plan(*asked, TINY, "--compare")
    assert seconds(own) < seconds(plan(*asked, "--as-is", "train.cuda_graph=false"))
    assert "tp 2" in compared
    assert "this is a search for a layout; use false, or megalite plan --as-is" in refused(*asked)
    assert "the layout has 2" in refused(TINY, "train.cuda_graph=true", "--gpus", "2", "--as-is")


def test_a_layout_tells_its_data_mode_where_ranks_share_states() -> None:
    alone = Choice(1, 1, 1, "ring", 2, 1, "none", "1f1b", None, 1, 1, "zero2", False, "device")
    assert "zero2" not in layout_text(alone)
    assert "zero2" in layout_text(alone._replace(cp=2))
    assert "zero2" in layout_text(alone._replace(shards=2))
    assert "1f1b layers 7 9×2 7 ·" in layout_text(alone._replace(pp=4, split=(7, 9, 9, 7)))


def test_ranks_that_share_out_experts_are_searched_told_and_written(plan: Run, tmp_path: Path) -> None:
    path, model = tmp_path / "best.yaml", "configs/model/mixtral_8x7b.yaml"
    few = ["batch.global=16", "batch.micro=1", "model.layers=8", "model.sequence_length=4096", "--gpus", "8"]
    output = plan(model, *few, "--write", str(path), "--explain")
    (row,) = re.findall(r"^1  (.*?)  ", output, re.MULTILINE)
    ep = load([str(path)]).parallel.ep
    assert ep > 1
    assert f"ep {ep} " in f"{row} "
    assert "If all tokens choose the experts of one rank" in output
    assert "Experts are taken to be chosen equally often" in output
    alone = plan(model, *few, "parallel.ep=1", "--explain")
    assert " ep " not in alone
    assert "parallel.ep=2 " in alone, "a single change that helps"


def test_passes_in_turns_are_told(plan: Run, tmp_path: Path) -> None:
    keys = ["parallel.ep=4", "parallel.pp=2", "batch.global=32", "model.layers=8", "batch.micro=1"]
    asked = (
        "qwen3_30b_a3b",
        *keys,
        "--gpus",
        "8",
        "--as-is",
        "--cluster",
        "l40s",
        "parallel.pipeline.schedule=dualpipev",
    )
    page = tmp_path / "plan.html"
    turns = plan(*asked, "--explain", "--html", str(page))
    told = re.search(
        r"take turns: .* take [\d.]+ m?s so on pipeline rank \d, and [\d.]+ m?s one after the other",
        re.sub(r"\s+", " ", turns),
    )
    assert told is not None
    assert told.group(0) in page.read_text(encoding="utf-8").replace("&#x27;", "'")
    alone = plan(*asked, "--explain", "parallel.pipeline.overlap=false")
    assert "turns" not in alone
    assert seconds(turns)[0] < seconds(alone)[0]


def test_natural_routing_is_slower_and_told(plan: Run) -> None:
    few = ["mixtral_8x7b", "batch.global=16", "batch.micro=1", "model.layers=8", "parallel.ep=8", "--gpus", "8"]
    equal, unequal = (seconds(output := plan(*few, *options)) for options in ((), ("--routing", "natural")))
    assert 1.3 < unequal[0] / equal[0] < 2
    assert "the busiest of the ranks that share them out has 2 times the mean rows" in re.sub(r"\s+", " ", output)
    alone = [*few[:-3], "parallel.ep=1", *few[-2:]]
    natural = seconds(plan(*alone, "--routing", "natural"))
    assert seconds(output := plan(*alone, "model.experts.force_balance=true")) == natural
    assert "chosen equally often, by model.experts.force_balance" in re.sub(r"\s+", " ", output)


def test_what_another_run_has_written_meanwhile_stays(
    refused: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, searched = tmp_path / "best.yaml", Asked.search

    def slow(*arguments: object, **options: object) -> object:
        path.write_text("of another run")
        return searched(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Asked, "search", slow)
    assert "there is such a file already" in refused(*SMALL, "--gpus", "8", "--write", str(path))
    assert path.read_text() == "of another run"


BAD = [
    ([*SMALL], "--gpus: is needed"),
    ([*SMALL, "--gpus", "0"], "--gpus"),
    ([*SMALL, "--gpus", "8-2"], "--gpus"),
    ([*SMALL, "--gpus", "8", "--max-memory", "nan"], "--max-memory"),
    ([*SMALL, "--gpus", "8", "--tokens", "-1"], "--tokens"),
    ([*SMALL, "--gpus", "8", "--top", "0"], "--top"),
    ([*SMALL, "--gpus", "8", "--cluster", "nowhere"], "is no file, and no cluster that megalite comes with"),
    ([*SMALL, "--gpus", "8", "--cluster", "nowhere.yaml"], "nowhere.yaml"),
    ([*SMALL, "--gpus", "8", "--write", "best.txt"], "must end in .yaml"),
    ([*SMALL, "--gpus", "8", "--write", MODEL], "there is such a file already"),
    ([*SMALL, "--gpus", "8", "--schedule", "a.yaml", "--write", "a.yaml"], "cannot both be a.yaml"),
    ([*SMALL, "--gpus", "8", "--max-memory", "1"], "no layout fits into the 1.00 GiB"),
    ([*SMALL, "--gpus", "32,"], "several, as in 32,48,64, or a range from few to many"),
    ([*SMALL, "--gpus", "8", "parallel.pipeline.schedule=zbh1"], "is not a schedule; use gpipe, 1f1b"),
    ([MODEL, "--gpus", "4", "parallel.pipeline.split=[9, 0, 5, 2]"], "only the first stage, which has the embedding"),
    ([MODEL, "--gpus", "4", "parallel.pipeline.split=[17, -1]"], "split = [17, -1]: only the first stage"),
    ([*SMALL, "--gpus", "8", "train.recompute=budget"], "recompute_budget = null: is needed for train.recompute ="),
    ([*SMALL, "--gpus", "8", "parallel.pipeline.memory=1"], "has no meaning with parallel.pipeline.schedule = 1f1b"),
    ([MODEL, "--gpus", "16", "parallel.tp=16"], "no layout is possible with parallel.tp = 16:"),
    ([MODEL, "--gpus", "8", "parallel.dp_shard=3"], "no layout is possible with parallel.dp_shard = 3:"),
    (  # a schedule that no micro-batch has the stages for
        [
            TINY,
            "model.layers=2",
            "parallel.pp=2",
            "parallel.pipeline.schedule=zbv",
            "--gpus",
            "4",
            "--max-memory",
            "0.1",
        ],
        "no layout is possible with parallel.pp = 2, parallel.pipeline.schedule",
    ),
    (
        [TINY, "parallel.pp=2", "parallel.pipeline.schedule=auto", "parallel.pipeline.memory=1e-6", "--gpus", "2"],
        "no layout can run: parallel.pipeline.memory = 1e-06: is less than the",
    ),
    ([*SMALL, "--gpus", "8", "--max-memory", "80GiB"], "must be a number of GiB"),
    ([MODEL, "batch.global=16", "parallel.tp=3", "--gpus", "8"], "no layout is possible with parallel.tp = 3:"),
    (  # recompute has no part in it
        [MODEL, "batch.global=16", "parallel.tp=4", "train.recompute=full", "parallel.pp=4", "--gpus", "8"],
        "no layout is possible with parallel.tp = 4, parallel.pp = 4:",
    ),
    (
        [*SMALL, "parallel.pipeline.schedule=1f1b", "parallel.pipeline.virtual_stages=2", "--gpus", "8"],
        'parallel.pipeline.schedule = "1f1b", parallel.pipeline.virtual_stages = 2:',
    ),
    ([*SMALL, "parallel.pipeline.split=[8, 8]", "--gpus", "8"], "parallel.pipeline.split = [8, 8]"),
    (  # the schedule has no part in it
        [TINY, "model.layers=1", "parallel.pp=2", "parallel.pipeline.schedule=auto", "--gpus", "2"],
        "no layout is possible with parallel.pp = 2:",
    ),
    ([MODEL, "batch.global=7", "--gpus", "64", "parallel.pp=1", "parallel.tp=1"], "no layout is possible"),
    ([*SMALL, "--gpus", "8", "model.heads=0"], "model.heads = 0: must be at least 1"),
    ([*SMALL, "--gpus", "8", "model.kv_heads=5"], "model.kv_heads"),
    ([*SMALL, "--gpus", "8", "--routing", "natural"], "--routing: has no meaning without model.experts"),
    (
        ["tiny_moe", "model.experts.force_balance=true", "--gpus", "8", "--routing", "natural"],
        "--routing natural: model.experts.force_balance = true balances it",
    ),
    (
        [*SMALL, "--gpus", "8", "parallel.experts.buffers=worst_case"],
        'parallel.experts.buffers = "worst_case": has no meaning with parallel.ep = 1',
    ),
    ([*SMALL, "--gpus", "8", "parallel.ep=2"], "parallel.ep = 2: has no meaning without model.experts; use 1"),
    (["mixtral_8x7b", "--gpus", "8", "parallel.ep=3"], "model.experts.count = 8: must be divisible by parallel.ep = 3"),
    (["mixtral_8x7b", "--gpus", "8", "parallel.ep=2", "parallel.tp=4"], "layers = 32"),
    ([*SMALL, "--gpus", "8", "parallel.tp=0"], "parallel.tp = 0: must be at least 1"),
    ([MODEL, "--gpus", "8", "batch.global=-8"], "batch.global = -8: must be at least 1"),
    ([MODEL, "--gpus", "8", "batch.global=99999999999999999999"], "batch.global = 99999999999999999999: must be"),
    ([*SMALL, "--gpus", "8", "train.steps=0"], "train.steps = 0: must be at least 1"),
    ([*SMALL, "--gpus", "8", "optim.betas=[2, 3]"], "optim.betas"),
    ([*SMALL, "--gpus", "2-4", "--tokens", "1B", "--budget", "0.1", "--write", "best.yaml"], "Nothing is saved"),
    ([MODEL, "parallel={tp: 2}", "--gpus", "8"], "keys of their own"),
    ([MODEL, "batch.micro=auto", "--as-is", "--gpus", "8"], "needs a number"),
    ([MODEL, "--compare", "--gpus", "8"], "at least two"),
    ([MODEL, MODEL, "--compare", "--gpus", "2-8"], "must be one number"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_questions_are_refused(refused: Run, arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


def test_where_nothing_fits_the_nearest_and_enough_gpus_are_told(refused: Run) -> None:
    told = refused(MODEL, "batch.global=16", "--gpus", "1", "--max-memory", "12")
    found = re.search(r"the nearest is (.+), which needs ([\d.]+) GiB, ([\d.]+) GiB too many; use (.+)", told)
    assert found is not None
    layout, needed, over, ways = found.groups()
    assert layout == "micro 1 · recompute full"
    assert float(needed) - 12 == pytest.approx(float(over), abs=0.06)
    enough = re.fullmatch(r"--offload or (\d+) GPUs, which are enough", ways)
    assert enough is not None
    asked_of = [MODEL, "batch.global=16", "--max-memory", "12"]
    assert main(["plan", *asked_of, "--gpus", enough[1]]) == 0
    assert main(["plan", *asked_of, "--gpus", str(int(enough[1]) // 2)]) == 2
    exact = load(
        [MODEL],
        ["batch.global=16", "batch.micro=1", "train.recompute=full", "run.device=cuda", "parallel.data.mode=zero1"],
    )
    assert peak_bytes(check(exact, 1)) / 2**30 == pytest.approx(float(needed), abs=0.06)


def test_any_numbers_of_gpus_are_compared_and_none_is_dropped_silently(plan: Run) -> None:
    output = plan(*SMALL, "--gpus", "3,8,2", "--max-memory", "20")
    assert re.findall(r"^ *(\d+)  ", output, flags=re.MULTILINE) == ["2", "8"]
    assert "On 3 GPUs no layout is possible and fits; --gpus with one of these numbers tells why." in output


def test_what_goes_to_host_memory_is_told(plan: Run) -> None:
    offload = plan(*SMALL, "--gpus", "2", "--as-is", "batch.micro=1", "optim.placement=host")
    told = re.search(r"row 1 keeps ([\d.]+) GiB for a rank, ([\d.]+) GiB on a node", offload)
    assert told is not None
    assert float(told[2]) == pytest.approx(2 * float(told[1]), rel=0.01)
    assert "Host memory" not in plan(*SMALL, "--gpus", "2", "--as-is", "batch.micro=1")


def test_what_states_in_files_ask_of_drives_is_told(plan: Run) -> None:
    output = plan(*SMALL, "--gpus", "2", "--as-is", "batch.micro=1", "optim.placement=/mnt/nvme")
    told = re.search(
        r"Row 1: ([\d.]+) GiB in /mnt/nvme for a rank, ([\d.]+) GiB on a node of 2, with the copy.* "
        r"A step reads ([\d.]+) GiB on a node and writes as much, which takes ([\d.]+) s at 12\.0 GB/s and 6\.80 GB/s",
        output,
    )
    assert told is not None
    rank, node, moved, seconds = map(float, told.groups())
    assert node == pytest.approx(2 * rank, rel=0.01)
    assert moved == pytest.approx(rank, rel=0.01), "half of both ranks' bytes: the rest is the copy"
    assert seconds == pytest.approx(moved * 2**30 * (1 / 12e9 + 1 / 6.8e9), rel=0.01)
    lasts, steps, written = re.search(  # type: ignore[union-attr]
        r"Rated for 14\.0 PB written, they last ([\d,]+) steps: the ([\d,]+) of this run write ([\d.]+) GB", output
    ).groups()
    assert float(lasts.replace(",", "")) == pytest.approx(14_016e12 / (moved * 2**30), rel=0.01)
    assert float(written) == pytest.approx(int(steps.replace(",", "")) * moved * 2**30 / 1e9, rel=0.01)


def test_the_order_that_is_planned_is_that_of_the_written_configuration(
    plan: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    keys = [TINY, "parallel.pp=2", "parallel.pipeline.schedule=auto", "batch.micro=1", "batch.global=8"]
    output = plan(*keys, "--gpus", "2", "--cluster", "l40s", "--write", str(tmp_path / "auto.yaml"))
    layout, needed = re.search(r"^1  (.*?)  .* ([\d.]+ MiB) ", output, flags=re.MULTILINE).groups()  # type: ignore[union-attr]
    assert layout == "pp 2 auto v 2 · micro 1"  # both placements that auto has are tried
    assert main(["show", str(tmp_path / "auto.yaml"), "--memory"]) == 0
    assert f"{needed} at the peak of a step" in capsys.readouterr().out


@pytest.fixture
def four_ranks(tmp_path: Path) -> str:
    """The override for a schedule file for 4 pipeline ranks of one stage, and 8 micro-batches."""
    path = tmp_path / "four.yaml"
    path.write_text(write(build("zb_h1", 4, 8)))
    return f"parallel.pipeline.schedule={path}"


def test_a_schedule_file_is_for_pipelines_of_its_own_size(
    plan: Run, four_ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # its path is long
    output = plan(TINY, "batch.global=16", four_ranks, "--gpus", "8", "--top", "99")
    layouts = re.findall(r"^ *\d+ +(\S.*?)  ", output, flags=re.MULTILINE)
    assert layouts
    assert all(re.search(r"\bpp 4 .*micro (1|2)\b", layout) for layout in layouts), layouts


@pytest.mark.parametrize("other", ["parallel.pp=2", "parallel.pipeline.virtual_stages=2"])
def test_a_schedule_file_for_another_pipeline_is_refused(refused: Run, four_ranks: str, other: str) -> None:
    told = refused(TINY, "batch.global=16", four_ranks, other, "--gpus", "4")
    assert f"{other.partition('=')[0]} = {other[-1]}" in told
    assert "the file's schedule is for 4 pipeline ranks, 4 stages and 8 micro-batches" in told


UNREAD = [
    (["--gpus", "8", "--days", "3"], "--days"),
    (["--gpus", "8", "--budget", "1M"], "--budget"),
    (["--gpus", "2-8", "--days", "3"], "--days"),
    (["--gpus", "2-8", "--top", "5"], "--top"),
    (["--gpus", "2-8", "--explain"], "--explain"),
    (["--gpus", "2-8", "--exhaustive"], "--exhaustive"),
    (["--gpus", "2-8", "--schedule", "order.yaml"], "--schedule"),
    (["--gpus", "8", "--as-is", "--top", "5"], "--top"),
    (["--gpus", "8", "--as-is", "--exhaustive"], "--exhaustive"),
    (["--gpus", "8", "--as-is", "--offload"], "--offload"),
    (["--gpus", "8", "--compare", "--as-is"], "--as-is"),
    (["--gpus", "8", "--compare", "--write", "best.yaml"], "--write"),
    (["--gpus", "8", "--dry-run", "--explain"], "--explain"),
]


@pytest.mark.parametrize(("options", "name"), UNREAD, ids=lambda value: value if isinstance(value, str) else "")
def test_options_that_would_not_be_read_are_refused(refused: Run, options: list[str], name: str) -> None:
    message = refused(MODEL, *options)
    assert message.strip().startswith(f"{name}: is")


def test_a_search_tells_how_far_it_is(plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(Status, "update", lambda _, status: told.append(status))
    plan(*SMALL, "--gpus", "8", "--top", "4")
    assert told[0].startswith("Planning for 8 GPUs ... 0 of 4 found, ")
    assert re.fullmatch(r"Planning for 8 GPUs \.\.\. 3 of 4 found, \d+ layouts simulated", told[-1])


@pytest.mark.parametrize(
    ("text", "value"), [("15T", 15e12), ("1,000,000", 1e6), ("1,500B", 1.5e12), ("2.5e12", 2.5e12)]
)
def test_amounts_are_read_as_they_are_printed(text: str, value: float) -> None:
    assert amount(text) == value


@pytest.mark.parametrize("text", ["1,00", "1,0000", ",000", "1,,000", "0", "-1", "1e999"])
def test_other_amounts_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be a number above 0"):
        amount(text)
