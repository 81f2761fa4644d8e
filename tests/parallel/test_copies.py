"""bf16 training on one data-parallel rank: copies of parameters beside them, without FSDP2."""

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from functorch.compile import make_boxed_func
from mode_cases import curve
from ranks import Ranks
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from toy_jobs import advance, config_of, load_and_train, make, one_rank, restorer, save, train_and_save

from megalite.commands.verify import random_batch
from megalite.config.layers import Scores
from megalite.config.layout import Layout
from megalite.config.model_schema import Adapter, Model
from megalite.config.parallel_schema import DataParallel
from megalite.config.schema import Config, Optim
from megalite.distributed.mesh import Mesh
from megalite.optim.build import build_optimizer
from megalite.parallel.context import attention, takes_parts
from megalite.parallel.copies import Copies
from megalite.parallel.parameter import copy_of, cut, sum_of_gradients
from megalite.parallel.tensor import ColumnLinear, columns
from megalite.plan.parts.part import Weight
from megalite.plan.parts.roles import UP_PROJECTION
from megalite.train.step import gradients
from megalite_kernels.rope_of_parts import _InPlace, _op

MODEL = Model(2, 16, 4, 2, None, 24, 40, 16, qk_norm=True, qkv_bias=True)
EIGHTS = replace(MODEL, heads=2, kv_heads=2, ffn=32)  # its sizes fit products in 8 bits

ONE = Layout()


def configured(mode: str, layout: Layout = ONE, schedule: str = "1f1b", model: Model = MODEL, **train: Any) -> Config:
    """zero3 is FSDP2's on one rank too; with any other mode copies are kept."""
    config = config_of(layout, model, schedule)
    parallel = replace(config.parallel, data=DataParallel(mode))  # type: ignore[arg-type]
    train = {"precision": "bf16"} | train
    batch = replace(config.batch, micro=1)
    return replace(config, parallel=parallel, train=replace(config.train, **train), batch=batch)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"model": replace(MODEL, tie_embeddings=True)},
    "split backward": {"schedule": "zb_h1"},
    "two stages": {"schedule": "zbv", "model": replace(MODEL, layers=4)},
    "full recompute": {"recompute": "full"},
    "selective and offloaded": {"recompute": "selective", "offload_activations": True},
}


@pytest.mark.parametrize("name", CASES)
def test_one_rank_trains_as_with_fsdp2_to_the_last_bit(name: str) -> None:
    """On a CPU, whose products round what they add to float32 sums as FSDP2 does."""
    with one_rank():
        ours, theirs = (make(configured(mode, **CASES[name])) for mode in ("zero1", "zero3"))
        assert (ours.plan.fsdp, ours.plan.copies, theirs.plan.fsdp, theirs.plan.copies) == (False, True, True, False)
        assert advance(ours, 0, 3) == advance(theirs, 0, 3)
        for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            assert mine.to_local().equal(other.to_local()), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("placement", ["device", "host", "files"])
