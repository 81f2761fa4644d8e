"""megalite-launch: what it writes and starts, with stand-ins for megalite, Slurm's commands and kubectl."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from megalite_launch.base.events import read_events
from megalite_launch.base.own_command import PACKAGE
from megalite_launch.base.yaml_text import yaml_text
from megalite_launch.commands import run
from megalite_launch.submit import launch_command
from megalite_launch.submit.slurm_script import limit_seconds
from megalite_launch.supervise import supervise_command

PYTHON = sys.executable
SLURM = ("slurm", "a config.yaml", "--nodes", "32")
KUBECTL = '[ "$1" = get ] || cp "$3" applied'
PODS = ("kubernetes", "a config.yaml", "--nodes", "2", "--image", "registry.example/megalite:1")
MEGALITE = """#!/bin/sh
echo "$@" >>asked
[ "$2" != --resolved ] || { echo "model: {layers: 2}"; exit; }
[ -z "$REFUSED" ] || { echo "megalite: error: no such model" >&2; exit 2; }
printf 'ranks   256\\nlayout  tp 8\\nfolder  runs/the run\\nsteps   0 to 10\\n'
"""
Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Runs megalite-launch in a folder whose `bin` has stand-ins; keywords are scripts of further commands."""
    (tmp_path / "bin").mkdir()
    for program in ("cp", "touch"):
        (tmp_path / "bin" / program).symlink_to(str(shutil.which(program)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))

    def start(*arguments: str, **scripts: str) -> int:
        for name, text in {"megalite": MEGALITE, **scripts}.items():
            (tmp_path / "bin" / name).write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
            (tmp_path / "bin" / name).chmod(0o755)
        try:
            return run("launch", list(arguments))
        except SystemExit as ended:  # argparse's
            return int(str(ended.code))

    return start


