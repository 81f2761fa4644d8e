"""The benchmark of the kernels, run as a program where there is no device: what it compares, reports and refuses."""

import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import FakeGpu
from rounding import DEVICE
from torch import Tensor

from megalite_kernels.benchmarks import __main__ as program
from megalite_kernels.benchmarks import measure, variants
from megalite_kernels.benchmarks.cases import OPS, WHOLE_PASS, cases
from megalite_kernels.benchmarks.inputs import TINY_MODEL, Inputs
from megalite_kernels.benchmarks.machine import nvidia_smi
from megalite_kernels.benchmarks.measure import AGREEMENT
from megalite_kernels.benchmarks.variants import EAGER_TORCH, LIGER, MATMULS, MEGALITE, TORCH_COMPILE, VARIANTS


@pytest.fixture(autouse=True)
def _no_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not it is installed."""
    monkeypatch.setattr(measure, "has_liger", lambda: False)


def _results(out: str) -> dict[tuple[str, str], str]:
    lines = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| ")]
    return {(op, name): result for op, name, result in lines[2:]}


def test_all_implementations_of_all_ops_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--check"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("On cuda." if DEVICE.type == "cuda" else "On cpu; torch.compile only traces here.")
    found = _results(out)
    assert {op for op, _ in found} == set(OPS) == set(VARIANTS)
    for op in OPS:
        assert [found[op, name] for name in (MEGALITE, TORCH_COMPILE, EAGER_TORCH)] == [AGREEMENT] * 3
        assert found[op, LIGER] in ("not installed", "no such kernel")
    assert found["linear_cross_entropy", MATMULS] == "not compared"


@pytest.fixture
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing takes seconds."""
    monkeypatch.setattr(variants, "compile_for", lambda device, function, fullgraph: function)


def _plant(monkeypatch: pytest.MonkeyPatch, op: str, kind: str, function: Callable[..., object]) -> None:
    """Let one implementation run `function`, which is given what the right one returns, and the inputs."""

    def planted(right: variants.Variant) -> variants.Variant:
        assert right.bind is not None
        return replace(right, bind=lambda inputs: lambda: function(right.bind(inputs)(), inputs))

    changed = [planted(one) if one.kind == kind else one for one in VARIANTS[op]]
    monkeypatch.setitem(VARIANTS, op, changed)


def _fail(*_: object) -> None:
    raise ImportError("no such library\nand more")


