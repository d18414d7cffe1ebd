"""Compares two static reports: what must not get worse, and what is only worth saying."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

LOOP_GROWTH = 0.05  # a hot loop may grow by this much before it is reported
WIDE_SHARE_LOSS = 0.02  # and the share of 128-bit loads may fall by this much

Row = dict[str, Any]


@dataclass(frozen=True)
class Regression:
    """``fatal`` ones fail the gate; the others are notices."""

    case: str
    target: str
    kind: str
    message: str
    fatal: bool

    def __str__(self) -> str:
        return f"{'FAIL' if self.fatal else 'note'}  {self.case} [{self.target}] {self.kind}: {self.message}"


def compare(baseline: Iterable[Row], current: Iterable[Row]) -> list[Regression]:
    """Regressions of ``current`` against ``baseline``, both rows of one Triton version, matched by case and target."""
    known = {(row["case"], row["target"]): row for row in baseline}
    rows = {(row["case"], row["target"]): row for row in current}
    found = [regression for key, row in rows.items() for regression in _absolute(row, known.get(key))]
    for key, before in known.items():
        if key in rows:
            found += _relative(before, rows[key])
        else:
            found.append(Regression(*key, "gone", "in the baseline, not in this report", fatal=False))
    found += [Regression(*key, "new", "not in the baseline yet", fatal=False) for key in rows.keys() - known.keys()]
    return sorted(
        found, key=lambda regression: (not regression.fatal, regression.case, regression.target, regression.kind)
    )


def _absolute(row: Row, before: Row | None) -> list[Regression]:
    """What no configuration may have; known defects (in the baseline, and not worse) are notices."""

    def say(kind: str, message: str, known: bool) -> Regression:
        return Regression(row["case"], row["target"], kind, message + (" (known)" if known else ""), fatal=not known)

    if row["error"]:
        return [say("does not compile", row["error"], before is not None and bool(before["error"]))]
    usable = before is not None and not before["error"]
    found = []
    if row["spills"]:
        found.append(say("spill", f"{row['spills']} spills", usable and before["spills"] >= row["spills"]))
    if row["ctas"] == 0:
        message = (
            f"no CTA fits: {row['registers']} registers, {row['warps']} warps, {row['shared_memory']} shared bytes"
        )
        found.append(say("zero occupancy", message, usable and before["ctas"] == 0))
    return found


def _relative(before: Row, row: Row) -> list[Regression]:
    if before["error"] or row["error"]:
        return []
    found = []

    def say(kind: str, message: str, fatal: bool) -> None:
        found.append(Regression(row["case"], row["target"], kind, message, fatal))

    def had(field: str, kind: str, counted: Callable[[Row], int]) -> None:
        if counted(before) and not counted(row):
            say(kind, f"{field}: {counted(before)} in the baseline, none now", fatal=True)

    for unit in ("wgmma", "tcgen05", "mma", "mfma"):
        if unit != "mma" or not (row["wgmma"] or row["tcgen05"]):  # mma giving way to a better unit is no loss
            had(unit, "lost tensor instructions", lambda r, unit=unit: r[unit])
    had("asynchronous copies", "lost async copies", lambda r: r["async_copies"] + r["bulk_copies"])
    had("asynchronous copies in the hot loop", "lost async copies", lambda r: r["loop_async_copies"] or 0)
    for field in ("wide_load_share", "loop_wide_load_share"):
        lost = before[field] is not None and (row[field] or 0.0) < before[field] - WIDE_SHARE_LOSS
        if lost and (row[field] is not None or not row["bulk_copies"]):  # without any load, bulk copies do it all
            say("lost vector loads", f"{field} {before[field]} -> {row[field]}", fatal=True)
    if before["pipeline_buffers"] > row["pipeline_buffers"]:
        say("shorter pipeline", f"{before['pipeline_buffers']} -> {row['pipeline_buffers']} buffers", fatal=False)
    if row["occupancy"] < before["occupancy"]:
        say("occupancy", f"{before['occupancy']} -> {row['occupancy']} (by {row['limited_by']})", fatal=False)
    old, new = before["loop_instructions"], row["loop_instructions"]
    if old and new and new > old * (1 + LOOP_GROWTH):
        say("loop growth", f"{old} -> {new} instructions (+{100 * (new / old - 1):.0f} %)", fatal=False)
    return found