def test_slurm_gets_a_script_that_stays_and_people_are_told_what_to_watch(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--spares", "2", "--time", "2-00:00:00", "--partition", "gpu", "--sbatch", "reservation=week")
    options += ("--warning", "1200")
    code = start(*SLURM, *options, "run.name=x y$(touch hurt)", sbatch='echo 4711; cp "$2" submitted')
    assert code == 0
    assert (
        tmp_path / "asked"
    ).read_text() == "train --check --world-size 256 -- a config.yaml run.name=x y$(touch hurt)\n" + (
        "train --resolved -- a config.yaml run.name=x y$(touch hurt)\n"
    )
    folder = tmp_path / "runs" / "the run"
    text = (folder / "launch" / "001.sbatch").read_text()
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    for wanted in ("--nodes=34", "--time=2-00:00:00", "--partition=gpu", "--reservation=week", "--requeue"):
        assert wanted in directives
    assert f'--output="{folder}/logs/slurm-%j.log"' in directives
    command = shlex.split(text[text.index("exec ") :].replace("\\\n", " "))
    assert command[command.index("--run") + 1] == str(folder)
    assert command[command.index("--nodes") + 1] == "32"
    assert command[command.index("--spares") + 1] == "2"
    assert "--signal=B:USR2@1200" in directives
    options = command[command.index("supervise") + 1 :]
    supervised = supervise_command.parser().parse_args(options)  # it knows all of them
    assert (supervised.run, supervised.grace_seconds) == (folder, 1140.0)
    check = shlex.split(command[command.index("--check") + 1])
    frozen = folder / "launch" / "001.config.yaml"
    assert check[1:] == ["train", "--check", "--world-size", "{ranks}", "--", str(frozen)]
    assert command[command.index("--") + 2 :] == ["train", str(frozen)]
    assert (supervised.frozen, supervised.resolve[1:4]) == (frozen, ["train", "--resolved", "--"])
    assert supervised.resolve[4:] == ["a config.yaml", "run.name=x y$(touch hurt)"]
    assert frozen.read_text() == "model: {layers: 2}\n"
    assert f'--chdir="{tmp_path}"' in directives
    (event,) = read_events(folder / "events.jsonl")
    assert (event["event"], event["job"]) == ("submitted", "4711")
    told = capsys.readouterr().out
    assert f"megalite-status '{folder}' --follow" in told
    assert "scancel 4711" in told
    assert subprocess.run(["/bin/bash", "-n", str(folder / "launch" / "001.sbatch")]).returncode == 0
    assert not (tmp_path / "hurt").exists()


def test_a_folder_that_leads_elsewhere_is_refused_before_anything_is_written(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs/the run").mkdir(parents=True)
    (tmp_path / "runs/the run/launch").symlink_to(tmp_path / "elsewhere")
    for way in (SLURM, ("local", "config.yaml")):
        assert start(*way, sbatch="echo 4711") == 2
        assert "launch: is a link" in capsys.readouterr().err
    (tmp_path / "runs/the run/launch").unlink()
    (tmp_path / "runs/the run/logs").mkdir()
    (tmp_path / "runs/the run/logs/slurm-4710.log").symlink_to(tmp_path / "elsewhere/log")
    assert start(*SLURM, sbatch="echo 4710") == 2
    assert "logs/slurm-4710.log: is a link" in capsys.readouterr().err
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "wanted", "unwanted"),
    [
        ((), {"--cpus-per-task=8", "--mem=0", "--exclusive"}, set()),
        (("--cpus-per-task", "12", "--mem", "900G"), {"--cpus-per-task=12", "--mem=900G", "--exclusive"}, {"--mem=0"}),
        (("--sbatch", "mem-per-gpu=100G"), {"--cpus-per-task=8", "--mem-per-gpu=100G"}, {"--mem=0"}),
        (("--sbatch", "cpus-per-gpu=4", "--sbatch", "mem=9G"), {"--cpus-per-gpu=4", "--mem=9G"}, {"--cpus-per-task=8"}),
        (("--sbatch", "oversubscribe"), {"--oversubscribe", "--mem=0"}, {"--exclusive"}),
        (("--cpus-only",), {"--mem=0"}, {"--cpus-per-task=8"}),
    ],
)
def test_slurm_is_asked_for_whole_nodes_unless_the_user_asks_otherwise(
    start: Start, options: tuple[str, ...], wanted: set[str], unwanted: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(*SLURM, "--dry-run", *options) == 0
    asked = {
        line.removeprefix("#SBATCH ") for line in capsys.readouterr().out.splitlines() if line.startswith("#SBATCH ")
    }
    assert wanted <= asked
    assert not unwanted & asked


def test_the_plain_script_asks_for_the_same() -> None:
    text = (PACKAGE / "slurm.sbatch").read_text()
    asked = {line.split()[1] for line in text.splitlines() if line.startswith("#SBATCH ")}
    assert {"--cpus-per-task=8", "--mem=0", "--exclusive"} <= asked


def test_what_is_wrong_with_the_configuration_starts_nothing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSED", "1")
    assert start(*SLURM, sbatch="touch submitted") == 2
    assert not (tmp_path / "submitted").exists()
    assert not (tmp_path / "runs").exists()


def test_where_megalite_is_only_in_the_image_the_job_checks(start: Start, tmp_path: Path) -> None:
    options = ("--container", "image.sqsh", "--mounts", "/data:/data", "--unchecked", "runs/far")
    assert start(*SLURM, *options, sbatch="echo 4711", megalite="touch hurt") == 0
    text = (tmp_path / "runs/far/launch/001.sbatch").read_text()
    assert "--srun-option=--container-image=image.sqsh" in text
    assert "--srun-option=--container-mounts=/data:/data" in text
    assert "-- megalite train 'a config.yaml'" in text
    assert not (tmp_path / "hurt").exists()


def test_a_dry_run_writes_nothing(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (SLURM, PODS, ("local", "a config.yaml")):
        assert start(*arguments, "--dry-run", sbatch="touch hurt", kubectl="touch hurt") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["asked", "bin"]
    assert "#SBATCH --nodes=32" in capsys.readouterr().out


def test_a_second_job_for_a_run_is_refused_while_the_first_is_there(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(*SLURM, sbatch="echo 4711", squeue="exit 1") == 0
    assert start(*SLURM, sbatch="touch hurt; echo 4712", squeue="echo RUNNING") == 2
    assert "job 4711 of this run is RUNNING" in capsys.readouterr().err
    assert not (tmp_path / "hurt").exists()
    assert start(*SLURM, sbatch="echo 4713", squeue="exit 0") == 0  # it has ended
    assert [event["job"] for event in read_events(tmp_path / "runs/the run/events.jsonl")] == ["4711", "4713"]


@pytest.mark.parametrize(
    ("arguments", "scripts", "told"),
    [
        (SLURM, {}, "sbatch: is not on the PATH"),
        (SLURM, {"sbatch": "echo 'invalid partition' >&2; exit 1"}, "invalid partition"),
        (SLURM, {"sbatch": "echo 'what?'"}, "is no id of a job"),
        (SLURM, {"megalite": "echo 1.0"}, "is not this version's megalite"),
        ((*SLURM, "--megalite", "none"), {}, "--megalite none: is no program"),
        ((*SLURM, "--partition", "a b"), {}, "--partition 'a b': Slurm's scripts allow only"),
        ((*SLURM, "--sbatch", "a\nb=c"), {}, "is no option of sbatch"),
        ((*SLURM, "--spares", "-1"), {}, "--spares"),
        ((*SLURM, "--min-nodes", "33"), {}, "--min-nodes 33: must be at most --nodes 32"),
        ((*SLURM, "--thresholds", "none.yaml"), {}, "none.yaml"),
        (("slurm", "a config.yaml"), {}, "--nodes"),
        (("slurm", "--nodes", "0", "a config.yaml"), {}, "whole number from 1"),
        (("slurm", "--nodes", "1", "--time", "5", "a config.yaml"), {}, "--time 5: is 300 s, and the ranks are asked"),
        (("cloud",), {}, "invalid choice: 'cloud'"),
        ((*PODS, "--name", "A_b"), {}, "--name A_b: must be a name for Kubernetes"),
        ((*PODS, "--claim", "data"), {}, "--claim data: must be CLAIM:PATH"),
        ((*PODS, "--memory", "much"), {}, "--memory much: must be a quantity"),
        ((*PODS, "--submit"), {"kubectl": "[ $1 = get ]"}, "kubectl apply"),
        ((*PODS, "--submit"), {}, "kubectl: is not on the PATH"),
        ((*PODS, "--overlay", "none.json"), {}, "none.json: No such file"),
        ((*PODS, "--env", "NCCL_DEBUG"), {}, "NCCL_DEBUG: must be NAME=VALUE"),
    ],
)
def test_bad_input(
    start: Start, arguments: tuple[str, ...], scripts: dict[str, str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(*arguments, **scripts) == 2
    assert told in capsys.readouterr().err


def test_a_per_cent_sign_in_the_name_of_a_run_is_no_pattern(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(*SLURM, "--dry-run", megalite=MEGALITE.replace("the run", "50%%j")) == 0  # as printf has it
    assert f'--output="{tmp_path}/runs/50%%j/logs/slurm-%j.log"\n' in capsys.readouterr().out


ODD = ("a$$b", "$$(HOME)", "$$$(HOME)$", "$é", "a$", "$(")


def expanded(word: str) -> str:
    """A word of a command as Kubernetes hands it to the container: the rules of its package `expansion`."""

    def one(found: re.Match[str]) -> str:
        return {"$$": "$"}.get(found[0], f"<{found[0]}>" if found[0].endswith(")") else found[0])

    return re.sub(r"\$(\$|\([^)]*\)|.)", one, word)


def test_pods_are_a_job_that_knows_the_exit_codes(start: Start, tmp_path: Path) -> None:
    options = ("--submit", "--claim", "shared:/shared", "--memory", "1500Gi", "--gpus-per-node", "8", *ODD)
    options = (*options, "run.name=$(HOME)")
    assert start(*PODS, *options, kubectl=KUBECTL) == 0
    service, job = yaml.safe_load_all((tmp_path / "applied").read_text())
    assert (service["kind"], service["spec"]["clusterIP"], job["metadata"]["name"]) == ("Service", "None", "the-run")
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    rules = {
        code: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert rules == {2: "FailJob", 4: "FailJob", 70: "FailJob", 130: "FailJob", 3: "Ignore"}
    assert spec["podFailurePolicy"]["rules"][0] == {  # as the API's schema has it
        "action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }  # fmt: skip
    assert spec["backoffLimit"] == 2 * 100  # it counts pods, all of which fail together
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # else there is no failure policy
    (container,) = pod["containers"]
    assert container["command"][0] == "megalite-node"
    assert container["workingDir"] == str(tmp_path)
    end = ["train", "a config.yaml", *ODD, "run.name=$(HOME)"]
    assert [expanded(word) for word in container["command"][-len(end) :]] == end
    named = {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"]}
    assert named["MEGALITE_NODE"] == "spec.nodeName"
    assert named["MEGALITE_JOB"] == "metadata.labels['batch.kubernetes.io/controller-uid']"
    words = container["command"]
    assert words[words.index("--run") + 1] == str(tmp_path / "runs/the run")
    assert words[words.index("--job") + 1] == "$(MEGALITE_JOB)"
    master = container["command"][container["command"].index("--master") + 1]
    assert master == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "memory": "1500Gi"}
    assert {"name": "claim-0", "mountPath": "/shared"} in container["volumeMounts"]


def test_a_job_of_the_same_name_is_refused(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(*PODS, "--submit", "--namespace", "ours", kubectl="echo job.batch/the-run") == 2
    assert "removed with: kubectl delete job the-run --namespace ours" in capsys.readouterr().err
    assert start(*PODS, "--submit", kubectl="exit 3") == 2
    assert "kubectl get job the-run: ended with 3" in capsys.readouterr().err
    assert not (tmp_path / "runs/the run/launch").exists()


def test_a_manifest_is_shown_and_written_and_submitted_only_when_that_is_asked_for(
    start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start(*PODS, "--namespace", "ours", kubectl="touch hurt") == 0
    told = capfd.readouterr().out
    text = (tmp_path / "runs/the run/launch/001.yaml").read_text()
    assert told.startswith(text)
    assert (
        f"start    kubectl apply -f '{tmp_path}/runs/the run/launch/001.yaml'   or this command with --submit" in told
    )
    assert "kubectl get pods --selector app=the-run --namespace ours" in told
    assert not (tmp_path / "hurt").exists()
    assert not (tmp_path / "runs/the run/events.jsonl").exists()
    assert start(*PODS, "--submit", kubectl='echo "I was asked to $1"') == 2  # it says that there is a job
    assert start(*PODS, "--submit", kubectl='[ "$1" = get ] || echo "I was asked to $1"') == 0
    told = capfd.readouterr().out
    assert 0 < told.index("kind: Job") < told.index("I was asked to apply")
    assert (tmp_path / "runs/the run/launch/002.yaml").exists()


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["yes", "1e3", "0x1", "a: b", "~", "-"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@given(PLAIN)
@example([{"k" * 2000: None, "a": {"é" * 900: [1, {}]}}])
def test_what_is_written_as_yaml_is_read_as_it_was(value: object) -> None:
    assert yaml.safe_load(yaml_text(value)) == value


def test_every_way_has_help(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    for way in launch_command.WAYS:
        assert start(way, "--help") == 0
    assert start("--help") == 0
    assert capsys.readouterr().out.count("usage: megalite-launch") == 4


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800), ("30:10", 1810), ("2:00:00", 7200), ("1-0", 86_400), ("2-12", 216_000), ("1-2:30", 95_400),
        ("1-02:30:05", 95_405), ("0", None), ("UNLIMITED", None), ("", None), ("1:2:3:4", None), ("-5", None),
    ],
)  # fmt: skip
def test_limits_of_time_are_read_as_sbatch_does(text: str, seconds: int | None) -> None:
    assert limit_seconds(text) == seconds


def test_of_two_submissions_at_once_one_is_refused(start: Start, tmp_path: Path) -> None:
    """The second waits until the first has told its job, and then asks Slurm about it."""
    slow = "sleep 2; echo 4711 >>submitted; echo 4711"
    (tmp_path / "bin/sleep").symlink_to(str(shutil.which("sleep")))
    start("--help", sbatch=slow, squeue="[ -e submitted ] && echo PENDING")
    words = [*SLURM, "--megalite", "bin/megalite"]
    code = f"import sys; from megalite_launch.commands import run; sys.exit(run('launch', {words!r}))"
    command = [PYTHON, "-c", code]
    both = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        told = "".join(process.communicate(timeout=60)[1] for process in both)
        assert sorted(process.returncode for process in both) == [0, 2]
        assert "job 4711 of this run is PENDING" in told
    finally:
        for process in both:
            process.kill()
    assert (tmp_path / "submitted").read_text() == "4711\n"


def test_a_script_can_be_submitted_from_anywhere_and_says_what_it_freezes(start: Start, tmp_path: Path) -> None:
    assert start(*SLURM, "--as-edited", sbatch="echo 4711", squeue="exit 1") == 0
    folder = tmp_path / "runs/the run/launch"
    text = (folder / "001.sbatch").read_text()
    assert f'#SBATCH --chdir="{tmp_path}"\n' in text
    assert "-- megalite train 'a config.yaml'" in text.replace(f"{tmp_path}/bin/", "")
    assert "--frozen" in text
    assert start(*SLURM, sbatch="echo 4712", squeue="exit 1") == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "001.config.yaml", "001.sbatch", "002.config.yaml", "002.sbatch", "lock",
    ]  # fmt: skip
    assert f"train '{folder}/002.config.yaml'" in (folder / "002.sbatch").read_text()
