import argparse
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megalite import __version__
from megalite.base.errors import InputError
from megalite.commands import main

ROOT = Path(__file__).parents[2]


class Spy:
    """Stands in for the module of a command."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: str, effect: BaseException | int = 0) -> None:
        self.effect = effect
        fake = ModuleType(module)
        fake.run = self.run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module, fake)

    def run(self, args: argparse.Namespace) -> int:
        self.args = args
        if isinstance(self.effect, int):
            return self.effect
        raise self.effect


def test_files_and_overrides_may_be_mixed_with_options(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch, "megalite.commands.verify", 1)
    argv = [
        "verify",
        "a.yaml",
        "model.layers=2",
        "--steps",
        "5",
        "dir/b=c.yaml",
        "x=1",
        "--tolerance",
        "1e-6",
        "y[0]=a=b",
    ]
    assert main.main(argv) == 1
    assert spy.args.files == ["a.yaml", "dir/b=c.yaml"]
    assert spy.args.overrides == ["model.layers=2", "x=1", "y[0]=a=b"]
    assert (spy.args.steps, spy.args.tolerance) == (5, 1e-6)


def test_defaults_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    verify, show = Spy(monkeypatch, "megalite.commands.verify"), Spy(monkeypatch, "megalite.commands.show.show")
    assert main.main(["verify"]) == main.main(["show"]) == 0
    assert (verify.args.steps, verify.args.tolerance) == (3, 1e-10)
    assert show.args.world_size is None
    assert show.args.schedule is None


@pytest.mark.parametrize("code", [0, 3, 4, 5])
def test_a_command_gives_the_exit_code(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    Spy(monkeypatch, "megalite.commands.train", code)
    assert main.main(["train", "a.yaml"]) == code


def test_bad_input_is_one_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Spy(monkeypatch, "megalite.commands.train", InputError("a.b = 1: must be 2"))
    assert main.main(["train"]) == 2
    assert capsys.readouterr() == ("", "megalite: error: a.b = 1: must be 2\n")


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Spy(monkeypatch, "megalite.commands.train", KeyboardInterrupt())
    assert main.main(["train"]) == 130
    assert capsys.readouterr() == ("", "megalite: interrupted\n")


def test_a_file_that_the_system_refuses_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Spy(monkeypatch, "megalite.commands.show.show", PermissionError(13, "Permission denied", "a/b"))
    assert main.main(["show"]) == 2
    told = "megalite: error: a/b: Permission denied; MEGALITE_TRACEBACK=1 shows where in the code\n"
    assert capsys.readouterr() == ("", told)
    monkeypatch.setenv("MEGALITE_TRACEBACK", "1")
    with pytest.raises(PermissionError):
        main.main(["show"])


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    Spy(monkeypatch, "megalite.commands.train", KeyError("bug"))
    with pytest.raises(KeyError):
        main.main(["train"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: COMMAND"),
        (["plot"], "invalid choice: 'plot'"),
        (["shwo", "a.yaml"], "invalid choice: 'shwo'; did you mean show?"),
        (["show", "--wrold-size", "3"], "unrecognized arguments: --wrold-size; did you mean --world-size?"),
        (["show", "--memroy"], "unrecognized arguments: --memroy; did you mean --memory?"),
        (["show", "--world-size", "100000000000"], "must be a whole number from 1 to 16,777,216"),
        (
            ["show", "a.yaml", "--world-size", "2", "b.yaml", "--model.layers=3"],
            "unrecognized arguments: --model.layers=3",
        ),
        (["show", "--world-size", "0"], "'0' must be a whole number from 1 to 16,777,216"),
        (["show", "--world-size", "x"], "'x' must be a whole number from 1 to 16,777,216"),
        (["verify", "--steps", "-1"], "'-1' must be a whole number from 1 to 1,000"),
        (["verify", "--steps", "1001"], "'1001' must be a whole number from 1 to 1,000"),
        (["show", "--world-size", "16777217"], "'16777217' must be a whole number from 1 to 16,777,216"),
        (["verify", "--tolerance", "nan"], "'nan' must be a number of at least 0 and below 1"),
        (["verify", "--tolerance", "inf"], "'inf' must be a number of at least 0 and below 1"),
        (["verify", "--tolerance", "x"], "'x' must be a number of at least 0 and below 1"),
    ],
)
def test_bad_arguments_exit_with_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["show", "--measure"], ["train", "--world-size", "2"], ["verify", "--x"], ["show", "--world-size", "x"]]
)
def test_a_mistake_brings_the_usage_of_its_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(argv)
    assert capsys.readouterr().err.startswith(f"usage: megalite {argv[0]} ")


def test_help_documents_commands_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {command}" in shown for command in ("train", "verify", "show"))
    assert all(f"\n  {code} " in shown for code in (0, 1, 2, 3, 4, 5, 130))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--version"])
    assert capsys.readouterr().out == f"megalite {__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["show"], ["show", "nowhere.yaml"]])
def test_light_commands_import_neither_torch_nor_numpy(arguments: list[str]) -> None:
    script = (
        "import atexit, sys; from megalite.commands.main import main\n"
        "heavy = {'torch', 'numpy'}\n"
        "atexit.register(lambda: print('heavy:', sorted(heavy & set(sys.modules))))\n"
        f"main({arguments!r})"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "heavy: []"


@pytest.mark.parametrize("lines", [10, 100_000])
def test_a_reader_that_leaves_is_no_error(lines: int) -> None:
    script = (
        "import sys, types; from megalite.commands.main import main\n"
        "module = types.ModuleType('megalite.commands.show.show')\n"
        f"module.run = lambda args: [print('line') for _ in range({lines})] and 0\n"
        "sys.modules['megalite.commands.show.show'] = module\n"
        "sys.stdin.read()\n"
        "sys.exit(main(['show']))"
    )
    command = [sys.executable, "-c", script]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == ""
        assert process.wait() == 141


def test_a_broken_pipe_elsewhere_is_a_fault_to_see() -> None:
    script = (
        "import sys, types; from megalite.commands.main import main\n"
        "module = types.ModuleType('megalite.commands.show.show')\n"
        "def run(args): raise BrokenPipeError('worker')\n"
        "module.run = run\n"
        "sys.modules['megalite.commands.show.show'] = module\n"
        "main(['show'])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("BrokenPipeError: worker\n")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "backend:native"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
    ],
)
def test_allocator_is_set_before_torch_is_imported_unless_the_user_has(
    given: dict[str, str], kept: dict[str, str]
) -> None:
    script = """
import os, sys
from megalite.__main__ import main
sys.argv = ["megalite", "--version"]
try:
    main()
except SystemExit:
    pass
print({name: value for name, value in os.environ.items() if "ALLOC_CONF" in name}, "torch" in sys.modules)
"""
    clean = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=clean | given, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == f"{kept} False"
