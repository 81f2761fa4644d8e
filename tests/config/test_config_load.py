from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.base.errors import InputError, Problem
from megalite.config.convert import from_plain, keys, to_plain
from megalite.config.load import dump, files_and_overrides, is_override, load
from megalite.config.model_schema import Model, RopeScaling
from megalite.config.schema import Config, Data, Kernels, Run, Source


def write(folder: Path, **files: str) -> str:
    """Writes `NAME.yaml` for every argument; returns the path of the last."""
    for name, text in files.items():
        path = folder / f"{name}.yaml"
        path.write_text(text, encoding="utf-8")
    return str(path)


def problems(*overrides: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        load([], overrides)
    return [str(problem) for problem in caught.value.problems]


def test_nothing_given_is_the_defaults() -> None:
    assert load([], []) == Config()


@pytest.mark.parametrize("text", ["", "# only a comment\n", "null\n", "model:\nparallel:\n  pipeline:\n"])
def test_empty_files_and_sections_change_nothing(tmp_path: Path, text: str) -> None:
    first = write(tmp_path, first="model: {layers: 7}\nparallel: {pipeline: {schedule: gpipe}}\n")
    second = write(tmp_path, second=text)
    assert load([first, second]) == load([first])
    assert load([first, second]).model.layers == 7


def test_the_file_wins_over_its_includes_and_the_later_over_the_earlier(tmp_path: Path) -> None:
    write(
        tmp_path,
        a="model: {layers: 1, width: 1, heads: 1, ffn: 1}",
        b="model: {width: 2, heads: 2, ffn: 2}",
        c="include: [a.yaml, b.yaml]\nmodel: {heads: 3, ffn: 3}",
    )
    last = write(tmp_path, d="model: {ffn: 4}")
    model = load([str(tmp_path / "c.yaml"), last], ["model.kv_heads=5"]).model
    assert (model.layers, model.width, model.heads, model.ffn, model.kv_heads) == (1, 2, 3, 4, 5)


def test_include_is_relative_to_the_file_and_may_be_a_string(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "run").mkdir()
    write(tmp_path / "model", small="model: {layers: 9}")
    top = write(tmp_path / "run", top="include: ../model/small.yaml")
    assert load([top]).model.layers == 9


def test_a_file_may_be_included_twice_but_not_by_itself(tmp_path: Path) -> None:
    write(tmp_path, base="model: {layers: 9}", left="include: base.yaml", right="include: base.yaml")
    assert load([write(tmp_path, top="include: [left.yaml, right.yaml]")]).model.layers == 9
    loop = write(tmp_path, one="include: two.yaml", two="include: ./one.yaml")
    with pytest.raises(InputError, match=r"two\.yaml includes .*one\.yaml includes .*two\.yaml.*circle"):
        load([loop])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  layers: [1,\n", r"file\.yaml: is not valid YAML: line 3, column 1"),
        ("run: {name: a}\nrun: {name: b}\n", r"file\.yaml: is not valid YAML: line 2, column 1: found duplicate key"),
        ("- 1\n- 2\n", r"file\.yaml: must be a mapping"),
        ("just words\n", r"file\.yaml: must be a mapping"),
        ("a: &x [*x]\n", r"file\.yaml: is not valid YAML: line 1"),
        ("run: !!python/object/apply:os.getcwd []\n", r"file\.yaml: is not valid YAML: line 1"),
        ("run: {name: '${'}\n", r'run\.name = "\$\{": has a reference that cannot be read; write \$\{section\.key\}'),
        ("include: absent.yaml\n", r"absent\.yaml: cannot be read: No such file .*\(included by .*file\.yaml\)"),
        ("include: ''\n", r"file\.yaml: include = '': must be a path or a list of paths"),
        ("include: {a: b}\n", r"file\.yaml: include = .*must be a path or a list of paths"),
        ('include: "a\\0b"\n', r"file\.yaml: is not valid YAML: line 1, column 10: a text cannot have this character"),
        ("include: .\n", r"cannot be read: Is a directory \(included by"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load([write(tmp_path, file=text)])


def test_a_file_that_is_missing_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the name of a configuration file is empty"):
        load([""])
    with pytest.raises(InputError, match=r"absent\.yaml: cannot be read: No such file"):
        load([str(tmp_path / "absent.yaml")])
    with pytest.raises(InputError, match=r"an override is written model\.layers=VALUE, without spaces"):
        load(["model.layers =3"])
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"binary\.yaml: is not UTF-8 text"):
        load([str(tmp_path / "binary.yaml")])


def test_overrides_are_yaml_values() -> None:
    config = load(
        [],
        [
            "model.layers=12",
            "optim.lr=1e-3",
            "optim.betas=[0.8, 1]",
            "model.tie_embeddings=true",
            "run.name=a=b",
            "data.train=[{path: x, weight: 2}, {path: y}]",
            "data.train[1].weight=3",
            "batch.global=64",
            "model.rope_scaling.factor=32",
        ],
    )
    assert config.model == Model(layers=12, tie_embeddings=True, rope_scaling=RopeScaling(factor=32.0))
    assert (config.optim.lr, config.optim.betas, config.run.name) == (1e-3, [0.8, 1.0], "a=b")
    assert config.data.train == [Source("x", 2.0), Source("y", 3.0)]
    assert config.batch.global_ == 64


def test_an_optional_section_can_be_taken_away(tmp_path: Path) -> None:
    scaled = write(tmp_path, scaled="model: {rope_scaling: {factor: 32}}")
    assert load([scaled]).model.rope_scaling == RopeScaling(factor=32.0)
    assert load([scaled, write(tmp_path, plain="model: {rope_scaling: null}")]).model.rope_scaling is None
    assert load([scaled], ["model.rope_scaling=null"]).model.rope_scaling is None


def test_values_can_refer_to_others_and_to_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGALITE_TEST_DIR", "elsewhere")
    config = load([], ["run.name=w${model.width}", "model.ffn=${model.width}", "run.dir=${oc.env:MEGALITE_TEST_DIR}"])
    assert (config.run.name, config.model.ffn, config.run.dir) == ("w128", 128, "elsewhere")
    assert (
        problems("run.name=${nothing}")[0]
        == 'run.name = "${nothing}": refers to nothing, which is not there; name a key of the configuration'
    )
    assert (
        problems("run.name=${run.name}")[0]
        == 'run.name = "${run.name}": cannot be resolved; run.name refers to run.name'
    )


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, bad="model: {laers: 3, heads: four}\ntrain: {precision: fp16}\nzebra: 1\n")
    with pytest.raises(InputError) as caught:
        load([path], ["batch.micro=true", "=3", "optim.eps=.nan"])
    assert str(caught.value).splitlines() == [
        "7 problems in the configuration",
        "  =3: is not an override; write key=value, such as model.layers=8",
        "  zebra: unknown key; the top level has run, model, adapter, parallel, batch, train, kernels, optim, "
        "schedule, data, checkpoint, log, eval and profile",
        "  model.laers: unknown key; did you mean model.layers?",
        '  model.heads = "four": must be a whole number',
        "  batch.micro = true: must be a whole number or auto",
        '  train.precision = "fp16": must be bf16, fp8, fp32 or fp64',
        "  optim.eps = NaN: must be a finite number",
    ]


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("model.laers=1", "model.layers"),
        ("modl=1", "model"),
        ("train.lr=1", "optim.lr"),
        ("lr=1", "optim.lr"),
        ("dp_shard=2", "parallel.dp_shard"),
        ("batch.global_=1", "batch.global"),
        ("model.rope_scaling.factr=1", "model.rope_scaling.factor"),
        ("data.train=[{path: a}, {wieght: 2}]", "data.train[1].weight"),
        ("parallel.pipelin.split=null", "parallel.pipeline"),
        ("model.betas=null", "optim.betas"),
    ],
)
def test_an_unknown_key_brings_the_nearest_name(override: str, meant: str) -> None:
    (line,) = problems(override)
    assert line.endswith(f": unknown key; did you mean {meant}?")


