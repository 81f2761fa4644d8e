"""The laws that `fit.json` of an experiment holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megalite.base.errors import InputError
from megalite.base.files import exists, read_object
from megalite.scaling.kaplan import Kaplan
from megalite.scaling.law import Law
from megalite.scaling.methods import AnyLaw, law_of
from megalite.scaling.record import VERSION
from megalite.scaling.settings import Settings

MAX_BYTES = 64 << 20
REQUIRED_KEYS = ("version", "settings", "data", "caveats", "rates", "downstream")


@dataclass(frozen=True)
class Stored:
    """An experiment's fit. folder: of the experiment. fit: the content of `fit.json`; empty where there is none."""

    folder: Path
    settings: Settings
    fit: Mapping[str, Any]

    def main(self, method: str) -> Mapping[str, Any]:
        """Results of a method with the definition of N that counts; empty where it has none."""
        found: Mapping[str, Any] = self.fit.get("fits", {}).get(self.settings.parameters, {}).get(method, {})
        return {} if "failed" in found else found

    @cached_property
    def losses(self) -> tuple[Law | Kaplan, Law | Kaplan | None] | None:
        """The law that tells the loss of any N and D, and the same of draws."""
        method = self.fit.get("holdout_method")
        if not method:
            return None
        law = law_of(method, self.main(method)["law"])
        samples = self.fit.get("loss_samples") or None
        drawn = law_of(method, samples) if samples else None
        assert isinstance(law, Law | Kaplan)
        return law, drawn if isinstance(drawn, Law | Kaplan) else None

    @cached_property
    def best(self) -> tuple[AnyLaw, AnyLaw | None] | None:
        """The law of the chosen method, and the same of draws."""
        method = self.settings.method
        if not self.main(method):
            return None
        samples = self.fit.get("samples") or None
        return law_of(method, self.main(method)["law"]), law_of(method, samples) if samples else None


def read_fit(folder: Path, settings: Settings) -> Mapping[str, Any]:
    """`fit.json`, or nothing where there is none. Raises InputError for a file that this program has not written."""
    path = folder / "fit.json"
    if not exists(path):
        return {}
    found = read_object(path, MAX_BYTES)
    again = "; delete it, or run megalite-sweep fit again"
    if found.get("version") != VERSION or any(name not in found for name in REQUIRED_KEYS):
        raise InputError(f"{path}: version = {found.get('version')!r:.40}: is not what this program writes{again}")
    told = found["settings"].get("method"), found["settings"].get("parameters"), found.get("kind")
    asked = settings.method, settings.parameters, settings.kind
    if told != asked:
        names = ("fit.method", "parameters.fit", "kind")
        name, old, new = next(each for each in zip(names, told, asked, strict=True) if each[1] != each[2])
        raise InputError(f"{path}: was fitted with {name} = {old}, and experiment.yaml has {new}{again}")
    return found
