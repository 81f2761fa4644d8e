"""What launch/slurm.sbatch makes of exit codes, with stand-ins for the commands of Slurm."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "slurm.sbatch"
COMMANDS = {
    "megalite": """
        printf "ranks   4\\nfolder  %s\\n" "${FOLDER:-a run}"
        echo checked >>calls
        [ "$(grep -c checked calls)" -gt "${AWAY:-0}" ] || exit 2
        exit ${CHECK:-0}""",
    "df": 'printf "device blocks used room share at\\nx 9 9 %s 9%% /disk\\n" "${ROOM:-99999}"',
    "srun": 'echo "$@" >srun; eval "$JOB"',
    "scontrol": """
        case "$1 $2" in
            "show hostnames") echo localhost; echo node2 ;;
            "--oneliner show")
                echo asked >>calls
                [ "$(grep -c asked calls)" -gt "${BUSY:-0}" ] || { echo "Socket timed out" >&2; exit 1; }
                echo "JobId=7 JobState=${STATE:-RUNNING} Requeue=${REQUEUE:-1} Restarts=0 " ;;
            "requeue 7") echo requeue >>calls; exit ${REFUSED:-0} ;;
        esac""",
    "sleep": "echo slept >>calls",
}
SAVE = 'mkdir -p "a run/checkpoints/step-0000000$(($SLURM_RESTART_COUNT + 8))";'
FAIL = "exit 9"  # srun's code, whatever the ranks'
Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs the script in a folder, with `job` for what the ranks do; `requeued` tells whether it came to that."""
    (tmp_path / "bin").mkdir()
    for name, text in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    def run(job: str, restarts: int = 0, **variables: str) -> Done:
        environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "JOB": job, "SLURM_JOB_ID": "7"}
        environment |= {"SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_RESTART_COUNT": str(restarts)}
        (tmp_path / "calls").write_text("")
        return subprocess.run(
            ["bash", SCRIPT, "a config.yaml"],
            cwd=tmp_path,
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def requeues(folder: Path) -> int:
    return (folder / "calls").read_text().split().count("requeue")


def outcome(code: int) -> str:
    return f'echo {code} >"$MEGALITE_OUTCOME"; {FAIL}'


@pytest.mark.parametrize(
    ("job", "code", "requeued"),
    [
        ("exit 0", 0, 0),
        (outcome(3), 3, 1),
        (outcome(5), 5, 1),
        ("exit 137", 137, 1),  # a killed rank
        ("exit 1", 1, 1),  # srun lost a node
        (outcome(1), 1, 0),  # a bug, after which other ranks miss a peer
        (outcome(2), 2, 0),
        (outcome(4), 4, 0),
        (outcome(130), 130, 0),
    ],
)
def test_what_the_first_rank_says_decides(run: Run, tmp_path: Path, job: str, code: int, requeued: int) -> None:
    done = run(job)
    assert (done.returncode, requeues(tmp_path)) == (code, requeued), done.stderr
    assert ("asking Slurm to requeue it" in done.stderr) == bool(requeued)


def test_bad_input_starts_no_rank(run: Run, tmp_path: Path) -> None:
    assert run("exit 0", CHECK="2").returncode == 2
    assert not (tmp_path / "srun").exists()


def test_ranks_start_with_signals_held_up(run: Run, tmp_path: Path) -> None:
    run("exit 0")
    started = (tmp_path / "srun").read_text()
    assert started.endswith(" env --block-signal=TERM,INT,HUP,USR1,USR2 megalite train a config.yaml\n")


def test_attempts_that_save_nothing_new_are_counted_and_progress_forgives_them(run: Run, tmp_path: Path) -> None:
    jobs = [FAIL, FAIL, SAVE + FAIL, FAIL, FAIL, FAIL]
    counts = []
    for restart, job in enumerate(jobs):
        done = run(job, restart)
        counts.append(requeues(tmp_path))
    assert counts == [1, 1, 1, 1, 1, 0]
    assert "ended with code 9 after " in done.stderr
    assert "at step 10; 3 attempts in a row have saved nothing new: not requeued" in done.stderr
    assert run(SAVE + outcome(3), 999).returncode == 3
    assert requeues(tmp_path) == 1
    assert "requeued 1000 times" in run(SAVE + outcome(3), 1000).stderr
    assert requeues(tmp_path) == 0


@pytest.mark.parametrize("folder", ["-p/run", "  led by blanks", "$(touch hurt)", "%s"])
def test_a_run_folder_may_have_any_name(run: Run, tmp_path: Path, folder: str) -> None:
    done = run(f'mkdir -p "./$FOLDER/checkpoints/step-00000009"; {outcome(3)}', FOLDER=folder)
    assert (done.returncode, requeues(tmp_path)) == (3, 1), done.stderr
    assert " at step 9; " in done.stderr
    assert (tmp_path / folder / "logs" / "outcome-7.0").read_text() == "3\n"
    assert not (tmp_path / "hurt").exists()


@pytest.mark.parametrize("text", ["", "a[$(touch hurt)]", "-1", "08", "9" * 40])
def test_what_is_no_number_in_a_file_is_none(run: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "text").write_text(text)
    done = run(f'cp text "$MEGALITE_OUTCOME"; cp text "a run/logs/progress-7"; {FAIL}', 1)
    assert (done.returncode, requeues(tmp_path)) == (9, 1), done.stderr
    assert not list(tmp_path.rglob("hurt"))


@pytest.mark.parametrize(
    ("variables", "requeued", "words"),
    [
        ({"BUSY": "1"}, 1, "asking Slurm to requeue it"),
        ({"BUSY": "9"}, 0, "Slurm does not answer"),
        ({"STATE": "COMPLETING"}, 0, "cancelled or is ending"),
        ({"REQUEUE": "0"}, 0, "--no-requeue: submit it again"),
        ({"REFUSED": "1"}, 4, "Slurm refused"),
    ],
    ids=["busy once", "no answer", "cancelled", "--no-requeue", "refused"],
)
def test_a_saved_job_ends_with_3_whatever_slurm_answers(
    run: Run, tmp_path: Path, variables: dict[str, str], requeued: int, words: str
) -> None:
    done = run(outcome(3), **variables)
    assert (done.returncode, requeues(tmp_path)) == (3, requeued), done.stderr
    assert words in done.stderr
    assert not requeued or "asked" in (tmp_path / "calls").read_text()


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5])
def test_a_full_disk_ends_it_whatever_srun_says(run: Run, tmp_path: Path, code: int) -> None:
    done = run(f"exit {code}", ROOM="12")
    assert (done.returncode, requeues(tmp_path)) == (4, 0)
    assert "megalite: job 7 /disk: No space left on device" in done.stderr
    assert run("exit 137", ROOM="12").returncode == 137  # a signal is its cause
    assert run(outcome(3), ROOM="12").returncode == 3  # a rank could write


def test_a_file_that_is_away_ends_only_a_job_that_has_not_trained(run: Run, tmp_path: Path) -> None:
    assert (run(outcome(2)).returncode, requeues(tmp_path)) == (2, 0)
    assert (run(f"{SAVE} {outcome(2)}").returncode, requeues(tmp_path)) == (2, 1)
    assert [(run(outcome(2), restart).returncode, requeues(tmp_path)) for restart in (1, 2, 3)] == [
        (2, 1),
        (2, 1),
        (2, 0),
    ]
    assert (run(outcome(0), AWAY="1").returncode, (tmp_path / "calls").read_text().split()) == (2, ["checked"])
    done = run("exit 0", 1, AWAY="3")
    assert (done.returncode, (tmp_path / "calls").read_text().split().count("slept")) == (0, 3)
    assert "looks again in 60 s" in done.stderr
    assert run("exit 0", 1, AWAY="99").returncode == 2  # in the end
