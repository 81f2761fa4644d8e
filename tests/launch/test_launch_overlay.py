"""Strategic merge, by examples of Kubernetes' own pages, and what is refused."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from kubernetes_schema import TYPES

from megalite_launch.base.errors import UserError
from megalite_launch.submit import overlay
from megalite_launch.submit.overlay import MERGE_KEYS, PORTS, overlaid, read_overlay


def merged(base: str, over: str, kind: str = "Job") -> Any:
    """Two texts in YAML, each of the fields of a document."""
    about = {"kind": kind, "metadata": {}}
    (found,) = overlaid([{**about, **yaml.safe_load(base)}], [{"kind": kind, **yaml.safe_load(over)}])
    return {name: value for name, value in found.items() if name not in about}


@pytest.mark.parametrize(
    ("base", "over", "wanted"),
    [
        (  # kubectl patch: "Use a strategic merge patch to update a Deployment"
            "spec: {containers: [{name: patch-demo-ctr, image: nginx}]}",
            "spec: {containers: [{name: patch-demo-ctr-2, image: redis}]}",
            "spec: {containers: [{name: patch-demo-ctr-2, image: redis}, {name: patch-demo-ctr, image: nginx}]}",
        ),
        (  # likewise, its notes: a list without a merge key is replaced
            "spec: {tolerations: [{effect: NoSchedule, key: dedicated, value: test-team}]}",
            "spec: {tolerations: [{effect: NoSchedule, key: disktype, value: ssd}]}",
            "spec: {tolerations: [{effect: NoSchedule, key: disktype, value: ssd}]}",
        ),
        (  # likewise: "using the retainKeys strategy"
            "spec: {strategy: {rollingUpdate: {maxSurge: 30%}, type: RollingUpdate}}",
            "spec: {strategy: {$retainKeys: [type], type: Recreate}}",
            "spec: {strategy: {type: Recreate}}",
        ),
        (  # API conventions, strategic merge patch: a container of the same name is merged
            "spec: {containers: [{name: nginx, image: nginx-1.0}, {name: log, image: tail}]}",
            "spec: {containers: [{name: nginx, command: [serve]}]}",
            "spec: {containers: [{name: nginx, image: nginx-1.0, command: [serve]}, {name: log, image: tail}]}",
        ),
        (  # likewise: $patch: replace in a list
            "spec: {containers: [{name: nginx, image: nginx-1.0}]}",
            "spec: {containers: [{name: log-tailer, image: log-tailer-1.0}, {$patch: replace}]}",
            "spec: {containers: [{name: log-tailer, image: log-tailer-1.0}]}",
        ),
        (  # likewise: $patch: delete of an item
            "spec: {containers: [{name: nginx, image: nginx-1.0}, {name: log-tailer, image: log-tailer-1.0}]}",
            "spec: {containers: [{$patch: delete, name: log-tailer}]}",
            "spec: {containers: [{name: nginx, image: nginx-1.0}]}",
        ),
        (  # likewise: $patch: replace in a mapping
            "spec: {securityContext: {runAsUser: 1, fsGroup: 2}}",
            "spec: {securityContext: {$patch: replace, runAsUser: 3}}",
            "spec: {securityContext: {runAsUser: 3}}",
        ),
        (
            "spec: {securityContext: {runAsUser: 1}, b: 1}",
            "spec: {securityContext: {$patch: delete}, b: null, c: {d: null}}",
            "spec: {c: {}}",
        ),
        (  # a volume of another kind, as kustomize has it
            "spec: {volumes: [{name: shm, emptyDir: {}}, {name: claim}]}",
            "spec: {volumes: [{name: shm, emptyDir: null, hostPath: {path: /dev/shm}}, {name: new}]}",
            "spec: {volumes: [{name: new}, {name: shm, hostPath: {path: /dev/shm}}, {name: claim}]}",
        ),
        (
            "spec: {containers: [{name: a, env: [{name: X, value: 'old'}], image: i}]}",
            "spec: {containers: [{name: a, $patch: replace, args: [x]}]}",
            "spec: {containers: [{name: a, args: [x]}]}",
        ),
    ],
)
def test_examples(base: str, over: str, wanted: str) -> None:
    before = yaml.safe_load(base)
    assert merged(base, over) == yaml.safe_load(wanted)
    assert yaml.safe_load(base) == before


def test_ports_have_the_key_of_their_kind() -> None:
    base, over = "spec: {ports: [{port: 1, name: a}]}", "spec: {ports: [{port: 1, name: b}]}"
    assert merged(base, over, "Service") == yaml.safe_load(over)
    base, over = base.replace("port:", "containerPort:"), over.replace("port:", "containerPort:")
    assert merged(base, over) == yaml.safe_load(over)


def test_merge_keys_are_those_of_the_api() -> None:
    """In every type that the manifest's kinds reach, and for no other list."""
    for kind, fields in TYPES.items():
        for name, text in fields.items() if isinstance(fields, dict) else ():
            if text.startswith("["):
                ports = PORTS["Service" if kind == "ServiceSpec" else "Job"]
                assert text.partition("@")[2] == {**MERGE_KEYS, "ports": ports}.get(name, ""), (kind, name)