def test_a_key_that_was_renamed_brings_its_new_name() -> None:
    assert problems("optim.offload=true") == [
        "optim.offload: unknown key; it is optim.placement now: host in place of true, device in place of false"
    ]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.layers=4.0", "model.layers = 4.0: must be a whole number"),
        ("model.layers=null", "model.layers = null: must be a whole number"),
        ("model.head_width=x", 'model.head_width = "x": must be a whole number or null'),
        ("optim.lr=true", "optim.lr = true: must be a finite number"),
        ("optim.lr=.inf", "optim.lr = Infinity: must be a finite number"),
        ("run.name=7", "run.name = 7: must be text; put it in quotes"),
        ("log.tensorboard=1", "log.tensorboard = 1: must be true or false"),
        ("parallel.dp_shard=atuo", 'parallel.dp_shard = "atuo": must be a whole number or auto'),
        ("parallel.dp_shard=true", "parallel.dp_shard = true: must be a whole number or auto"),
        ("optim.betas=0.9", "optim.betas = 0.9: must be a list, each item a finite number"),
        ("optim.betas=[0.9, x]", 'optim.betas[1] = "x": must be a finite number'),
        ("parallel.pipeline.split=[2, 2.5]", "parallel.pipeline.split[1] = 2.5: must be a whole number"),
        ("data.train=a", 'data.train = "a": must be a list, each item a section'),
        ("data.train=[a]", 'data.train[0] = "a": must be a section with keys from path or weight'),
        (
            "kernels=apex",
            'kernels = "apex": must be auto, triton or torch or a section with keys from rms_norm, rope, swiglu, '
            "experts, cross_entropy, adamw, muon or attention",
        ),
        (
            "parallel.pipeline=null",
            "parallel.pipeline = null: must be a section with keys from schedule, virtual_stages, memory, split or "
            "overlap",
        ),
        ("model.rope_scaling=8", None),
        ("data.tokenizer=???", "data.tokenizer: has no value yet; set it in a file or with data.tokenizer=VALUE"),
        ("run.name=[", None),
        ("data.train.x=1", None),
        ("data.train[3].path=1", None),
        ("a b", "a b: is not an override; write key=value, such as model.layers=8"),
        ("model..layers=3", "model..layers=3: is not an override; write key=value, such as model.layers=8"),
    ],
)
def test_values_of_a_wrong_kind(override: str, line: str | None) -> None:
    (found,) = problems(override)
    assert found == line if line else found.startswith(override.partition("=")[0])
    assert "\n" not in found


