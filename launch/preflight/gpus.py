"""The checks that follow from what nvidia-smi says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Optional

from ..base.texts import counted
from .findings import FAIL, OK, UNCHECKED, WARN, Sheet
from .smi import SLOWDOWNS, Broken, SmiError, Survey, count, flag, survey
from .thresholds import Limits, Thresholds

HARDWARE_SLOWDOWNS = SLOWDOWNS[:3]  # the rest is the driver's own doing
Values = dict[str, Optional[float]]  # by the name of a GPU


def check_gpus(
    sheet: Sheet, expected: Optional[int], thresholds: Thresholds, before: Mapping[str, float], most: float
) -> None:
    """Ask nvidia-smi and judge the answers. expected: GPUs that there should be, None: as many as there are.

    before: corrected ECC errors of GPUs at an earlier preflight, by uuid. most: seconds that it may take altogether.
    """
    general = thresholds.of("")
    limit = general.number("smi_seconds") or 10.0
    try:
        found = survey(min(limit, most), most)
    except SmiError as error:
        sheet.add("nvidia-smi", FAIL, None, f"answers in {limit:g} s", str(error))
        return
    sheet.add(
        "nvidia-smi", OK, round(found.seconds, 2), f"answers in {limit:g} s", f"answered in {found.seconds:.1f} s"
    )
    names = sorted({gpu["name"] for gpu in found.gpus})
    sheet.gpu = names[0] if names else ""
    limits = thresholds.of(sheet.gpu)
    _number(sheet, names, len(found.gpus), expected)
    if not found.gpus:
        return
    sheet.versions["driver"] = found.gpus[0]["driver_version"]
    _ecc(sheet, found, limits, before)
    _rows(sheet, found)
    _pages(sheet, found, limits)
    _links(sheet, found, limits)
    _slowdown(sheet, found)
    _idle(sheet, found, limits)


def _number(sheet: Sheet, names: list[str], found: int, expected: Optional[int]) -> None:
    wrong = found != expected if expected is not None else found == 0
    rule = f"= {expected}" if expected is not None else "> 0"
    text = counted(found, "GPU") + (f" of {expected} expected" if expected is not None else "")
    sheet.add("GPU count", FAIL if wrong else OK, found, rule, text)
    if len(names) > 1:
        sheet.add("GPU kind", FAIL, names, "one kind", f"GPUs of several kinds: {', '.join(names)}")


def _read(
    sheet: Sheet, check: str, found: Survey, group: str, read: Callable[[Mapping[str, str]], Optional[float]]
) -> Optional[Values]:
    """A value of every GPU; None if there is none to judge, which is noted. A GPU that is broken fails the check."""
    if group in found.missing:
        sheet.add(check, UNCHECKED, None, "", f"cannot be read: {found.missing[group]}")
        return None
    values: Values = {}
    for gpu in found.gpus:
        name = f"GPU {gpu['index']}"
        try:
            values[name] = read(gpu)
        except (Broken, KeyError) as error:
            sheet.add(check, FAIL, str(error), "a number", f"{name} ({gpu['pci.bus_id']}): nvidia-smi says {error}")
            return None
    if all(value is None for value in values.values()):
        sheet.add(check, UNCHECKED, None, "", "these GPUs do not tell")
        return None
    return values


def _above(sheet: Sheet, check: str, values: Optional[Values], limit: Optional[float], what: str) -> None:
    """Judge values that must not be above a limit; without a limit, there is no check."""
    if values is None or limit is None:
        return
    over = {name: value for name, value in values.items() if value is not None and value > limit}
    most = max(value for value in values.values() if value is not None)
    text = ", ".join(f"{name}: {value:g} {what}" for name, value in over.items()) or f"at most {most:g} {what}"
    sheet.add(check, FAIL if over else OK, over or most, f"<= {limit:g}", text)


def _ecc(sheet: Sheet, found: Survey, limits: Limits, before: Mapping[str, float]) -> None:
    uncorrected, corrected = "ecc.errors.uncorrected.volatile.total", "ecc.errors.corrected.volatile.total"
    values = _read(sheet, "ECC uncorrectable", found, "ecc", lambda gpu: count(gpu[uncorrected]))
    _above(sheet, "ECC uncorrectable", values, limits.number("ecc_uncorrectable"), "uncorrectable errors")
    values = _read(sheet, "ECC SRAM", found, "sram", lambda gpu: count(gpu["ecc.errors.uncorrected.aggregate.sram"]))
    _above(sheet, "ECC SRAM", values, limits.number("sram_uncorrectable"), "uncorrectable SRAM errors in its life")
    values = _read(sheet, "ECC corrected", found, "ecc", lambda gpu: count(gpu[corrected]))
    if values is None:
        return
    now = {gpu["uuid"]: values[f"GPU {gpu['index']}"] for gpu in found.gpus}
    sheet.measured["corrected"] = {uuid: value for uuid, value in now.items() if value is not None}
    more = {
        f"GPU {gpu['index']}": value - before[gpu["uuid"]]
        for gpu in found.gpus
        for value in [now[gpu["uuid"]]]
        if value is not None and value > before.get(gpu["uuid"], value)
    }
    text = ", ".join(f"{name}: {value:g} more" for name, value in more.items()) or "not more than at the last preflight"
    sheet.add("ECC corrected", WARN if more else OK, more or 0, "not rising", text)


def _rows(sheet: Sheet, found: Survey) -> None:
    def bad(gpu: Mapping[str, str]) -> Optional[float]:
        row = found.remapped.get(gpu["uuid"])
        if row is None:
            return None
        flags = [flag(row["remapped_rows.pending"]), flag(row["remapped_rows.failure"])]
        return None if flags == [None, None] else float(sum(bool(value) for value in flags))

    values = _read(sheet, "row remap", found, "remapped", bad)
    _above(sheet, "row remap", values, 0.0, "of: remapping pending, remapping failed")


def _pages(sheet: Sheet, found: Survey, limits: Limits) -> None:
    def retired(gpu: Mapping[str, str]) -> Optional[float]:
        counts = [count(gpu[f"retired_pages.{kind}.count"]) for kind in ("single_bit_ecc", "double_bit")]
        return None if counts == [None, None] else sum(value or 0.0 for value in counts)

    def pending(gpu: Mapping[str, str]) -> Optional[float]:
        found = flag(gpu["retired_pages.pending"])
        return None if found is None else float(found)

    values = _read(sheet, "retired pages", found, "pages", retired)
    _above(sheet, "retired pages", values, limits.number("retired_pages"), "retired pages")
    if values is not None:  # GPUs with row remapping have neither
        _above(
            sheet, "pages pending", _read(sheet, "pages pending", found, "pages", pending), 0.0, "pending retirement"
        )


def _links(sheet: Sheet, found: Survey, limits: Limits) -> None:
    wanted, speed = limits.number("nvlinks"), limits.number("nvlink_gb") or 0.0
    if "nvlink" in found.missing:
        sheet.add("NVLink", FAIL if wanted else UNCHECKED, None, "", f"cannot be read: {found.missing['nvlink']}")
        return
    active = [sum(link is not None and link >= speed for link in gpu) for gpu in found.links]
    if wanted is not None:
        links = {f"GPU {place}": number for place, number in enumerate(active) if number < wanted}
        missing = len(active) < len(found.gpus)
        text = ", ".join(f"{name}: {number} of {wanted:g} links" for name, number in links.items())
        text += f"{'; ' * bool(text)}told of {len(active)} of {len(found.gpus)} GPUs" if missing else ""
        rule = f"{wanted:g} links of {speed:g} GB/s on every GPU"
        sheet.add("NVLink", FAIL if text else OK, links or min(active, default=0), rule, text or "all links are active")
    elif len(set(active)) > 1:
        sheet.add("NVLink", WARN, active, "as many on every GPU", f"active links by GPU: {active}")
    else:
        sheet.add(
            "NVLink", OK, active[:1], "as many on every GPU", f"{active[0] if active else 0} active links per GPU"
        )
    if any(found.links):
        worst = sorted(found.link_errors.items(), key=lambda item: -item[1])
        text = ", ".join(f"{name}s: {number}" for name, number in worst[:4]) + (", …" if len(worst) > 4 else "")
        sheet.add("NVLink errors", WARN if worst else OK, dict(worst[:20]), "= 0", text or "none")


def _slowdown(sheet: Sheet, found: Survey) -> None:
    def reasons(names: tuple[str, ...]) -> Callable[[Mapping[str, str]], Optional[float]]:
        def read(gpu: Mapping[str, str]) -> Optional[float]:
            flags = [flag(gpu[name]) for name in names]
            return None if all(value is None for value in flags) else float(any(flags))

        return read

    values = _read(sheet, "slowdown", found, "slowdown", reasons(HARDWARE_SLOWDOWNS))
    if values is None:
        return
    by_driver = _read(sheet, "slowdown", found, "slowdown", reasons(SLOWDOWNS[3:])) or {}
    hardware, software = ([name for name, value in found.items() if value] for found in (values, by_driver))
    if hardware:
        sheet.add("slowdown", FAIL, hardware, "none", f"{', '.join(hardware)}: the hardware holds clocks down")
    else:
        text = f"{', '.join(software)}: the driver holds clocks down for heat" if software else "none"
        sheet.add("slowdown", WARN if software else OK, software, "none", text)


def _idle(sheet: Sheet, found: Survey, limits: Limits) -> None:
    for check, key, column, unit in (
        ("idle temperature", "temperature", "temperature.gpu", "degrees C"),
        ("memory in use", "memory_used", "memory.used", "MiB"),
    ):
        values = _read(sheet, check, found, "base", lambda gpu, column=column: count(gpu[column]))  # type: ignore[misc]
        if values is not None:
            name, most = max(((n, v) for n, v in values.items() if v is not None), key=lambda pair: pair[1])
            sheet.judge(check, most, ">=", limits, key, f"at most {most:g} {unit} ({name})")
    if "processes" in found.missing:
        sheet.add("foreign processes", UNCHECKED, None, "none", f"cannot be read: {found.missing['processes']}")
        return
    shown = [f"{row['pid']} {row['process_name']}" for row in found.processes]
    text = f"others use these GPUs: {', '.join(shown[:5])}" + (", …" if len(shown) > 5 else "")
    sheet.add("foreign processes", FAIL if shown else OK, shown[:20], "none", text if shown else "none")


def gpu_values(measured: Mapping[str, Any], key: str) -> list[tuple[int, float]]:
    """Return the value `key` that the probe has measured on each GPU of a node, as (GPU number, value)."""
    found = measured.get("gpus")
    rows = enumerate(found) if isinstance(found, list) else []
    return [
        (place, float(row[key]))
        for place, row in rows
        if isinstance(row, Mapping) and isinstance(row.get(key), (int, float)) and not isinstance(row.get(key), bool)
    ]
