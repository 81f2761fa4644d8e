import copy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.base.errors import InputError
from megalite.config.load import load
from megalite.config.rules.validate import check, validate
from megalite.config.schema import Config
from megalite.plan.pipeline import check_schedule
from megalite.plan.resolved import resolve
from megalite.schedule.file import write
from megalite.schedule.generate import build


def found(*overrides: str, world_size: int | None = None) -> list[str]:
    return [str(problem) for problem in validate(load([], overrides), world_size)]


def test_the_defaults_are_valid() -> None:
    assert validate(Config()) == []


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["model.heads=6", "model.kv_heads=6", "model.width=132", "parallel.tp=4", "model.ffn=384"],
            "model.heads = 6: must be divisible by parallel.tp = 4; use heads 4 or 8, or tp 1, 2, 3 or 6",
        ),
        (
            ["model.heads=6", "model.kv_heads=4", "model.width=132"],
            "model.heads = 6: must be divisible by model.kv_heads = 4; use heads 4 or 8, or kv_heads 1, 2, 3 or 6",
        ),
        (
            ["model.kv_heads=2", "parallel.tp=4"],
            "model.kv_heads = 2: must be divisible by parallel.tp = 4; use kv_heads 4, or tp 1 or 2",
        ),
        (
            ["model.ffn=383", "parallel.tp=2"],
            "model.ffn = 383: must be divisible by parallel.tp = 2; use ffn 382 or 384, or tp 1",
        ),
        (
            ["model.sequence_length=255", "parallel.tp=2"],
            "model.sequence_length = 255: must be divisible by parallel.tp = 2; use sequence_length 254 or 256, "
            "or tp 1 or 3",
        ),
        (
            ["model.width=130"],
            "model.width = 130: must be divisible by model.heads = 4; use width 128 or 132, or heads 1, 2 or 5, "
            "or set model.head_width",
        ),
        (
            ["model.width=132"],
            "model.heads = 4: model.width / model.heads = 33 must be even, since RoPE turns pairs; "
            "set model.head_width, or change the number of heads",
        ),
        (
            ["checkpoint.local.path=scratch"],
            'checkpoint.local.path = "scratch": must be an absolute path of printable characters, as every node looks '
            "for it by itself; use /dev/shm, or a folder on a disk of each node",
        ),
        (
            ["checkpoint.local.replicas=2"],
            "checkpoint.local.replicas = 2: must be at most 1: with one, any node may be lost",
        ),
        (["model.head_width=7"], "model.head_width = 7: must be even, since RoPE turns pairs; use 6 or 8"),
        (
            ["model.rope_scaling.low_frequency_factor=4"],
            "model.rope_scaling.low_frequency_factor = 4.0: must be less than model.rope_scaling.high_frequency_factor "
            "= 4.0; Llama 3.1 uses 1 and 4",
        ),
        (
            ["model.parametrization=mup"],
            "model.base.width = null: is needed for model.parametrization = mup, which scales with the width over that "
            "of a base; give the width at which optim.lr was chosen",
        ),
        (
            ["model.parametrization=completep", "model.base.width=64"],
            "model.base.layers = null: is needed for model.parametrization = completep, which scales with the depth "
            "over that of a base; give the layers of the model at which optim.lr was chosen",
        ),
        (
            ["model.parametrization=mup", "model.base.width=0"],
            "model.base.width = 0: must be at least 1",
        ),
        (
            ["model.parametrization=completep", "model.base={width: 64, layers: 1}", "optim.eps=1e-30"],
            "optim.eps = 1e-30: must be at least 1e-30 when divided by 8, as model.parametrization = completep does; "
            "use a larger one, or a larger base",
        ),
        (
            ["model.qk_norm_width=all"],
            'model.qk_norm_width = "all": has no meaning without model.qk_norm; set model.qk_norm=true, or use head',
        ),
        (
            ["model.attention.window_rope_theta=500"],
            "model.attention.window_rope_theta = 500.0: has no meaning without model.attention.window; "
            "set model.attention.window, or use null",
        ),
        (
            ["model.attention.scale=0.1", "model.parametrization=mup", "model.base={width: 64, head_width: 16}"],
            "model.attention.scale = 0.1: cannot be used with model.base.head_width; use null, or leave "
            "model.base.head_width out",
        ),
        (
            ["model.activation=gelu", "model.experts.count=4"],
            'model.activation = "gelu": cannot be used with model.experts, whose gates are SwiGLU\'s, or clamped as '
            "model.experts.gate says; use silu",
        ),
        (
            ["model.rope_scaling.kind=linear", "model.rope_scaling.original_length=4096"],
            "model.rope_scaling.original_length = 4096: has no meaning with model.rope_scaling.kind = linear; "
            "leave it out, or use kind llama3, yarn, longrope or dynamic",
        ),
        (
            ["model.rope_scaling.attention_factor=1"],
            "model.rope_scaling.attention_factor = 1.0: has no meaning with model.rope_scaling.kind = llama3; "
            "leave it out, or use kind yarn or longrope",
        ),
        (
            ["model.rope_scaling.kind=longrope", "model.rope_scaling.short_factors=[1,1]"],
            "model.rope_scaling.short_factors: has 2 numbers; must be a list of 16 numbers with "
            "model.rope_scaling.kind = longrope, one for each pair that turns",
        ),
        (
            ["model.rope_scaling.kind=longrope", "model.rotary_width=2", "model.rope_scaling.long_factors=[0]"],
            "model.rope_scaling.long_factors = [0.0]: must be numbers from 0.001 to 1,000,000",
        ),
        (
            ["model.rope_scaling={kind: longrope, original_length: 1}"],
            "model.rope_scaling.original_length = 1: must be at least 2 without model.rope_scaling.attention_factor, "
            "which is found by its logarithm",
        ),
        (
            ["model.rope_scaling.kind=dynamic", "model.rotary_width=2"],
            'model.rope_scaling.kind = "dynamic": has no meaning where a single pair of features turns, the fastest, '
            "which it never stretches; use linear",
        ),
        (
            ["model.rotary_width=32"],
            "model.rotary_width = 32: must be less than the width of a head, 32; use null, which turns all of a head",
        ),
        (["model.rotary_width=7"], "model.rotary_width = 7: must be even, since RoPE turns pairs; use 6 or 8"),
        (
            ["model.rotary_width=0"],
            "model.rotary_width = 0: must be at least 2: the features of a pair turn together; "
            "model.attention.nope_every=1 turns none",
        ),
        (
            ["model.rope_scaling={kind: yarn, low_frequency_factor: 9}"],
            "model.rope_scaling.low_frequency_factor = 9.0: has no meaning with model.rope_scaling.kind = yarn; "
            "leave it out, or use kind llama3",
        ),
        (
            ["model.rope_scaling={kind: yarn, beta_slow: 32}"],
            "model.rope_scaling.beta_slow = 32.0: must be less than model.rope_scaling.beta_fast = 32.0; "
            "YaRN uses 32 and 1",
        ),
        (
            ["model.rope_scaling.kind=yarn", "model.rope_theta=1"],
            "model.rope_theta = 1.0: must be above 1 with model.rope_scaling.kind = yarn, which looks for pairs by "
            "their frequency; Llama 2 uses 10000",
        ),
        (["model.rope_scaling.factor=0"], "model.rope_scaling.factor = 0.0: must be at least 1: it stretches"),
        (
            ["parallel.cp=4", "model.sequence_length=260"],
            "model.sequence_length = 260: must be divisible by 2 · parallel.cp · parallel.tp = 8 with "
            "parallel.context.method = ring; use 256 or 264",
        ),
        (
            ["parallel.cp=4", "model.sequence_length=258", "parallel.context.method=ulysses"],
            "model.sequence_length = 258: must be divisible by parallel.cp · parallel.tp = 4 with "
            "parallel.context.method = ulysses; use 256 or 260",
        ),
        (
            ["parallel.cp=4", "parallel.tp=2", "parallel.context.method=ulysses"],
            "model.heads = 4: must be divisible by parallel.cp · parallel.tp = 8 with parallel.context.method = "
            "ulysses, which shares out heads; use cp 1 or 2, or method ring or all_gather",
        ),
        (
            ["batch.curriculum={start: 4, tokens: 1}", "parallel.cp=4"],
            "batch.curriculum.start = 4: must divide model.sequence_length = 256 and be a multiple of 8, "
            "as parallel.tp and parallel.cp need; use 8 or 16",
        ),
        (
            ["data.reset_positions=true"],
            "data.reset_positions = true: needs data.mask_documents = true, or tokens of different documents would "
            "share a position; set data.mask_documents=true",
        ),
        (
            ["kernels=triton", "optim.placement=host", "optim.update_on=host"],
            'kernels.adamw = "triton": runs on a GPU, but optim.update_on = host; use kernels.adamw=auto, '
            "or optim.update_on=device",
        ),
        (
            ["optim.update_on=host", "optim.placement=/mnt/nvme"],
            'optim.update_on = "host": needs states in host memory, but optim.placement = /mnt/nvme; use device, '
            "or optim.placement=host",
        ),
        (
            ["parallel.placement.parameters=host"],
            'parallel.placement.parameters = "host": needs the optimizer\'s states outside of the device too, but '
            "optim.placement = device; use optim.placement=host or a folder, or parallel.placement.parameters=device",
        ),
        (
            [
                "parallel.placement.parameters=host",
                "optim.placement=host",
                "parallel.data.mode=ddp",
                "parallel.dp_shard=2",
            ],
            'parallel.placement.parameters = "host": needs weights that are gathered, but parallel.data.mode = ddp '
            "keeps them on data-parallel ranks; use parallel.data.mode=zero1, zero2 or zero3",
        ),
        (
            ["parallel.placement.parameters=host", "adapter.rank=4", "parallel.data.mode=zero1"],
            'parallel.placement.parameters = "host": needs weights that are gathered, but parallel.data.mode = zero1 '
            "keeps them on one data-parallel rank; use parallel.data.mode=zero3",
        ),
        (
            ["optim.placement=hots"],
            'optim.placement = "hots": must be device, host, or the path of a folder, written with a / and in '
            "printable characters; such as ./scratch or /mnt/nvme/states",
        ),
        (
            ["kernels.rms_norm=apex", "train.compile=true"],
            'kernels.rms_norm = "apex": cannot be used with train.compile; use auto',
        ),
        (
            ["kernels.adamw=apex", "train.precision=fp64"],
            'kernels.adamw = "apex": cannot be used with train.precision = fp64; use auto',
        ),
        (
            ["data.end_of_document=1024"],
            "data.end_of_document = 1024: must be a token id, from 0 to model.vocab_size − 1 = 1023",
        ),
        (
            ["train.on_bad_step=rollback"],
            'train.on_bad_step = "rollback": needs checkpoints to go back to, but checkpoint.interval = 0 saves at the '
            "end only; set checkpoint.interval",
        ),
        (
            ["train.on_spike=rollback"],
            'train.on_spike = "rollback": needs checkpoints to go back to, but checkpoint.interval = 0 saves at the '
            "end only; set checkpoint.interval",
        ),
        (["train.spike_window=4"], "train.spike_window = 4: must be at least 8"),
        (
            ["train.spike_threshold=0"],
            "train.spike_threshold = 0.0: must be at least 0.1: about half of all losses are as far above their median",
        ),
        (["train.rollback_skip=0"], "train.rollback_skip = 0: must be at least 1"),
        (["train.max_bad_steps=-1"], "train.max_bad_steps = -1: must be at least 0"),
        (["parallel.pp=5"], "parallel.pp = 5: makes 5 stages, more than model.layers = 4; use pp 4 or fewer"),
        (
            ["parallel.pp=3", "parallel.pipeline.schedule=zbv"],
            "parallel.pp = 3: makes 6 stages with 2 stages on each rank, more than model.layers = 4; use pp 2 or fewer",
        ),
        (
            ["parallel.pipeline.schedule=2f2b"],
            'parallel.pipeline.schedule = "2f2b": is not a schedule; use gpipe, 1f1b, interleaved_1f1b, zb_h1, zb_h2, '
            "zbv, dualpipev or auto, or the path of a file that ends in .yaml or .yml",
        ),
        (
            ["parallel.pipeline.schedule=zb_h1", "parallel.pipeline.virtual_stages=2"],
            "parallel.pipeline.virtual_stages = 2: must be 1 for parallel.pipeline.schedule = zb_h1; "
            "use null, or interleaved_1f1b, which has as many as you like",
        ),
        (
            ["parallel.pipeline.schedule=auto", "parallel.pipeline.virtual_stages=3", "model.layers=12"],
            "parallel.pipeline.virtual_stages = 3: must be 1 or 2 for parallel.pipeline.schedule = auto; "
            "use null, or interleaved_1f1b, which has as many as you like",
        ),
        (
            ["parallel.pipeline.memory=1.5"],
            "parallel.pipeline.memory = 1.5: has no meaning with parallel.pipeline.schedule = 1f1b, which holds what "
            "it holds; use null, or parallel.pipeline.schedule=auto",
        ),
        (
            [
                "parallel.pipeline={schedule: auto, memory: 1}",
                "train.recompute=budget",
                "train.recompute_budget=1",
            ],
            "parallel.pipeline.memory = 1.0: cannot be kept with train.recompute = budget, which fits what layers keep "
            "to a schedule that is there; use null, or train.recompute none, selective or full",
        ),
        (
            ["parallel.pipeline={schedule: auto, memory: 1}", "batch.micro=auto"],
            "parallel.pipeline.memory = 1.0: needs batch.micro as a number: how many micro-batches fit depends on "
            "their size; use null, or give batch.micro",
        ),
        (
            ["parallel.pipeline.schedule=auto", "batch.rampup={start: 1, tokens: 100}", "batch.global=40"],
            "batch.rampup: makes 40 batch sizes, and parallel.pipeline.schedule = auto searches an order for each of "
            "them, 32 at most; use a larger increment, or a schedule by name",
        ),
        (
            ["parallel.data.reduce_precision=bf16", "train.precision=fp32"],
            'parallel.data.reduce_precision = "bf16": needs train.precision = bf16, not fp32; '
            "use fp32: gradients have their own precision",
        ),
        (
            ["parallel.pp=2", "parallel.pipeline.split=[1, 2, 1]"],
            "parallel.pipeline.split = [1, 2, 1]: must have one entry for each of the 2 stages; "
            "use null for a balanced split",
        ),
        (
            ["parallel.pp=3", "parallel.pipeline.split=[2, 0, 2]"],
            "parallel.pipeline.split = [2, 0, 2]: only the first stage, which has the embedding, and the last, "
            "which has the head, may have 0 layers; use null for a balanced split",
        ),
        (
            ["parallel.pp=2", "parallel.pipeline.split=[2, 1]"],
            "parallel.pipeline.split = [2, 1]: must add up to model.layers = 4, not 3; use null for a balanced split",
        ),
        (
            ["batch.global=10", "batch.micro=2", "parallel.dp_shard=2"],
            "batch.global = 10: must be a multiple of batch.micro · data-parallel ranks = 2 · 2 = 4; "
            "use global 8 or 12, or micro 1",
        ),
        (
            ["batch.global=3", "batch.micro=2", "parallel.dp_replicate=2"],
            "batch.global = 3: must be a multiple of batch.micro · data-parallel ranks = 2 · 2 = 4; use global 4",
        ),
        (
            ["batch.global=9", "batch.micro=auto", "parallel.dp_shard=2"],
            "batch.global = 9: must be a multiple of batch.micro · data-parallel ranks = 1 · 2 = 2; use global 8 or 10",
        ),
        (["batch.micro=auto", "batch.memory=0"], "batch.memory = 0.0: must be at least 1e-06: these are GiB"),
        (
            ["run.seed=9223372036854775808"],
            "run.seed = 9223372036854775808: must be at most 9,223,372,036,854,775,807: checkpoints keep it in 64 bits",
        ),
        (["batch.micro=auto", "batch.memory=1e300"], "batch.memory = 1e+300: must be at most 1,000,000: these are GiB"),
        (
            ["batch.micro=2", "batch.memory=10", "parallel.data.mode=zero1"],
            "batch.memory = 10.0: has no meaning with batch.micro = 2; use null, or auto for batch.micro, "
            "parallel.data.mode or parallel.pipeline.schedule",
        ),
        (["batch.rampup={}"], "batch.rampup.tokens = 0: must be at least 1"),
        (["batch.rampup.increment=0"], "batch.rampup.increment = 0: must be at least 1"),
        (
            ["batch.rampup.start=3", "batch.micro=2"],
            "batch.rampup.start = 3: must be a multiple of batch.micro · data-parallel ranks = 2 · 1 = 2; "
            "use start 2 or 4, or micro 1 or 3",
        ),
        (
            ["batch.rampup.start=4", "batch.rampup.increment=1", "parallel.dp_shard=4"],
            "batch.rampup.increment = 1: must be a multiple of batch.micro · data-parallel ranks = 1 · 4 = 4; "
            "use increment 4",
        ),
        (["batch.rampup.start=9"], "batch.rampup.start = 9: must be at most batch.global = 8"),
        (
            ["batch.rampup={start: 4, increment: 8}", "batch.global=64", "parallel.dp_shard=4"],
            "batch.rampup.increment = 8: must divide batch.global − batch.rampup.start = 60; use increment 4 or 12",
        ),
        (
            ["batch.rampup.start=3"],
            "batch.rampup.increment = null: is batch.rampup.start = 3, which must divide "
            "batch.global − batch.rampup.start = 5; use increment 1 or 5",
        ),
        (
            ["batch.micro=auto", "parallel.pipeline.schedule=a.yaml"],
            'batch.micro = "auto": needs a schedule by name: the file of parallel.pipeline.schedule is for one number '
            "of micro-batches; use a number, or gpipe, 1f1b, interleaved_1f1b, zb_h1, zb_h2, zbv, dualpipev or auto",
        ),
        (
            ["batch.rampup.tokens=1", "parallel.pipeline.schedule=a.yaml"],
            "batch.rampup: needs a schedule by name: the file of parallel.pipeline.schedule is for one number "
            "of micro-batches; use null, or gpipe, 1f1b, interleaved_1f1b, zb_h1, zb_h2, zbv, dualpipev or auto",
        ),
        (["batch.curriculum={}"], "batch.curriculum.tokens = 0: must be at least 1"),
        (
            ["batch.curriculum.start=48"],
            "batch.curriculum.start = 48: must divide model.sequence_length = 256; use 8, 16, 32 or 64",
        ),
        (
            ["batch.curriculum.start=2", "parallel.tp=4"],
            "batch.curriculum.start = 2: must divide model.sequence_length = 256 and be a multiple of 4, "
            "as parallel.tp and parallel.cp need; use 4 or 8",
        ),
        (["optim.lr=0"], "optim.lr = 0.0: must be at least 1e-30: closer to 0, float32 loses it"),
        (["optim.eps=0"], "optim.eps = 0.0: must be at least 1e-30: closer to 0, float32 loses it, and divides by 0"),
        (["optim.clip_norm=-1"], "optim.clip_norm = -1.0: must be at least 0"),
        (
            ["optim.betas=[0.9]"],
            "optim.betas = [0.9]: must be two numbers from 0 to 0.999999: closer to 1, "
            "float32 loses what a step adds; [0.9, 0.95] is usual",
        ),
        (
            ["optim.betas=[0, 1]"],
            "optim.betas = [0.0, 1.0]: must be two numbers from 0 to 0.999999: closer to 1, "
            "float32 loses what a step adds; [0.9, 0.95] is usual",
        ),
        (["schedule.floor=1.5"], "schedule.floor = 1.5: must be at most 1: it is a share of optim.lr"),
        (
            ["schedule.name=cosine", "schedule.decay=100"],
            "schedule.decay = 100: has no meaning with schedule.name = cosine, which decays until the last step; "
            "use null, or schedule.name=wsd",
        ),
        (
            ["schedule.name=wsd", "schedule.decay=101"],
            "schedule.decay = 101: must be at most train.steps = 100; use fewer steps of decay or more of training",
        ),
        (
            ["schedule.name=wsd", "schedule.warmup=60", "schedule.decay=60"],
            "schedule.decay = 60: with schedule.warmup = 60 must fit into train.steps = 100; use at most 40",
        ),
        (["train.steps=0"], "train.steps = 0: must be at least 1"),
        (
            ["model.heads=65535", "model.kv_heads=4"],
            "model.heads = 65535: must be divisible by model.kv_heads = 4; use heads 65532 or 65536, or kv_heads 1, 3 "
            "or 5",
        ),
        (
            ["model.heads=65535", "model.kv_heads=60000"],
            "model.heads = 65535: must be divisible by model.kv_heads = 60000; use heads 60000, or kv_heads 4369, "
            "13107, 21845 or 65535",
        ),
        (
            ["batch.global=1048575", "batch.micro=1048574"],
            "batch.global = 1048575: must be a multiple of batch.micro · data-parallel ranks = 1048574 · 1 = 1048574; "
            "use global 1048574, or micro 33825, 41943, 69905 or 95325",
        ),
        (
            ["train.timeout=0"],
            "train.timeout = 0.0: must be at least 1: these are seconds, in which every rank "
            "has to give a sign of life",
        ),
        (["log.interval=0"], "log.interval = 0: must be at least 1"),
        (["checkpoint.keep=-1"], "checkpoint.keep = -1: must be at least 0"),
        (["model.head_width=0"], "model.head_width = 0: must be at least 1"),
        (["model.heads=0"], "model.heads = 0: must be at least 1"),
        (["parallel.tp=0"], "parallel.tp = 0: must be at least 1"),
        (["batch.micro=0"], "batch.micro = 0: must be at least 1"),
        (
            ["data.train=[{path: a, weight: 0}]"],
            "data.train[0].weight = 0.0: must be from 1e-15 to 1e+15: it is a share, relative to the other sources; "
            "remove the source from the list to leave it out",
        ),
        (
            ["data.valid=[{weight: 1}]"],
            "data.valid[0].path: is missing; give the prefix of a token store: PATH.bin and PATH.idx",
        ),
        (
            [f"data.train=[{'{path: a},' * 1001}]"],
            "data.train: has 1,001 sources, and 1,000 are the most: every rank opens the files of each; "
            "prepare several files as one store, or list stores as one: megalite-merge-data --list",
        ),
    ],
)
def test_every_rule_names_key_value_and_fix(overrides: list[str], line: str) -> None:
    assert line in found(*overrides)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "/a", "a\nb"])