def test_copies_are_equal_to_parameters_after_every_step(
    optimizer: str, kernel: str, placement: str, tmp_path: Path
) -> None:
    config = configured("zero1")
    optim = Optim(optimizer, lr=0.01, placement=str(tmp_path) if placement == "files" else placement)
    with one_rank():
        job = make(replace(config, optim=optim, kernels=replace(config.kernels_by_operation, adamw=kernel)))
        before = [param.to_local().clone() for _, param in job.named_parameters()]
        advance(job, 0, 2)
        assert not any(
            param.to_local().equal(old) for (_, param), old in zip(job.named_parameters(), before, strict=True)
        )
        for _, param in job.named_parameters():
            # Triton's interpreter cuts off what a GPU rounds.
            rtol = 2**-7 if kernel == "triton" else 2**-8
            torch.testing.assert_close(copy_of(param).float(), param._local_tensor, rtol=rtol, atol=0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_updates_write_copies_in_their_own_pass(optimizer: str, kernel: str) -> None:
    """Without `Copies`, which would make them again in another."""
    config = configured("zero1")
    kernels = replace(config.kernels_by_operation, adamw=kernel, muon=kernel)
    config = replace(config, optim=Optim(optimizer, lr=0.01), kernels=kernels)
    with one_rank():
        job = make(config)
        advance(job, 0, 1)
        job.optimizer = build_optimizer(job.stages.values(), config.model, config.optim, kernels)
        advance(job, 1, 2)
        for name, param in job.named_parameters():
            copy = copy_of(param).float()
            torch.testing.assert_close(copy, param._local_tensor, rtol=2**-7, atol=0, msg=name)  # Triton's cuts off


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("train", [{}, {"recompute": "full"}, {"offload_activations": True}], ids=str)
def test_queries_and_keys_turned_in_place_change_no_bit(
    train: dict[str, Any], samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured("zero1", model=replace(MODEL, qk_norm=False), **train)
    batch, kernels = replace(config.batch, micro=samples), replace(config.kernels_by_operation, rope="triton")
    config = replace(config, batch=batch, kernels=kernels)
    found, calls = [], Mock(wraps=_InPlace.apply)
    for turn in (calls, _op):
        monkeypatch.setattr(_InPlace, "apply", turn)
        with one_rank():
            job = make(config)
            loss = gradients(job, random_batch(job, 0))
            found.append([loss, *(sum_of_gradients(param)[0].clone() for _, param in job.named_parameters())])
    assert calls.call_count >= MODEL.layers
    assert all(map(torch.equal, *found))


def test_attention_that_copies_takes_no_parts() -> None:
    """Those would be kept beside the copies; nor do windows of several samples, which would be copied in every pass."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    whole = attention("ring", None, 8, cpu)
    ring, window = (attention("ring", None, 8, cpu, kind=kind) for kind in (Scores(sinks=True), Scores(4)))
    packed = attention("ring", None, 8, cuda, kind=Scores(4), kernel="flash")
    repeating = attention("ring", None, 8, cuda, kernel="efficient")
    assert [takes_parts(each, 2) for each in (whole, ring, window, packed, repeating)] == [True, *[False] * 4]
    assert [takes_parts(each, 1) for each in (whole, packed, repeating)] == [True, True, False]


@pytest.mark.parametrize("write", ["cut", "local", "global"])
def test_a_copy_is_made_again_after_whoever_wrote_the_parameter(write: str) -> None:
    with one_rank():
        job = make(configured("zero1"))
        advance(job, 0, 1)
        (stage,), batch = job.stages.values(), random_batch(job, 0)
        param = stage.layers["1"].mlp.up.weight
        with torch.no_grad():
            match write:
                case "cut":  # as a checkpoint is read
                    cut(param, tuple(param.shape)).to_local()[1:3].mul_(-3)
                case "local":
                    param.to_local().mul_(-3)
                case "global":
                    param.copy_(-3 * param)
        assert not copy_of(param).equal(param._local_tensor.bfloat16())
        gradients(job, batch)
        assert copy_of(param).equal(param._local_tensor.bfloat16())


def test_a_copy_is_made_again_after_the_one_beside_it() -> None:
    """They lie in one tensor, but each has a version of its own."""
    with one_rank():
        job = make(configured("zero1"))
        (copies,), (stage,) = job.copies, job.stages.values()
        copies.refresh()
        for layer in (stage.layers["0"].mlp.gate, stage.layers["0"].mlp.up):
            with torch.no_grad():
                layer.weight.to_local().mul_(-3)
            copies.refresh()
            assert copy_of(layer.weight).equal(layer.weight._local_tensor.bfloat16())


class Sharing(nn.Module):
    """Two layers of one input."""

    share_input = ("first", "second")

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.first, self.second = (
            ColumnLinear(Weight((rows, 4), UP_PROJECTION), mesh.tp, Weight((rows,), UP_PROJECTION.bias))
            for rows in (3, 2)
        )
        self.double().to_empty(device="cpu")
        generator = torch.Generator().manual_seed(0)
        for weight in self.parameters():
            nn.init.normal_(weight.data.to_local(), generator=generator)

    def through(self, together: bool) -> tuple[Tensor, ...]:
        """Outputs, and gradients of the input and of parameters. together: those of outputs are parts of a tensor."""
        x = torch.arange(24, dtype=torch.float64).reshape(3, 2, 4).requires_grad_()
        outputs = columns(x, (self.first, self.second), self.mesh.tp.get_group())
        loss = torch.cat(outputs, dim=-1).square().sum() if together else sum(y.square().sum() for y in outputs)
        loss.backward()
        return *outputs, x.grad, *(weight.grad.to_local() for weight in self.parameters())


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func).removeprefix("aten.")] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("together", [False, True])
def test_copies_of_weights_that_share_an_input_are_one_weight(together: bool) -> None:
    """In forward, which adds biases, and in backward where their outputs' gradients lie side by side."""
    with one_rank():
        mesh = Mesh.build(Layout(), torch.device("cpu"))
        assert mesh is not None
        apart, joint = Sharing(mesh), Sharing(mesh)
        Copies(joint, torch.float64).refresh()
        with Operations() as operations:
            found = joint.through(together)
        torch.testing.assert_close(found, apart.through(together), rtol=1e-14, atol=1e-14)
        counts = operations.counts
        assert counts["addmm.default"] == 1
        assert counts["mm.default"] + counts["addmm_.default"] + counts["addmm.out"] == (1 if together else 2) + 2
        assert counts["sum.dim_IntList"] == (1 if together else 2)  # gradients of biases


def test_checkpoints_of_either_path_resume_in_the_other(tmp_path: Path) -> None:
    with one_rank():
        for first, then in (("zero1", "zero3"), ("zero3", "zero1")):
            path = tmp_path / first
            losses, parts = train_and_save(configured(first), path, 2, 4)
            loaded = load_and_train(configured(then), path / "step-00000002", 4)
            assert loaded[2] == losses[2:]
            assert all(loaded[3][name].values.equal(part.values) for name, part in parts.items())


def test_a_rollback_reads_copies_anew(tmp_path: Path) -> None:
    with one_rank():
        job = make(configured("zero1"))
        advance(job, 0, 2)
        path = save(job, tmp_path, 2)
        expected = advance(job, 2, 4)
        restorer(job).all(path)
        assert advance(job, 2, 4) == expected


LAYOUTS = {
    "tp": configured("zero1", Layout(tp=2)),
    "tp, zb_h1": configured("ddp", Layout(pp=2, tp=2), "zb_h1"),
    "tied ends of a pipeline": configured("zero1", Layout(pp=2), "zbv", replace(MODEL, layers=4, tie_embeddings=True)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_one_data_parallel_rank_train_as_two_with_fsdp2(name: str, ranks: Ranks) -> None:
    config = LAYOUTS[name]
    parallel = replace(config.parallel, dp_shard=2, data=DataParallel("zero3"))
    expected = ranks.run(curve, replace(config, parallel=parallel), 3)[0]
    for (loss, norm), (loss_here, norm_here) in zip(expected, ranks.run(curve, config, 3)[0], strict=True):
        assert loss_here == pytest.approx(loss, rel=1e-3)
        assert norm_here == pytest.approx(norm, rel=1e-2)


class Compiling:
    """Layers are compiled for autograd alone, in one graph each. products: matrix products of each graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compile, self.products = torch.compile, list[int]()
        options = {"backend": aot_autograd(fw_compiler=self._noted), "fullgraph": True}
        monkeypatch.setattr(torch, "compile", lambda layer, **given: compile(layer, **given, **options))
        torch.compiler.reset()

    def _noted(self, graph: Any, _: Any) -> Any:
        names = [getattr(node.target, "__name__", "") for node in graph.graph.nodes]
        self.products.append(sum(name in ("mm.default", "addmm.default") for name in names))
        return make_boxed_func(graph.forward)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("optimizer", "kernel"), [("adamw", "triton"), ("muon", "torch")])
def test_compiled_layers_have_one_product_of_what_shares_an_input(
    optimizer: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one for each gradient. They train as eager layers without copies do; in float64, so that it can be told."""
    compiling = Compiling(monkeypatch)
    config = configured("zero1", model=replace(MODEL, qk_norm=False), precision="fp64")
    kernels = replace(config.kernels_by_operation, rope=kernel, swiglu=kernel)
    batch = replace(config.batch, global_=2)
    config = replace(config, optim=Optim(optimizer, lr=0.01), kernels=kernels, batch=batch)
    with one_rank():
        eager, compiled = (make(replace(config, train=replace(config.train, compile=each))) for each in (False, True))
        compiled.copies.extend(Copies(stage, torch.float64) for stage in compiled.stages.values())
        assert advance(compiled, 0, 3) == pytest.approx(advance(eager, 0, 3), rel=1e-12)
        for (name, mine), (_, other) in zip(compiled.named_parameters(), eager.named_parameters(), strict=True):
            torch.testing.assert_close(mine.to_local(), other.to_local(), rtol=1e-10, atol=1e-12, msg=name)
    assert compiling.products == [4, 8]


@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_have_adapters_of_weights_that_are_their_own_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such weights lie one after another, too, which the compiler must be told."""
    Compiling(monkeypatch)
    config = replace(configured("zero1"), adapter=Adapter(rank=3))
    with one_rank():
        eager, compiled = (make(replace(config, train=replace(config.train, compile=each))) for each in (False, True))
        assert advance(compiled, 0, 2) == pytest.approx(advance(eager, 0, 2), rel=1e-3)


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs a C++ compiler")
def test_compiled_layers_hand_their_gradients_to_the_parameters() -> None:
    """Sums and roundings of fused operations differ."""
    with one_rank():
        eager, compiled = (
            make(configured("zero1", model=replace(MODEL, layers=1), compile=each)) for each in (False, True)
        )
        losses = advance(eager, 0, 2)
        assert advance(compiled, 0, 2) == pytest.approx(losses, rel=1e-3)
        for job in (eager, compiled):
            gradients(job, random_batch(job, 2))
        for (name, mine), (_, other) in zip(compiled.named_parameters(), eager.named_parameters(), strict=True):
            assert mine.grad.dtype == torch.float32
            ours, theirs = mine.grad.to_local(), other.grad.to_local()
            assert (ours - theirs).norm() <= 0.1 * theirs.norm() + 1e-6, name


@pytest.mark.parametrize(
    ("weight", "precision"), [(".mlp.up", "bf16"), (".mlp.up", "fp8"), ("head.output", "bf16"), ("embed", "bf16")]
)
def test_gradients_of_micro_batches_are_summed_in_float32(
    weight: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products that add to the sums round nothing: they come nearer to the gradients of float32 products."""
    with one_rank():
        job = make(configured("zero1", model=replace(EIGHTS, tie_embeddings=weight == "embed"), precision=precision))
        batch = random_batch(job, 0)

        def summed() -> Tensor:
            gradients(job, batch)
            grads = [param.grad.to_local().double() for name, param in job.named_parameters() if weight in name]
            job.optimizer.zero_grad()
            return torch.cat([grad.flatten() for grad in grads])

        rounded = summed()
        for module in ("parallel.product", "parallel.float8", "model.decoder"):
            monkeypatch.setattr(f"megalite.{module}.has_gpu_products", lambda device: True)
        wide = summed()
        # Sums of float32 products, each rounded to bf16 or not.
        assert 0 < (rounded - wide).norm() < 2**-8 * wide.norm()
        assert wide.bfloat16().double().ne(wide).any()
