"""The predicted time of a step: its parts, its limits, and what makes it longer or shorter."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import megalite.cost.predict as predicting
from megalite.base.errors import InputError
from megalite.config.layers import Mixture, layer_kinds
from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.config.schema import Config, Optim
from megalite.cost.cluster import Cluster, Drive, Link, load_cluster
from megalite.cost.flows import flows
from megalite.cost.host_copies import HOST_BANDWIDTH, HOST_SHARE
from megalite.cost.layer import ROUTED_BYTES
from megalite.cost.network import Group
from megalite.cost.predict import HOST_UPDATE_BYTES, Trial, predict, state_seconds, timeline
from megalite.cost.program import MEGALITE
from megalite.cost.rank_seconds import seconds_of
from megalite.cost.schedule_tables import Cost
from megalite.cost.share import share_of
from megalite.cost.stage_time import SPLIT_OVERHEAD
from megalite.cost.stages import Shared, Timer
from megalite.plan.parts.experts import ExpertsPart
from megalite.plan.resolved import resolve
from megalite.schedule.actions import Kind
from megalite.schedule.generate import NAMES
from megalite_kernels.adamw import bytes_moved as adamw_bytes
from megalite_kernels.add_rms_norm import bytes_moved as norm_bytes
from megalite_kernels.grad_norm import bytes_moved as grad_norm_bytes
from megalite_kernels.linear_cross_entropy import bytes_moved as loss_bytes
from megalite_kernels.nf4 import bytes_moved as nf4_bytes
from megalite_kernels.routed_rows import bytes_moved as routed_bytes
from megalite_kernels.swiglu import bytes_moved as swiglu_bytes
from megalite_kernels.weighted_swiglu import bytes_moved as weighted_bytes

H100 = load_cluster("h100_sxm")
TIMER = Timer(H100)
HOST_UPDATE = ("optim.placement=host", "optim.update_on=host")
NETWORK = H100.network
BUFFERS = "parallel.experts.buffers"


def configured(gpus: int, *keys: str, model: str = "tiny") -> Config:
    given = ["run.device=cuda", "train.precision=bf16", *keys]
    return check(load([f"configs/model/{model}.yaml"], given), gpus)


def pipelined(schedule: str, pp: int, m: int, mode: str, layers: int, virtual: int) -> Config:
    keys = [f"parallel.pp={pp}", f"parallel.pipeline.schedule={schedule}", f"parallel.data.mode={mode}"]
    stages = [f"parallel.pipeline.virtual_stages={virtual}"] if schedule == "interleaved_1f1b" else []
    return configured(2 * pp, *keys, *stages, f"model.layers={layers}", f"batch.global={2 * m}")


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_one_micro_batch_takes_as_long_under_zero1_as_under_zero2(replicas: int, pp: int) -> None:
    keys = [f"parallel.pp={pp}", f"parallel.dp_replicate={replicas}", "batch.global=4", "batch.micro=1"]
    once, each = (
        predict(configured(4 * pp, *keys, f"parallel.data.mode={mode}"), H100, TIMER).seconds
        for mode in ("zero1", "zero2")
    )
    assert once == pytest.approx(each, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.integers(2, 4),
    st.integers(1, 45),
    st.sampled_from(["ddp", "zero1", "zero2", "zero3"]),
    st.integers(15, 24),
    st.integers(2, 3),
)
@example("dualpipev", 2, 42, "zero2", 16, 2)  # whose reductions fall behind compute
@example("1f1b", 3, 45, "ddp", 20, 2)  # whose rounds alternate
@example("zb_h2", 3, 36, "zero3", 20, 2)  # whose slowest rank waits at first, and determines the pace after 51
def test_a_step_that_is_cut_short_takes_as_long_as_the_whole(
    schedule: str, pp: int, m: int, mode: str, layers: int, virtual: int
) -> None:
    config = pipelined(schedule, pp, m, mode, layers, virtual)
    short = predict(config, H100, TIMER)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(predicting, "enough", lambda config, m, *_: m)
        whole = predict(config, H100, TIMER)
    trial = Trial(short.plan, TIMER)
    catches_up = trial.left_out > 0 and trial.round < (1 - 1e-3) * trial.pace
    assert -1e-3 <= short.seconds / whole.seconds - 1 <= (5e-3 if catches_up else 1e-3)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 12), st.sampled_from(["zero1", "zero3"]), st.booleans()
)
def test_parts_add_up_to_the_step(schedule: str, pp: int, m: int, mode: str, host: bool) -> None:
    config = pipelined(schedule, pp, m, mode, 16, 2)
    config = replace(config, optim=replace(config.optim, placement="host" if host else "device"))
    found = predict(config, H100, TIMER)
    assert sum(found.parts.values()) == pytest.approx(found.seconds, rel=1e-9)
    assert min(found.parts.values()) >= 0
    assert found.low < found.seconds < found.high
    assert max(found.busy) <= found.seconds
    assert Trial(found.plan, TIMER).seconds == found.seconds
    if m <= 2 * pp:
        assert timeline(found, TIMER).makespan + found.parts["optimizer"] == pytest.approx(found.seconds, rel=1e-9)


def test_muon_on_the_host_streams_its_momentum_over_the_bus_and_updates_the_rest_there() -> None:
    def optimizer(*keys: str) -> float:
        return predict(configured(8, "batch.global=64", *keys, model="llama3_8b"), H100, TIMER).parts["optimizer"]

    here, there = optimizer("optim.name=muon"), optimizer("optim.name=muon", *HOST_UPDATE)
    matrices = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336) / 8  # of a rank
    streamed = max(4 / (H100.gpu.host * HOST_SHARE), 8 / HOST_BANDWIDTH) * matrices
    others = (8_030_261_248 / 8 - matrices) * HOST_UPDATE_BYTES / HOST_BANDWIDTH
    assert there - here == pytest.approx(streamed + others, rel=0.03)  # but for copies of weights and gradients
    assert there < optimizer(*HOST_UPDATE)


def test_a_base_on_the_host_takes_the_longer_of_compute_and_copies_in_every_pass() -> None:
    def seconds(*keys: str) -> float:
        adapter = "adapter.rank=16", "parallel.data.mode=zero3", "batch.global=1"
        return predict(configured(1, *adapter, *keys, model="llama3_8b"), H100, TIMER).seconds

    def added(*keys: str) -> float:
        return seconds("parallel.placement.parameters=host", *keys) - seconds(*keys)

    whole = 2 * 8_030_261_248 / (H100.gpu.host * HOST_SHARE)  # of one pass
    few, many = added("model.sequence_length=64"), added("model.sequence_length=32768")
    assert 1.9 * whole < few < 2 * whole, "copies take longer than compute beside them in both passes"
    embedding = 2 * 128_256 * 4096 / (H100.gpu.host * HOST_SHARE)
    assert many == pytest.approx(2 * embedding, rel=0.1), "which has nothing to compute meanwhile"


def test_trained_parameters_on_the_host_pass_through_the_device_with_their_states() -> None:
    def parts(*keys: str) -> dict[str, float]:
        sizes = "batch.global=64", "optim.placement=host", "parallel.data.mode=zero3"
        return predict(configured(8, *sizes, *keys, model="llama3_8b"), H100, TIMER).parts

    here, there = parts(), parts("parallel.placement.parameters=host")
    assert there["optimizer"] == pytest.approx(2 * here["optimizer"], rel=0.05), "16 bytes each way in place of 8"
    on_host = parts("parallel.placement.parameters=host", "optim.update_on=host")["optimizer"]
    assert on_host < parts("optim.update_on=host")["optimizer"], "nothing is copied"


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_streamed_states_are_never_slower_than_an_update_on_the_host_and_files_wait_for_the_drive(name: str) -> None:
    def optimizer(cluster: Cluster, *keys: str) -> float:
        config = configured(8, "batch.global=64", f"optim.name={name}", *keys, model="llama3_8b")
        return predict(config, cluster, Timer(cluster)).parts["optimizer"]

    files = "optim.placement=/mnt/nvme"
    assert optimizer(H100) < optimizer(H100, "optim.placement=host") < optimizer(H100, *HOST_UPDATE)
    drive = Drive(read=8e9, write=4e9, endurance=1e15)
    slow, twice = (replace(H100, drive=replace(drive, read=n * 8e9, write=n * 4e9)) for n in (1, 2))
    moved = (8 if name == "adamw" else 4) * 8_030_261_248  # Muon's embedding, head and norms have twice as many
    seconds = moved / 8e9 + moved / 4e9
    assert 0.999 * seconds < optimizer(slow, files) < 1.5 * seconds
    assert optimizer(twice, files) < 0.6 * optimizer(slow, files)
    assert optimizer(replace(H100, drive=replace(drive, read=1e15, write=1e15)), files) >= optimizer(
        H100, "optim.placement=host"
    )


@pytest.mark.parametrize("name", ["h100_sxm", "rtx4090", "gb200"])
@pytest.mark.parametrize("link", [5e9, 64e9, 450e9])
@pytest.mark.parametrize("memory", [5e9, 25e9, 500e9])
def test_the_device_updates_at_least_as_fast_as_the_host_whatever_the_bandwidths(
    name: str, link: float, memory: float
) -> None:
    """So `optim.update_on` has no value that chooses."""
    cluster = load_cluster(name)
    timer = Timer(replace(cluster, gpu=replace(cluster.gpu, host=link)))
    with patch("megalite.cost.predict.HOST_BANDWIDTH", memory):
        device, host = (
            state_seconds(1e9, 0.0, Config(optim=Optim(placement="host", update_on=where)), 8, timer)
            for where in ("device", "host")
        )
    assert device < host


def test_utilization_follows_from_tokens_a_second() -> None:
    config = configured(8, "batch.global=64", "parallel.tp=2", model="llama3_8b")
    found = predict(config, H100, TIMER)
    parameters = 7_504_924_672 - 32 * 2 * 4096 - 4096  # matrices of Llama 3 8B without the embedding
    scores = 32 * 12 * 4096 * 8192  # of attention, in full
    assert found.tokens_per_second == pytest.approx(64 * 8192 / found.seconds / 8)
    assert found.mfu_full == pytest.approx((6 * parameters + scores) * found.tokens_per_second / 989.4e12, rel=2e-3)
    assert found.mfu == pytest.approx((6 * parameters + scores / 2) * found.tokens_per_second / 989.4e12, rel=2e-3)


def test_a_single_gpu_waits_for_nobody() -> None:
    found = predict(configured(1, "batch.global=8", "batch.micro=2", model="llama3.2_1b"), H100, TIMER)
    assert {found.parts[kind] for kind in ("tensor", "context", "data", "bubble", "offload")} == {0.0}
    (stage,) = found.stages
    compute = 4 * (stage.forward.total + stage.backward.total)
    assert found.seconds == pytest.approx(compute + found.parts["optimizer"])


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3"])
def test_without_a_pipeline_nothing_waits_for_other_stages(mode: str) -> None:
    keys = ("batch.global=64", f"parallel.data.mode={mode}")
    found = predict(configured(64, *keys, model="llama3.2_1b"), H100, TIMER)
    assert found.bubble == 0
    assert found.parts["data"] > 0
    assert sum(found.parts.values()) == pytest.approx(found.seconds)


def test_what_is_recomputed_takes_time() -> None:
    def seconds(mode: str) -> float:
        return predict(configured(8, "batch.global=8", f"train.recompute={mode}", model="llama3_8b"), H100).seconds

    assert seconds("none") < seconds("selective") < seconds("full")


LAYOUTS = [
    ["parallel.tp=8"],
    ["parallel.pp=4", "parallel.tp=2"],
    ["parallel.cp=4"],
    ["parallel.data.mode=zero2"],
    ["parallel.data.mode=zero3", "parallel.dp_replicate=2"],
]


def faster(link: Link) -> Link:
    return replace(link.faster(2), latency=link.latency / 2)


@pytest.mark.parametrize("keys", LAYOUTS)
def test_faster_links_and_gpus_never_take_longer(keys: list[str]) -> None:
    config = configured(16, "batch.global=32", *keys, model="llama3_8b")
    gpu, levels = H100.gpu, tuple(replace(level, link=faster(level.link)) for level in H100.levels)
    better: list[Cluster] = [
        replace(H100, network=faster(NETWORK)),
        replace(H100, levels=levels),
        replace(H100, gpu=replace(gpu, bandwidth=2 * gpu.bandwidth)),
        replace(H100, gpu=replace(gpu, power=1.2 * gpu.power)),
    ]
    usual = predict(config, H100, TIMER).seconds
    assert all(predict(config, cluster).seconds <= usual for cluster in better)
    assert any(predict(config, cluster).seconds < usual for cluster in better[:2])


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3"])
def test_more_data_parallel_gpus_never_make_a_step_longer(mode: str) -> None:
    each = [
        predict(
            configured(gpus, "batch.global=512", f"parallel.data.mode={mode}", model="llama3_8b"), H100, TIMER
        ).seconds
        for gpus in (8, 16, 64, 256)
    ]
    assert each == sorted(each, reverse=True)


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_gathers_and_reductions_of_a_step_share_the_wire(mode: str) -> None:
    """On slow links, they take longer than all compute, and no two of them run at once."""
    timer = Timer(load_cluster("h100_pcie"))
    keys = ("model.sequence_length=2048", "batch.global=1024", "batch.micro=1", f"parallel.data.mode={mode}")
    found = predict(configured(64, *keys, model="llama3_8b"), timer.cluster, timer)
    (stage,) = found.stages
    elements = stage.parameters * (1 + 1e-3)  # rows that are padded, and the norms
    gathered, reduced = (
        timer.net.collective(kind, each * elements, Group(64, 1))  # type: ignore[arg-type]
        for kind, each in (("all_gather", 2), ("reduce_scatter", 4))
    )
    wire = 16 * (reduced + 2 * gathered * (mode == "zero3"))
    assert 16 * (stage.forward.products + stage.backward.products) < wire < found.seconds
    assert found.seconds < 1.3 * (wire + found.parts["optimizer"])


def test_a_backward_pass_gathers_and_reduces_one_after_the_other() -> None:
    slow = replace(H100, network=H100.network.faster(0.01))
    timer = Timer(slow)
    found = predict(
        configured(64, "batch.micro=1", "batch.global=64", "parallel.data.mode=zero3", model="llama3_8b"), slow, timer
    )
    (stage,) = found.stages
    gathered, reduced = (
        timer.net.collective(kind, each * stage.parameters, Group(64, 1))  # type: ignore[arg-type]
        for kind, each in (("all_gather", 2), ("reduce_scatter", 4))
    )
    assert stage.backward.total + stage.longer[0] > gathered + reduced


def test_buffers_of_a_fixed_size_gather_all_tokens() -> None:
    """Instead of sending two rows a token, ranks gather those of eight, and send as many sums, in each pass."""
    keys = ["parallel.dp_shard=8", "parallel.ep=8", "batch.global=8", "batch.micro=1", "model.layers=2"]
    configs = [configured(8, *keys, f"{BUFFERS}={each}", model="mixtral_8x7b") for each in ("exact", "worst_case")]
    exact, fixed = (TIMER.layer(share_of(config, layer_kinds(config.model)[0])) for config in configs)
    tokens, group = 2 * 32768 * 4096, Group(8, 1)
    sent = 2 * TIMER.net.collective("all_to_all", 2 * tokens, group)
    gathered = sum(TIMER.net.collective(kind, 8 * tokens, group) for kind in ("all_gather", "all_to_all"))
    assert (exact.forward.experts, exact.backward.experts) == pytest.approx((sent, sent))
    assert (fixed.forward.experts, fixed.backward.experts) == pytest.approx((gathered, gathered))
    # A row is put in order once less each way; tokens of all are read or written thrice, and sums written.
    bytes_moved = (8 * 3 + 1) / 2 * 4 - 4 - 2 * 2 * 4
    assert fixed.forward.passes - exact.forward.passes == pytest.approx(TIMER.kernels.passes(bytes_moved * tokens / 2))


def test_links_that_both_kinds_of_parallelism_use_carry_all_of_it() -> None:
    """Eight ranks of a node: those of tp and those that share weights are on the same NVLink."""
    slow = replace(H100, levels=(replace(H100.levels[0], link=Link(5e9, 1e-6)),))
    timer = Timer(slow)
    keys = ("parallel.tp=2", "parallel.data.mode=zero3", "batch.global=64", "model.sequence_length=8192")
    found = predict(configured(8, *keys, model="llama3_8b"), slow, timer)
    each = {flow.axis: flow.seconds for flow in flows(found, timer)}
    assert min(each.values()) > 0.2 * found.seconds
    assert sum(each.values()) <= found.seconds


def test_more_than_the_peak_is_an_error_that_names_the_figures() -> None:
    gpu = replace(H100.gpu, measured={"bf16": 1.5 * H100.gpu.peak["bf16"]}, power=10_000.0)
    wrong = replace(H100, gpu=gpu)
    config = configured(1, "batch.global=64", "batch.micro=64", "model.sequence_length=512", model="llama3_70b")
    with pytest.raises(InputError, match=r"h100_sxm: a step of .* would be 1\d\d% of the peak: .*gpu.power = 10000 W"):
        predict(config, wrong)
    assert predict(config, H100).mfu < 1


def added_by(key: str) -> tuple[float, float]:
    """Seconds by which forward and backward of a layer of Llama 3 8B with adapters are longer with another key."""
    keys = ["run.device=cuda", "parallel.dp_shard=1", "batch.global=2", "batch.micro=1", "adapter.rank=16"]
    times = []
    for more in ([], [key]):
        config = load(["configs/model/llama3_8b.yaml"], [*keys, *more])
        times.append(Timer(H100).layer(share_of(config, layer_kinds(config.model)[0])))
    plain, other = times
    return other.forward.total - plain.forward.total, other.backward.total - plain.backward.total


ELEMENTS = 2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096  # of its matrices


def test_weights_in_four_bits_take_a_pass_more_in_forward_and_in_backward() -> None:
    expected = Timer(H100).kernels.passes(nf4_bytes(ELEMENTS, torch.bfloat16))
    assert added_by("adapter.base=nf4") == pytest.approx((expected, expected), rel=0.01)


def test_norms_of_rows_take_passes_over_outputs_and_one_over_weights() -> None:
    """Outputs are read and written; backward reads them and two gradients, and writes a gradient and a product."""
    outputs, passes = 8192 * (3 * 4096 + 2 * 1024 + 2 * 14336), Timer(H100).kernels.passes
    expected = passes(2 * (ELEMENTS + 2 * outputs)), passes(2 * 6 * outputs)
    assert added_by("adapter.dora=true") == pytest.approx(expected, rel=0.01)


def test_bytes_of_passes_are_those_that_kernels_declare() -> None:
    tokens, width, half = 64, 96, torch.bfloat16
    there, back = (2 * moved / tokens / width for moved in norm_bytes(tokens, width, half))  # two norms of a layer
    assert (MEGALITE.forward, MEGALITE.backward) == (there, back)
    columns = 2 * width  # that the up and gate projections make
    there, back = (moved / tokens / columns for moved in swiglu_bytes(tokens, width, half))
    assert (MEGALITE.forward_ffn, MEGALITE.backward_ffn) == (there, back)
    scores, places = 3 * 4, 3 * 8  # of three experts for a token
    mixture = ExpertsPart(width, Mixture(4, 3, columns)).passed(1)
    there, back = (moved / tokens for moved in weighted_bytes(3 * tokens, columns, half))
    found = mixture.hidden * MEGALITE.forward_ffn, mixture.hidden * MEGALITE.backward_ffn
    assert found == (there - scores, back - 2 * scores)
    there, back = (moved / tokens - places for moved in routed_bytes(tokens, 3, width, half))
    assert mixture.routed * ROUTED_BYTES == there + back  # spread and collected, each way
    fewer, more = (sum(loss_bytes(tokens, 8, columns, tokens, half)) for columns in (1, 2))
    weight = 3 * 8 * half.itemsize  # of a further column: it is read twice, and its gradient is written
    assert MEGALITE.logit == (more - fewer - weight) / tokens
    assert MEGALITE.optimizer == (adamw_bytes(width)[0] + grad_norm_bytes(width, torch.float32)[0]) / width


@pytest.mark.parametrize(
    ("keys", "copied", "added", "last"),
    [
        (["parallel.data.mode=zero3"], 4, 6, 0),  # copied out of all-gathers, and into reduce-scatters of float32
        (["parallel.data.mode=zero2"], 4, 6, 0),
        (["parallel.data.mode=zero3", "parallel.data.reduce_precision=bf16"], 4, 4, 0),
        (["parallel.data.mode=zero1"], 4, 10 * 3 / 4, 8),  # three of four micro-batches are added to those before
        (["parallel.data.mode=ddp"], 0, 10 * 3 / 4, 8),
        (["parallel.data.mode=ddp", "train.precision=fp32"], 0, 12 * 3 / 4, 8),
    ],
)
def test_what_fsdp2_moves_besides_the_products(keys: list[str], copied: int, added: float, last: int) -> None:
    config = configured(8, "batch.global=32", "batch.micro=1", *keys, model="llama3_8b")
    shared = Shared(config, TIMER.net)
    assert (shared.copied, shared.added, shared.last) == (copied, added, last)


@pytest.mark.parametrize(
    ("model", "recut"),
    [("llama3_8b", 0), ("mixtral_8x7b", 32 * 3 * 4096 * 14336)],  # eight ranks share out rows of one expert of a layer
)
def test_what_is_moved_for_weights_takes_time(model: str, recut: int) -> None:
    ep = 8 if recut else 1
    keys = ("batch.global=64", "batch.micro=1", "parallel.data.mode=zero3", f"parallel.ep={ep}")
    config = configured(64, *keys, model=model)
    (stage,) = TIMER.stages(resolve(config))
    share = share_of(config, layer_kinds(config.model)[0])
    layers = TIMER.layer(share)
    moved = TIMER.kernels.passes((4 + 4 + 6) * stage.parameters + (4 + 4 + 4) * recut)
    ends = sum((each.forward + each.backward).passes for each in TIMER.ends(share))
    passes = 32 * (layers.forward + layers.backward).passes
    assert (stage.forward + stage.backward).passes == pytest.approx(passes + ends + moved)


def test_halves_of_a_backward_pass_take_longer_than_the_whole() -> None:
    """By a share; and the half for the inputs has all launches, which decide how long tiny layers take."""
    for model, most in (("llama3_8b", 1.01), ("tiny", 2)):
        config = configured(4, "parallel.pp=2", "batch.global=16", "parallel.pipeline.schedule=zb_h1", model=model)
        (stage, _) = TIMER.stages(resolve(config))
        halves = [seconds_of(Cost(kind, 0), [stage]) for kind in (Kind.I, Kind.W)]
        whole = seconds_of(Cost(Kind.B, 0), [stage])
        assert 1 - 1e-9 <= sum(halves) / ((1 + SPLIT_OVERHEAD) * whole) <= most
        assert min(halves) > 0