def test_a_run_is_named_by_a_plain_folder_name(name: str) -> None:
    config = Config()
    config.run.name = name
    assert [problem.key for problem in validate(config)] == ["run.name"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("name", "x" * 256), ("name", "é" * 128), ("dir", "x" * 256), ("dir", "a/" + "x" * 256 + "/b"), ("dir", "a\nb")],
)
def test_a_run_folder_is_one_that_can_be_made(key: str, value: str) -> None:
    config = Config()
    setattr(config.run, key, value)
    assert [problem.key for problem in validate(config)] == [f"run.{key}"]


@pytest.mark.parametrize("split", ["[0, 2, 2]", "[2, 2, 0]", "[0, 4, 0]", "[1, 1, 2]"])
def test_the_stages_of_embedding_and_head_may_have_no_layer(split: str) -> None:
    assert found("parallel.pp=3", f"parallel.pipeline.split={split}") == []


def test_any_number_of_layers_can_be_balanced() -> None:
    assert found("model.layers=7", "parallel.pp=4") == []


def test_the_layout_must_make_the_world() -> None:
    assert found("parallel.dp_shard=2", "parallel.tp=2", world_size=4) == []
    assert found("parallel.dp_shard=2", "parallel.tp=2", world_size=8) == [
        "parallel.dp_shard = 2: the layout makes 4 ranks, but the job has 8; use dp_shard 4 or auto, or start 4 ranks"
    ]
    assert found("parallel.dp_shard=2", "parallel.tp=2", world_size=3) == [
        "parallel.dp_shard = 2: the layout makes 4 ranks, but the job has 3; start 4 ranks"
    ]
    assert found("parallel.pp=2", "parallel.tp=2", world_size=6)[0] == (
        'parallel.dp_shard = "auto": the other axes make 4 ranks, which must divide the job\'s 6; start 4 or 8 ranks'
    )
    assert found("parallel.pp=2", "parallel.tp=2", world_size=2)[0].endswith("start 4 ranks")


