"""The sections of a run's page: how it went, as `megalite-status` has it, and what was trained, where and by what."""

from collections.abc import Mapping, Sequence
from typing import Any

from megalite import __version__
from megalite.base.errors import counted
from megalite.base.html_tables import as_html
from megalite.base.secrets import text_without_secrets, without_secrets
from megalite.commands.report.run_facts import Checkpoint, RunFacts, Start
from megalite.commands.show.show import layout_table, parameter_table
from megalite.config.schema import Config
from megalite.cost.predict import Prediction
from megalite.cost.texts import step_text
from megalite.plan.model.size import flops_per_token
from megalite.plan.routing import routing_notes
from megalite_launch.base.texts import lasting, memory_text, printable
from megalite_launch.page.html import definitions, escape, paragraph, section, table
from megalite_launch.status.page import sections, whole_page
from megalite_launch.watch.run import Watched
from megalite_launch.watch.summary import Summary

NAMED_PACKAGES = ("megalite", "torch", "triton", "numpy", "transformers", "flash-attn", "nvidia-nccl-cu12")
MAX_CELL = 120  # characters of a text of a file in a table


def page(run: Watched, found: Summary, facts: RunFacts, prediction: Prediction | None, why_not: str) -> str:
    """HTML of the whole page. why_not: there is no prediction."""
    head, time, curves, *how = sections(run, found, None if prediction is None else prediction.seconds)
    parts = [head, _notes(facts), curves, _speed(found, facts, prediction, why_not), time, *how]
    if facts.config is not None:
        parts += [_model(facts.config), _layout(facts.config), _data(facts)]
    parts += [_checkpoints(facts), _starts(facts), _environment(facts.latest), _configuration(facts)]
    return whole_page(run, found, parts)


def _notes(facts: RunFacts) -> str:
    if not facts.notes:
        return ""
    items = "\n".join(f"<li>{escape(printable(without_secrets(note), 400))}</li>" for note in facts.notes)
    return section("Missing or damaged", f"<ul>{items}</ul>")


def _speed(found: Summary, facts: RunFacts, prediction: Prediction | None, why_not: str) -> str:
    """The usual time of a step beside the prediction."""
    usual, speed = found["usual_step_seconds"], found["tokens_per_second"]
    if usual is None:
        return section("Speed", paragraph("No step has been reported."))
    rows = [("a step, usually", lasting(usual))]
    if speed is not None:
        rows.append(("tokens per second, latest report", f"{speed:,.0f}"))
    if prediction is not None:
        rows.append((f"predicted on {prediction.cluster.name}", step_text(prediction)))
        rows.append(("measured / predicted", f"{usual / prediction.seconds:.3g}"))
        if "cpu" in facts.devices:
            why_not = f"This run computed on CPUs; the prediction is for {prediction.cluster.gpu.name}."
    return section("Speed", definitions(rows), paragraph(why_not, "pale") if why_not else "")


def _model(config: Config) -> str:
    model = config.model
    sizes = f"{counted(model.layers, 'layer')} of width {model.width:,}, {counted(model.heads, 'head')} over "
    sizes += f"{counted(model.kv_heads, 'key and value head')}, a vocabulary of {model.vocab_size:,}, sequences of "
    sizes += f"{model.sequence_length:,} tokens; {flops_per_token(model, 'causal'):,} FLOPs per token of training."
    return section("Model", *map(paragraph, (sizes, *routing_notes(config).values())), as_html(parameter_table(model)))


def _layout(config: Config) -> str:
    layout, batch, parallel = config.parallel.layout, config.batch, config.parallel
    told = f"{layout}; schedule {parallel.pipeline.schedule}, data parallelism {parallel.data.mode}, "
    told += f"{counted(batch.global_, 'sequence')} a step in micro-batches of {batch.micro}, {config.train.precision}."
    return section("Layout", paragraph(told), as_html(layout_table(layout)))