@pytest.mark.parametrize(
    ("kind", "function", "code", "said"),
    [
        (MEGALITE, lambda y, _: y * 1.02, 1, "differs: "),
        (MEGALITE, lambda y, _: y.detach() + 0 * y, 1, "differs: gradient of gate is "),
        (MEGALITE, lambda y, _: torch.full_like(y, math.nan) + y, 1, "differs: result 0 is inf times as far off"),
        (MEGALITE, lambda y, _: y[:-1], 1, "failed: RuntimeError: "),
        (MEGALITE, _fail, 1, "failed: ImportError: no such library"),
        (EAGER_TORCH, lambda y, _: y * 1.02, 0, "differs: "),
        (EAGER_TORCH, _fail, 0, "failed: ImportError: no such library"),
    ],
)
@pytest.mark.usefixtures("_uncompiled")
def test_what_is_wrong_is_reported(
    kind: str,
    function: Callable[..., object],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And only what is ours is a failure."""
    _plant(monkeypatch, "swiglu", kind, function)
    assert program.main(["--check", "--ops", "swiglu"]) == code
    for (_, name), result in _results(capsys.readouterr().out).items():
        if name == kind:
            assert result.startswith(said)
        elif name != LIGER:
            assert result == AGREEMENT


@pytest.mark.usefixtures("_uncompiled")
def test_an_optimizer_that_leaves_one_tensor_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(results: tuple[list[Tensor], ...], inputs: object) -> tuple[list[Tensor], ...]:
        results[0][5].add_(1e-6)
        return results

    _plant(monkeypatch, "adamw", MEGALITE, forget)
    rows = [row for case in cases(["adamw"], [TINY_MODEL]) for row in measure.check(case, DEVICE, lambda text: None)]
    assert [row.is_fault for row in rows] == [True, False, False, False]
    assert rows[0].status.startswith("differs: result 5 is ")


@pytest.mark.usefixtures("_uncompiled")
def test_liger_is_asked_for_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a module of its interface, which overwrites what it is given, as Liger does."""
    monkeypatch.setattr(measure, "has_liger", lambda: True)
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", _like_liger())
    rows = []
    for case in cases(OPS, [TINY_MODEL]):
        everything = VARIANTS[case.op]
        with monkeypatch.context() as only_liger:
            only_liger.setitem(VARIANTS, case.op, [variant for variant in everything if variant.kind == LIGER])
            rows += measure.check(case, DEVICE, lambda text: None)
    found = {(row.op, row.variant): row.status for row in rows}
    assert found.pop(("linear_cross_entropy", "Liger, large chunks")) == AGREEMENT
    assert found == {(op, LIGER): "no such kernel" if variants.NO_LIGER in VARIANTS[op] else AGREEMENT for op in OPS}


def _like_liger() -> SimpleNamespace:
    eager = dict(VARIANTS)

    def plain(op: str) -> Callable[..., object]:
        (variant,) = (one for one in eager[op] if one.kind == EAGER_TORCH)

        def function(*arguments: Tensor, **options: object) -> object:
            given = [one.clone() if one.requires_grad else one for one in arguments[: 3 if op == "add_rms_norm" else 2]]
            result = variant.bind(SimpleNamespace(arguments=given))()
            with torch.no_grad():
                arguments[0].zero_()
            return result

        return function

    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        """Of heads before tokens, with tables `[1, s, e]`."""
        assert cos.shape == (1, q.shape[2], q.shape[3])
        turned = []
        for x in (q, k):
            first, second = x.float().chunk(2, -1)
            halves = torch.cat((-second, first), -1)
            turned.append((x.float() * cos[:, None] + halves * sin[:, None]).to(x.dtype))
        return turned

    def linear(x: Tensor, weight: Tensor, targets: Tensor, **options: object) -> Tensor:
        assert options.pop("reduction") == "sum"
        assert not options or options == {"accum_dtype": torch.float32, "chunk_mem_const": variants.LARGE_CHUNK_FACTOR}
        return variants._plain_linear_cross_entropy(x, weight, targets)

    return SimpleNamespace(
        liger_rms_norm=plain("rms_norm"),
        liger_fused_add_rms_norm=plain("add_rms_norm"),
        liger_swiglu=plain("swiglu"),
        liger_rope=rope,
        liger_cross_entropy=plain("cross_entropy"),
        liger_fused_linear_cross_entropy=linear,
    )


@pytest.fixture
def _fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the device itself."""
    monkeypatch.setattr(program, "Gpu", lambda device: FakeGpu(ticks=1e-5))
    monkeypatch.setattr(program, "device_facts", lambda device: {"name": "none"})
    monkeypatch.setattr(program, "has_cuda", lambda: True)
    monkeypatch.setattr(program, "USES_INTERPRETER", False)
    monkeypatch.setitem(program.MODELS, "8B", replace(TINY_MODEL, name="8B"))
    for op, (ours, *others) in VARIANTS.items():  # interpreted kernels would take seconds
        eager = next(one for one in others if one.kind == EAGER_TORCH)
        monkeypatch.setitem(VARIANTS, op, [replace(ours, bind=eager.bind), *others])


@pytest.mark.usefixtures("_fake_gpu", "_uncompiled")
def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "kernels.json"
    ops = ["cross_entropy", "linear_cross_entropy", "grad_norm", "add_rms_norm"]
    assert program.main(["--ops", *ops, "--models", "8B", "--rounds", "2", "--out", str(out)]) == 0
    assert sorted(path.name for path in out.parent.iterdir()) == ["kernels.json", "kernels.md"]
    data = json.loads(out.read_text())
    assert data["command"].endswith(f"--rounds 2 --out {out}")
    assert data["cases"] == "5 of 5", "one of them twice as long"
    assert (data["device"], data["versions"]["torch"]) == ({"name": "none"}, version("torch"))
    timed = [(row["model"], row["op"], row["part"], row["variant"]) for row in data["rows"] if row["seconds"]]
    assert len(timed) == len(set(timed)) == 3 * (3 + 2 * 3 + 1 + 2) + 2
    assert ("8B, twice", "linear_cross_entropy", WHOLE_PASS, MATMULS) in timed
    assert all(row["peak_bytes"] == 4000 and row["seconds"]["rounds"] == 2 for row in data["rows"] if row["seconds"])
    streams = capsys.readouterr()
    assert streams.out in out.with_suffix(".md").read_text()
    assert "add_rms_norm 8B backward, eager: 10.0 µs\n" in streams.err


@pytest.mark.usefixtures("_fake_gpu", "_uncompiled")
def test_what_one_implementation_overwrites_the_next_finds_restored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def overwrite(turned: Sequence[Tensor], inputs: Inputs) -> Sequence[Tensor]:
        with torch.no_grad():
            inputs.leaves["q"].zero_()  # backward does not need it
        return turned

    def look(turned: Sequence[Tensor], inputs: Inputs) -> Sequence[Tensor]:
        if not inputs.leaves["q"].any():
            raise ValueError("overwritten")
        return turned

    _plant(monkeypatch, "rope", MEGALITE, overwrite)
    _plant(monkeypatch, "rope", EAGER_TORCH, look)
    ours, *others = VARIANTS["rope"]
    monkeypatch.setitem(VARIANTS, "rope", [replace(ours, overwrites=True), *others])
    out = tmp_path / "kernels.json"
    program.main(["--ops", "rope", "--models", "8B", "--rounds", "2", "--out", str(out)])
    rows = [row for row in json.loads(out.read_text())["rows"] if row["kind"] in (MEGALITE, EAGER_TORCH)]
    assert [(row["part"], row["status"]) for row in rows] == [
        *[("forward", AGREEMENT)] * 2,
        *[("backward", AGREEMENT)] * 2,
    ]


@pytest.mark.usefixtures("_fake_gpu", "_uncompiled")
def test_a_kernel_that_fails_while_it_is_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The others are timed all the same."""
    runs = itertools.count()

    def fail_later(y: Tensor, _: object) -> Tensor:
        if next(runs):
            raise RuntimeError("out of memory")
        return y

    _plant(monkeypatch, "swiglu", MEGALITE, fail_later)
    out = tmp_path / "kernels.json"
    assert program.main(["--ops", "swiglu", "--models", "8B", "--rounds", "2", "--out", str(out)]) == 1
    found = {(row["part"], row["variant"]): row for row in json.loads(out.read_text())["rows"]}
    assert found["forward", MEGALITE]["status"] == "failed: RuntimeError: out of memory"
    assert found["forward", EAGER_TORCH]["seconds"] is not None


def test_without_a_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "has_cuda", lambda: False)
    assert program.main([]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "python -m megalite_kernels.benchmarks: error: there is no CUDA device, and nothing is timed without one; "
        "--check compares results on any machine"
    ]
    monkeypatch.setattr(program, "USES_INTERPRETER", False)
    assert program.main(["--check"]) == 2
    assert "set TRITON_INTERPRET=1" in capsys.readouterr().err