def test_auto_takes_what_the_world_leaves() -> None:
    config = load([], ["parallel.pp=2", "parallel.tp=2"])
    assert check(config).parallel.dp_shard == 1
    assert check(config, 16).parallel.dp_shard == 4
    assert check(config, 16).parallel.layout.world_size == 16
    assert found("parallel.tp=2", world_size=6) == [
        "batch.global = 8: must be a multiple of batch.micro · data-parallel ranks = 1 · 3 = 3; use global 6 or 9"
    ]


def test_checking_changes_nothing_in_its_argument() -> None:
    config = load([], ["parallel.tp=2"])
    before = copy.deepcopy(config)
    check(config, 4)
    assert config == before


def test_all_broken_rules_are_raised_together() -> None:
    with pytest.raises(InputError, match="3 problems") as caught:
        check(load([], ["optim.lr=-1", "model.heads=6", "run.name=a/b", "model.width=132", "model.kv_heads=4"]))
    assert [problem.key for problem in caught.value.problems] == ["run.name", "optim.lr", "model.heads"]


sizes = st.integers(-3, 40)


@given(st.tuples(*[sizes] * 14), st.none() | st.integers(1, 64))
def test_no_sizes_break_the_validator_and_what_passes_divides(numbers: tuple[int, ...], world_size: int | None) -> None:
    config = Config()
    model, parallel, batch = config.model, config.parallel, config.batch
    (model.layers, model.width, model.heads, model.kv_heads, model.head_width, model.ffn, model.vocab_size) = numbers[
        :7
    ]
    (parallel.pp, parallel.dp_replicate, parallel.dp_shard, parallel.cp, parallel.tp) = numbers[7:12]
    batch.micro, batch.global_ = numbers[12:]
    if not validate(config, world_size):
        layout = parallel.layout
        assert world_size in (None, layout.world_size)
        assert batch.global_ % (batch.micro * layout.dp) == 0
        assert model.kv_heads % parallel.tp == model.ffn % parallel.tp == 0


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.integers(1, 4))
def test_heads_pass_exactly_when_everything_divides(width: int, heads: int, kv_heads: int, tp: int) -> None:
    config = load([], [f"model.width={width * 4}", f"model.heads={heads}", f"model.kv_heads={kv_heads}"])
    config.parallel.tp = tp
    config.model.ffn = config.model.sequence_length = 12
    fits = heads % kv_heads == heads % tp == kv_heads % tp == width * 4 % heads == 0 and width * 4 // heads % 2 == 0
    assert (validate(config) == []) == fits