def test_a_section_where_a_list_belongs_is_reported_not_merged(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data\.train = .*: must be a list"):
        load([write(tmp_path, file="data: {train: {path: x}}")])


def test_which_arguments_are_overrides() -> None:
    assert all(map(is_override, ["a=1", "model.layers=", "data.train[0].path=x=y", "batch.global=4"]))
    assert not any(map(is_override, ["a", "dir/a=b.yaml", "=1", "a.=1", "a b=1", "--a=1", "./a=1", "1a=2"]))


def test_files_and_overrides_keep_their_order() -> None:
    assert files_and_overrides(["b", "x=2", "./a=1", "x=1", "b"]) == (["b", "./a=1", "b"], ["x=2", "x=1"])
    assert files_and_overrides([]) == ([], [])


def test_a_message_or_a_list_of_problems() -> None:
    assert str(InputError("plain")) == "plain"
    assert InputError("plain").problems == ()
    one = InputError([Problem("a.b", "must be 2", "use 2", 3)])
    assert str(one) == "1 problem in the configuration\n  a.b = 3: must be 2; use 2"


FIELDS = [*sorted({name for key in keys() for name in key.replace("[]", "").split(".")}), "unknown", "global_"]
text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12).filter(
    lambda word: word != "???"
)
numbers = st.floats(allow_nan=False, allow_infinity=False)
configs = st.builds(
    Config,
    run=st.builds(Run, name=text),
    model=st.builds(
        Model,
        layers=st.integers(),
        head_width=st.none() | st.integers(),
        rope_theta=numbers,
        rope_scaling=st.none() | st.builds(RopeScaling, factor=numbers),
    ),
    data=st.builds(Data, train=st.lists(st.builds(Source, path=text, weight=numbers), max_size=2), tokenizer=text),
)