def test_with_a_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(program, "has_cuda", lambda: True)
    monkeypatch.setattr(program, "USES_INTERPRETER", True)
    assert program.main([]) == 2
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
    monkeypatch.setattr(program, "USES_INTERPRETER", False)
    (tmp_path / "file").touch()
    assert program.main(["--out", str(tmp_path / "file" / "x.json")]) == 2
    assert f"--out {tmp_path}/file/x.json: its folder cannot be made: " in capsys.readouterr().err
    monkeypatch.setattr(program, "HAS_TRITON", False)
    assert program.main([]) == 2
    assert "Triton is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ops", "swiglu", "gelu"], "argument --ops: invalid choice: 'gelu' (choose from"),
        (["--models", "1B"], "argument --models: invalid choice: '1B' (choose from"),
        (["--rounds", "1"], "argument --rounds: '1' must be a whole number of at least 2"),
        (["--rounds", "x"], "argument --rounds: 'x' must be a whole number of at least 2"),
        (["--out", "kernels"], "argument --out: 'kernels' must end in .json"),
    ],
)
def test_bad_options(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        program.main(options)
    assert said in capsys.readouterr().err


def test_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_smi("GPU-0") == {}
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '550.1, 700.00 W, 1980 MHz, 2619 MHz'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert nvidia_smi("GPU-0")["power.limit"] == "700.00 W"