def test_an_automatic_interval_needs_no_multiples() -> None:
    keys = ["checkpoint.export=hf", "checkpoint.export_every=7", "train.on_bad_step=rollback"]
    assert check(load([], ["checkpoint.interval=auto", *keys])).checkpoint.interval == "auto"
    with pytest.raises(InputError, match=r"checkpoint\.export_every = 7: must be a multiple"):
        check(load([], ["checkpoint.interval=2", *keys]))
    with pytest.raises(InputError, match=r"checkpoint\.interval"):
        load([], ["checkpoint.interval=often"])


@pytest.mark.parametrize(
    "url", ["localhost:30000", "ftp://host/", "http://me:word@host/", "http:///path", "http://h:x/"]
)
def test_exports_are_announced_at_an_address_without_a_password(url: str) -> None:
    keys = ["checkpoint.export=hf", "checkpoint.export_url=http://localhost:30000/update_weights_from_disk"]
    assert check(load([], keys)).checkpoint.export_url is not None
    with pytest.raises(InputError, match=r"checkpoint\.export_url = .*without a password"):
        check(load([], [keys[0], f"checkpoint.export_url='{url}'"]))
    with pytest.raises(InputError, match=r"checkpoint\.export_keep = 1: must not be 1"):
        check(load([], [*keys, "checkpoint.export_keep=1"]))