@pytest.mark.parametrize(
    ("over", "told"),
    [
        ("spec: {containers: [{image: x}]}", r"Job.spec.containers: .* must have name, by which items"),
        ("spec: {containers: [x]}", r"Job.spec.containers: x: must have name"),
        ("spec: {containers: {name: x}}", r"Job.spec.containers: .*: is a mapping, and must be a list"),
        ("spec: off", r"Job.spec: False: is a single value, and must be a mapping"),
        ("spec: {$patch: remove}", r"Job.spec: \$patch: remove: must be one of merge, replace, delete"),
        ("spec: {$setElementOrder/containers: []}", r"Job.spec: \$setElementOrder/containers: is not known"),
        ("spec: {$retainKeys: type}", r"Job.spec: \$retainKeys: type: must be a list"),
        ("$patch: delete", r"Job: \$patch: delete: a run needs this document"),
        ("metadata: {name: other}", r"Job: metadata.name: other: must be None, or be left out"),
    ],
)
def test_what_fits_nowhere_is_refused(over: str, told: str) -> None:
    with pytest.raises(UserError, match=f"--overlay: {told}"):
        merged("spec: {containers: [{name: a}]}", over)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("kind: ConfigMap", "kind: ConfigMap: must be one of Job, Service"),
        ("- 1", r"kind: \[1\]: must be one of|kind: 1: must be one of"),
        ("kind: Job\nspec: {x: 2026-01-01}", "spec: x: 2026-01-01: is taken for a date; put it in quotes"),
        ("kind: Job\nspec: {1: x}", "spec: 1: must be a text, in quotes"),
        ("kind: [", "is neither JSON nor YAML"),
        ("\ud800", "is no text in UTF-8"),
        ("[" * 100_000, "is neither JSON nor YAML"),
        ('{"kind": "Job", "spec": ' + "[" * 60 + "]" * 60 + "}", "spec: is nested more than 50 levels deep"),
        ("kind: Job\nspec: &a {x: *a}", "has aliases"),
        ("kind: Job\na: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "has aliases"),
    ],
)
def test_files_that_are_no_overlays(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "over.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(UserError, match=f"{path}: ({told})"):
        read_overlay(path)


def test_json_needs_no_library(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"kind": "Job"}, {"kind": "Service"}]')
    (tmp_path / "a.yaml").write_text("kind: Job")
    with patch.object(overlay, "import_module", side_effect=ImportError):
        assert [each["kind"] for each in read_overlay(tmp_path / "a.json")] == ["Job", "Service"]
        with pytest.raises(UserError, match="has no PyYAML to read YAML; write it as JSON"):
            read_overlay(tmp_path / "a.yaml")