def _data(facts: RunFacts) -> str:
    """Sources with their weights, and their tokens as the newest whole checkpoint knows them."""
    config = facts.config
    assert config is not None
    manifests = [each.manifest for each in facts.checkpoints if each.manifest is not None]
    known = {source.path: source for source in manifests[-1].data} if manifests else {}
    rows = []
    for use, sources in (("training", config.data.train), ("validation", config.data.valid)):
        for source in sources:
            found = known.get(source.path) if use == "training" else None
            tokens, fingerprint = ("", "") if found is None else (f"{found.tokens:,}", found.fingerprint[:16])
            rows.append(
                (use, printable(without_secrets(source.path), MAX_CELL), f"{source.weight:g}", tokens, fingerprint)
            )
    if not rows:
        return ""
    tokenizer = {} if facts.latest is None else facts.latest.mapping("tokenizer")
    told = paragraph(f"Tokenizer: {_fields(tokenizer)}.") if tokenizer else ""
    return section("Data", table(("use", "store", "weight", "tokens", "hash"), rows, (0, 1, 4)), told)


def _checkpoints(facts: RunFacts) -> str:
    if not facts.checkpoints:
        return section("Checkpoints", paragraph("There are none."))
    told = "Sizes of all files were compared with the manifests, hashes were not: megalite-inspect-checkpoint does."
    if facts.checkpoints_left_out:
        told += f" {counted(facts.checkpoints_left_out, 'older one')} left out."
    rows = [_checkpoint(each) for each in reversed(facts.checkpoints)]
    header = ("step", "saved", "tokens", "size", "ranks", "layout", "state")
    return section("Checkpoints", table(header, rows, (1, 5, 6)), paragraph(told, "pale"))


def _checkpoint(each: Checkpoint) -> Sequence[str]:
    step, manifest = each.name.removeprefix("step-").lstrip("0") or "0", each.manifest
    if manifest is None:
        return (step, "", "", "", "", "", printable(each.damage, 300))
    tokens = "" if manifest.tokens is None else f"{manifest.tokens:,}"
    saved, ranks = printable(manifest.saved, 40), "" if manifest.ranks is None else f"{manifest.ranks:,}"
    return (step, saved, tokens, memory_text(each.bytes), ranks, _axes(manifest.layout or {}), "complete")


def _starts(facts: RunFacts) -> str:
    if not facts.starts:
        return ""
    rows = []
    for start in reversed(facts.starts):
        resumed = start.mapping("resumed").get("step")
        begins = f"{resumed:,}" if isinstance(resumed, int) else "0"
        texts = [printable(start.text(key), MAX_CELL) for key in ("time", "ranks", "host")]
        axes, commit = _axes(start.mapping("layout")), printable(start.commit, MAX_CELL)
        rows.append((start.name, texts[0], begins, texts[1], axes, texts[2], commit))
    left_out = f"{counted(facts.starts_left_out, 'older start')} left out." if facts.starts_left_out else ""
    header = ("start", "time", "from step", "ranks", "layout", "host", "commit")
    return section("Starts", table(header, rows, (0, 1, 4, 5, 6)), paragraph(left_out, "pale") if left_out else "")


def _environment(start: Start | None) -> str:
    """Machine, versions and environment variables of the latest start."""
    if start is None:
        return ""
    packages = start.mapping("packages")
    devices = [f"{host}: {_fields(each)}" for host, each in start.mapping("devices").items() if isinstance(each, dict)]
    rows = [(name, start.text(key)) for name, key in (
        ("commit", "commit"), ("Python", "python"), ("platform", "platform"), ("CUDA", "cuda"), ("driver", "driver"),
        ("configuration", "configuration_hash"),
    )]  # fmt: skip
    rows.insert(1, ("packages", _fields({name: packages[name] for name in NAMED_PACKAGES if name in packages})))
    rows += [("devices", "; ".join(devices)), ("environment", _fields(start.mapping("environment")))]
    shown = [(name, printable(text, 1000)) for name, text in rows if text]
    told = paragraph(f"As start {start.name} found it. The page was written by megalite {__version__}.", "pale")
    return section("Environment", definitions(shown), told)


def _configuration(facts: RunFacts) -> str:
    text = text_without_secrets(facts.text)
    return section("Configuration", f"<pre>{escape(text)}</pre>") if text else ""


def _axes(layout: Mapping[str, Any]) -> str:
    """The axes of a layout that are larger than 1."""
    return _fields({name: size for name, size in layout.items() if size != 1}) or "one rank"


def _fields(found: Mapping[str, Any]) -> str:
    """Names with their values, of an object of a file."""
    return printable(", ".join(f"{name} {value}" for name, value in found.items()), 1000)
