"""Checkpoints of adapters: they hold the factors alone, go on in any layout, and know their base."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from four_bits import needs_integers
from ranks import Ranks
from torch import Tensor
from toy_jobs import MODEL, assemble, config_of, load_and_train, make, one_rank, restorer, state_of, train_and_save

from megalite.base.errors import InputError
from megalite.checkpoint.run.resume import check_start
from megalite.checkpoint.run.same_run import refuse_other_adapter, refuse_other_factors, refuse_other_optimizer
from megalite.checkpoint.run.tensors import Checkpoint
from megalite.checkpoint.weights.read import check_base, reader_of
from megalite.checkpoint.weights.sources import open_weights
from megalite.config.layers import targets_of
from megalite.config.layout import Layout
from megalite.config.model_schema import Adapter, Experts
from megalite.config.schema import Checkpoint as Saving
from megalite.config.schema import Config
from megalite.plan.model.weights import held_weights, weights
from megalite.plan.parts.adapted import factor_names, magnitude_name
from megalite_kernels.nf4 import dequantize_nf4, quantize_nf4

EXPERTS = Experts(4, 2, width=8, shared_width=12, scores="sigmoid", correction_rate=0.01)
MIXED = replace(MODEL, experts=EXPERTS)
ADAPTER = Adapter(rank=3, alpha=6.0)


def adapted(layout: Layout, base: Path, adapter: Adapter = ADAPTER) -> Config:
    return replace(config_of(layout, MIXED), adapter=adapter, checkpoint=Saving(weights=f"megalite:{base}"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    with one_rank():
        train_and_save(config_of(Layout(), MIXED), folder, 2)
    return folder / "step-00000002"


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], dict[str, Tensor]]:
    """An adapter saved after two of four steps of one process, all losses, and the weights at the end."""
    folder = tmp_path_factory.mktemp("adapter")
    with one_rank():
        losses, at_4 = train_and_save(adapted(Layout(), base), folder, 2, 4)
    return folder / "step-00000002", losses, {name: part.values for name, part in at_4.items()}


def test_a_run_goes_on_in_another_layout(
    base: Path, trained: tuple[Path, list[float], dict[str, Tensor]], ranks: Ranks, tmp_path: Path
) -> None:
    _, losses, expected = trained
    first = adapted(Layout(pp=2, dp_shard=2, tp=2), base)
    began = ranks.run(train_and_save, first, tmp_path, 2)
    then = adapted(Layout(dp_replicate=2, dp_shard=2, cp=2, ep=2), base)
    resumed = ranks.run(load_and_train, then, tmp_path / "step-00000002", 4)
    assert [*began[0][0], *resumed[0][2]] == pytest.approx(losses, rel=1e-10)
    at_4 = assemble([parts for *_, parts in resumed])
    held = held_weights(first.model)
    assert {name for name in at_4 if " " not in name and "lora" in name} == held.keys()
    for name, part in expected.items():
        exact = name not in held and " " not in name
        torch.testing.assert_close(at_4[name], part, rtol=0 if exact else 1e-9, atol=0 if exact else 1e-12)


def test_checkpoints_hold_factors_and_the_number_of_their_base(
    base: Path, trained: tuple[Path, list[float], dict[str, Tensor]], ranks: Ranks, tmp_path: Path
) -> None:
    found = Checkpoint(trained[0])
    model = {name.removeprefix("model.") for name in found.tensors if name.startswith("model.")}
    assert model == held_weights(adapted(Layout(), base).model).keys()
    ranks.run(train_and_save, adapted(Layout(tp=2, pp=2, dp_replicate=2), base), tmp_path, 1)
    number = Checkpoint(tmp_path / "step-00000001").read("adapter.base")
    assert number == found.read("adapter.base") != 0


def number_of(config: Config) -> int | None:
    loading = restorer(make(config))
    loading.weights(str(config.checkpoint.weights))
    return loading.base


def test_a_tied_embedding_is_counted_once(ranks: Ranks, tmp_path: Path) -> None:
    tied = replace(MODEL, tie_embeddings=True)
    with one_rank():
        train_and_save(config_of(Layout(), tied), tmp_path, 1)

    def config(layout: Layout) -> Config:
        saving = Saving(weights=f"megalite:{tmp_path / 'step-00000001'}")
        return replace(config_of(layout, tied), adapter=ADAPTER, checkpoint=saving)

    with one_rank():
        alone = number_of(config(Layout()))
    found = ranks.run(number_of, config(Layout(pp=2, tp=2, dp_shard=2)))
    assert {alone} == set(found)


@needs_integers
@pytest.mark.parametrize("dora", [False, True])
def test_a_base_in_four_bits_goes_on_and_is_merged_as_it_computed(dora: bool, ranks: Ranks, tmp_path: Path) -> None:
    model = replace(MODEL, width=64, head_width=32, ffn=128)
    if not dora:  # which experts do not have
        model = replace(model, experts=replace(EXPERTS, width=64, shared_width=128))
    with one_rank():
        train_and_save(config_of(Layout(), model), tmp_path / "base", 1)
    base = tmp_path / "base/step-00000001"

    def config(layout: Layout, **keys: str) -> Config:
        found = replace(config_of(layout, model), adapter=replace(ADAPTER, dora=dora, **{"base": "nf4", **keys}))
        return replace(found, checkpoint=Saving(weights=f"megalite:{base}"))

    with one_rank():
        losses, _ = train_and_save(config(Layout()), tmp_path / "alone", 2, 4)
        plain, _ = train_and_save(config(Layout(), base="compute"), tmp_path / "plain", 1)
        with pytest.raises(InputError, match=r'adapter.base = "compute": the checkpoint .* has "nf4"'):
            restorer(make(config(Layout(), base="compute"))).all(tmp_path / "alone/step-00000002")
    assert plain[0] != pytest.approx(losses[0], rel=1e-6)
    began = ranks.run(train_and_save, config(Layout(pp=2, dp_shard=2, tp=2)), tmp_path / "ranks", 2)
    then = config(Layout(dp_replicate=2, dp_shard=2, cp=2, ep=1 if dora else 2))
    resumed = ranks.run(load_and_train, then, tmp_path / "ranks/step-00000002", 4)
    assert [*began[0][0], *resumed[0][2]] == pytest.approx(losses, rel=1e-10)
    files = [
        Checkpoint(tmp_path / each) for each in ("alone/step-00000002", "ranks/step-00000002", "plain/step-00000001")
    ]
    assert len({int(each.read("adapter.base")) for each in files}) == 1  # of the base as it is in its files
    found, factors = open_weights(str(tmp_path / "alone/step-00000002")), files[0]
    for name, weight in weights(model).items():
        whole, expected = torch.empty(weight.shape, dtype=torch.float64), Checkpoint(base).read(f"model.{name}")
        reader_of(found).fill({f"model.{name}": whole})
        if weight.role.fits_four_bits:
            expected = dequantize_nf4(quantize_nf4(expected), torch.float32).double()
            first, second = (factors.read(f"model.{each}") for each in factor_names(name))
            norms, expected = expected.norm(dim=-1), expected + second @ first * 2.0
            if dora:
                added = factors.read(f"model.{magnitude_name(name)}")
                assert added.any()
                expected *= ((norms + added) / expected.norm(dim=-1))[:, None]
            torch.testing.assert_close(whole, expected, rtol=1e-6, atol=1e-7)
            part = torch.empty_like(whole[..., 5:69])
            reader_of(found).fill_parts([(f"model.{name}", part, [*[0] * (whole.ndim - 1), 5])])
            assert part.equal(whole[..., 5:69])
        else:
            assert whole.equal(expected)


def test_another_base_is_refused(
    base: Path, trained: tuple[Path, list[float], dict[str, Tensor]], tmp_path: Path
) -> None:
    with one_rank():
        train_and_save(config_of(Layout(), MIXED), tmp_path, 1)
        config = adapted(Layout(), tmp_path / "step-00000001")
        with pytest.raises(InputError, match=r"is not the model beside which the adapter .* was trained"):
            restorer(make(config)).all(trained[0])


@pytest.mark.parametrize(
    ("adapter", "told"),
    [
        (None, "adapter = null: the checkpoint .* has an adapter"),
        (replace(ADAPTER, rank=4), "adapter.rank = 4: the checkpoint .* has 3"),
        (replace(ADAPTER, alpha=7.0), "adapter.alpha = 7.0: the checkpoint .* has 6.0"),
        (replace(ADAPTER, targets=["query"]), "adapter.targets = "),
        (replace(ADAPTER, dora=True), "adapter.dora = true: the checkpoint .* has false"),
    ],
)
def test_another_adapter_is_refused(
    base: Path, trained: tuple[Path, list[float], dict[str, Tensor]], adapter: Adapter | None, told: str
) -> None:
    with one_rank(), pytest.raises(InputError, match=told):
        restorer(make(replace(adapted(Layout(), base), adapter=adapter))).all(trained[0])


def test_names_of_all_targets_in_any_order_are_all_and_dropout_may_change(
    base: Path, trained: tuple[Path, list[float], dict[str, Tensor]]
) -> None:
    named = [*reversed(targets_of(MIXED)[:-2])]
    with one_rank():
        restorer(make(adapted(Layout(), base, replace(ADAPTER, targets=named)))).all(trained[0])
        without = adapted(Layout(), base, replace(ADAPTER, targets=named[1:]))
        with pytest.raises(InputError, match=r"adapter.targets = "):
            restorer(make(without)).all(trained[0])
    dropping = replace(adapted(Layout(), base), adapter=replace(ADAPTER, dropout=0.5))
    refuse_other_adapter(trained[0], adapted(Layout(), base), dropping)


def test_another_optimizer_may_begin_with_the_factors(base: Path) -> None:
    here = adapted(Layout(), base)
    with pytest.raises(InputError, match=r"begin a new run from its weights with adapter\.weights=there"):
        refuse_other_optimizer(Path("there"), here, replace(here, optim=replace(here.optim, name="muon")))


def test_a_run_begins_with_the_factors_of_another(
    base: Path, trained: tuple[Path, list[float], dict[str, Tensor]]
) -> None:
    with one_rank():
        job = make(adapted(Layout(), base))
        restorer(job).factors(str(trained[0]))
        mine = state_of(job).held()
        with pytest.raises(InputError, match=r"adapter.weights = .*: has rank 3, alpha 6, dora false, targets all"):
            restorer(make(adapted(Layout(), base, replace(ADAPTER, alpha=5.0)))).factors(str(trained[0]))
        with pytest.raises(InputError, match=r"adapter.weights = .*: has no adapter"):
            refuse_other_factors("somewhere", open_weights(str(base)), job.config)
    found = Checkpoint(trained[0])
    assert mine
    for name, tensor in mine.items():
        assert found.read(name).equal(tensor.to_local())  # type: ignore[attr-defined]


def test_a_base_is_needed(tmp_path: Path) -> None:
    config = replace(config_of(Layout()), adapter=ADAPTER)
    with pytest.raises(InputError, match=r"checkpoint.weights = null: is needed for adapter"):
        check_start(config, tmp_path)


def test_its_weights_are_those_of_the_merged_model(
    base: Path, trained: tuple[Path, list[float], dict[str, Tensor]]
) -> None:
    found, plain, factors = open_weights(str(trained[0])), Checkpoint(base), Checkpoint(trained[0])
    reader, changed = reader_of(found), 0
    assert found.index.tensors.keys() == plain.tensors.keys() & {f"model.{name}" for name in weights(MIXED)}
    for name, stored in found.index.tensors.items():
        whole = torch.empty(stored.shape, dtype=torch.float64)
        reader.fill({name: whole})
        expected, layer = plain.read(name), name.removesuffix(".weight")
        if f"{layer}.lora_a.weight" in factors.tensors:
            added = factors.read(f"{layer}.lora_b.weight") @ factors.read(f"{layer}.lora_a.weight") * 2.0
            assert added.any()
            expected, changed = expected + added, changed + 1
        assert whole.equal(expected)
        rows = torch.empty(1, *stored.shape[1:], dtype=torch.float64)
        reader.fill_parts([(name, rows, [stored.shape[0] - 1, *[0] * (len(stored.shape) - 1)])])
        assert rows[0].equal(whole[-1])
    assert changed == len(held_weights(adapted(Layout(), base).model)) // 2
    assert found.model == MIXED
    assert found.model.adapter is None


def test_a_base_that_leads_back_is_refused(
    trained: tuple[Path, list[float], dict[str, Tensor]], base: Path, tmp_path: Path
) -> None:
    with one_rank():
        config = adapted(Layout(), trained[0])  # an adapter beside a model with an adapter
        train_and_save(config, tmp_path, 1)
    path = tmp_path / "step-00000001"
    twice, once = open_weights(str(path)), open_weights(str(trained[0]))
    name = "model.layers.0.attention.q.weight"
    values = [torch.empty(found.index.tensors[name].shape, dtype=torch.float64) for found in (twice, once)]
    for found, value in zip((twice, once), values, strict=True):
        reader_of(found).fill({name: value})
    assert not values[0].equal(values[1])
    with pytest.raises(InputError, match="leads back to the adapter itself; if it lies elsewhere"):
        open_weights(str(path), base=f"megalite:{path}")


def test_what_is_merged_is_refused_beside_another_base(
    base: Path, trained: tuple[Path, list[float], dict[str, Tensor]], tmp_path: Path
) -> None:
    found = open_weights(str(trained[0]))
    with one_rank():
        train_and_save(config_of(Layout(), MIXED), tmp_path, 1)
    other = open_weights(str(tmp_path / "step-00000001"))
    with pytest.raises(InputError, match="is not the model beside which"):
        check_base(replace(found, dense=other))
    check_base(found)