@pytest.mark.parametrize("step", [0, -1, 101])
def test_a_listed_checkpoint_is_of_a_step_of_the_run(step: int) -> None:
    assert check(load([], ["checkpoint.at=[1,100]"])).checkpoint.at == [1, 100]
    with pytest.raises(InputError, match=rf"checkpoint\.at\[1\] = {step}: must be a step of the run: from 1 to"):
        check(load([], [f"checkpoint.at=[5,{step}]"]))


@pytest.mark.parametrize(("name", "stages"), [("1f1b", 1), ("zbv", 2), ("interleaved_1f1b", 3)])
def test_a_schedule_file_tells_its_stages_per_rank(name: str, stages: int, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(write(build(name, 2, 4, stages)))
    keys = ["parallel.pp=2", "model.layers=10", "batch.micro=1", "batch.global=4", f"parallel.pipeline.schedule={path}"]
    config = check(load([], keys), 2)
    assert config.parallel.pipeline.stages_per_rank == stages
    assert check(config, 2) == config
    resolve(config)
    pinned = check(load([], [*keys, "parallel.pipeline.virtual_stages=5"]), 2)
    with pytest.raises(InputError, match=f"use virtual_stages {stages}"):
        check_schedule(pinned)


@pytest.mark.parametrize("content", ["placement: 7", "placement: []", "placement: [0, 1, 0]", "{", None])
def test_a_schedule_file_that_tells_no_stages_is_left_to_the_plan(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    if content is not None:
        path.write_text(content)
    keys = ["parallel.pp=2", "batch.micro=1", "batch.global=4", f"parallel.pipeline.schedule={path}"]
    config = check(load([], keys), 2)
    assert config.parallel.pipeline.virtual_stages is None
    with pytest.raises(InputError, match=r"mine\.yaml"):
        check_schedule(config)