@settings(max_examples=50)
@given(configs)
def test_what_is_dumped_loads_as_equal(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert load([str(path)]) == config


plains = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(["auto", "???"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(FIELDS), plains, max_size=5))
def test_no_content_breaks_the_conversion_and_what_passes_has_the_right_types(plain: dict[str, object]) -> None:
    config, found = from_plain(plain)
    assert all(problem.key and problem.rule and "\n" not in str(problem) for problem in found)
    if not found:
        assert from_plain(to_plain(config)) == (config, [])


@pytest.mark.parametrize(
    "name", ["${x}", "\\${", "\\\\${a} ${", "a\\${x}\\", "null", "1e5", "yes", "1:30", "", "a: b", "# c"]
)
def test_text_that_yaml_or_references_could_misread_is_dumped_safely(tmp_path: Path, name: str) -> None:
    config = Config(run=Run(name=name))
    assert load([write(tmp_path, dumped=dump(config))]) == config


def test_keywords_have_no_underscore_in_yaml() -> None:
    assert "  global: 8\n" in dump(Config())
    assert "batch.global" in keys()
    assert from_plain(to_plain(Config())) == (Config(), [])


@pytest.mark.parametrize(
    ("overrides", "adamw", "others"),
    [
        (["kernels=torch", "kernels.adamw=triton"], "triton", "torch"),
        (["kernels=torch", "kernels={adamw: triton}"], "triton", "torch"),
        (["kernels.adamw=triton"], "triton", "auto"),
        (["kernels.adamw=triton", "kernels=torch"], "torch", "torch"),
    ],
)
def test_one_of_the_kernels_is_changed_alone(overrides: list[str], adamw: str, others: str, tmp_path: Path) -> None:
    found = load([], overrides).kernels_by_operation
    assert found == replace(Kernels.all(others), adamw=adamw)
    paths = [tmp_path / f"{number}.yaml" for number in range(len(overrides))]
    for path, override in zip(paths, overrides, strict=True):
        key, _, value = override.partition("=")
        path.write_text(f"kernels: {value}" if key == "kernels" else f"kernels: {{adamw: {value}}}")
    assert load([str(path) for path in paths]).kernels_by_operation == found


def test_a_file_has_sections_where_overrides_have_dots(tmp_path: Path) -> None:
    path = write(tmp_path, dots="model.layers: 3\nparallel: {pipeline.schedule: zbv}\n")
    with pytest.raises(InputError) as caught:
        load([path])
    fix = "unknown key; only overrides are written with dots; a file has sections, such as model: {layers: 8}"
    assert str(caught.value).splitlines()[1:] == [f"  model.layers: {fix}", f"  parallel.pipeline.schedule: {fix}"]


def test_an_override_whose_key_cannot_be_is_told_what_keys_are_like() -> None:
    with pytest.raises(InputError, match=r"; an override is written key=value, its key as in model\.layers or da"):
        load(["optim.betas[-1]=0.9"])


@pytest.mark.parametrize("written", ["parallel.tp", "parallel.tp:2", "parallel.tp =2", "parallel.tp : 2"])
def test_an_override_in_another_form_is_told_the_right_one(written: str) -> None:
    with pytest.raises(InputError, match=r"; an override is written parallel\.tp=VALUE, without spaces"):
        load([written])


def test_the_lines_of_a_file_that_is_no_configuration_are_not_told(tmp_path: Path) -> None:
    write(tmp_path, secret="daemon:*:19000:0:99999:7::\nroot:$6$hash::\n")
    with pytest.raises(InputError, match=r"secret\.yaml: is no configuration: it has none of the sections") as caught:
        load([write(tmp_path, top="include: secret.yaml")])
    assert "included by" in str(caught.value)
    assert not any(word in str(caught.value) for word in ("daemon", "hash", "19000"))
    for text in ("hidden: 1\nhidden: 2\n", "*hidden\n", "a: !hidden 1\n", "a: !!int hidden\n", "a: hidden: b\n"):
        write(tmp_path, secret=text)
        with pytest.raises(InputError, match=r"secret\.yaml: is not valid YAML: line \d, column \d+ \(incl") as caught:
            load([write(tmp_path, top="include: secret.yaml")])
        assert "hidden" not in str(caught.value)
    write(tmp_path, part="modle: {layers: 2}\nmodel: {layers: 2}\n")
    with pytest.raises(InputError, match="modle: unknown key; did you mean model"):
        load([write(tmp_path, top="include: part.yaml")])


def test_many_problems_are_told_in_a_few_lines(tmp_path: Path) -> None:
    text = "model:\n" + "".join(f"  {'k' * 300}{number}: {'v' * 1000}\n" for number in range(500))
    with pytest.raises(InputError, match=r"^500 problems in the configuration\n(.*\n)+  and \d+ more$") as caught:
        load([write(tmp_path, top=text)])
    assert 1000 < len(str(caught.value)) < 6000
    assert len(str(InputError("x" * 1_000_000))) < 6000
