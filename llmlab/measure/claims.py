"""The claims register: what is said about LLM inference, the rule that decides on it, and what measurements found.

A rule is written before anything is measured, in words and as a function of named numbers. A finding holds numbers, never a
verdict: that is computed from them each time it is shown. A refuted claim is a good result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llmlab.measure.system import BUSY

if TYPE_CHECKING:
    import pandas as pd

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Verdict:
    """``confirmed``, ``refuted``, ``depends`` on what ``on`` says, or ``not decided`` because of it."""

    word: Literal["confirmed", "refuted", "depends", "not decided"]
    on: str = ""

    def __str__(self) -> str:
        if self.word == "not decided":
            return f"{self.word} ({self.on})"
        return f"{self.word}: {self.on}" if self.on else self.word


CONFIRMED, REFUTED = Verdict("confirmed"), Verdict("refuted")
MACHINE_BUSY = Verdict("not decided", "machine busy")


def depends(on: str) -> Verdict:
    return Verdict("depends", on)


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        rule: in words, when it is confirmed; :attr:`decide` is the same in code.
        numbers: the names that ``decide`` reads, with what each means and its unit.
        measure: finds the numbers in about a second, with neither model nor accelerator; None where that is not possible.
        needs: the hardware without which it can't be measured, in words; empty if any machine will do.
    """

    id: str
    statement: str
    rule: str
    numbers: Mapping[str, str]
    decide: Callable[[Numbers], Verdict]
    measure: Callable[[], dict[str, float]] | None = None
    needs: str = ""


@dataclass(frozen=True)
class Finding:
    """What one measurement of one claim found, where and when. ``model`` is empty where none was involved.

    ``load``: the share of the machine that worked for others meanwhile, where clocks had a part in the numbers.
    """

    claim: str
    numbers: dict[str, float]
    machine: str
    model: str
    date: str
    load: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """By the claim's rule; a busy machine decides nothing."""
        return MACHINE_BUSY if self.load >= BUSY else claim(self.claim).decide(self.numbers)

    def __str__(self) -> str:
        return f"{self.claim} {self.verdict} ({numbers_text(self.numbers)})"


def claim(claim_id: str) -> Claim:
    """Raises ValueError for an id that is not in the register."""
    found = next((c for c in register() if c.id == claim_id), None)
    if found is None:
        raise ValueError(f"no claim is called {claim_id!r}; they are C01 to C{len(register()):02d}")
    return found


def register() -> tuple[Claim, ...]:
    """All claims, in order."""
    from llmlab.measure.claims_register import CLAIMS

    return CLAIMS


def judge(
    claim_id: str,
    numbers: Numbers,
    *,
    machine: str = "",
    model: str = "",
    out: str | Path | None = None,
    load: float = 0.0,
) -> Finding:
    """Turn measured numbers into a finding, and keep it in ``out/claims/`` if ``out`` is given.

    Args:
        machine: where the numbers come from; empty for this machine's CPU, or for numbers that no machine had a part in.
        model: its name or directory; of that the last part is kept.
        load: the share of the machine that worked for others while something was clocked.

    Raises:
        ValueError: unknown claim, or numbers other than those that its rule reads.
    """
    wanted = set(claim(claim_id).numbers)
    if set(numbers) != wanted:
        raise ValueError(f"{claim_id} is decided by {sorted(wanted)}, got {sorted(numbers)}")
    finding = Finding(
        claim_id,
        {name: float(value) for name, value in numbers.items()},
        machine or _this_machine(),
        Path(model).name,
        datetime.now(UTC).isoformat(timespec="seconds"),
        round(load, 2),
    )
    if out:
        folder = Path(out) / "claims"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{claim_id}.json").write_text(json.dumps(asdict(finding), indent=1) + "\n", encoding="utf-8")
    return finding


def read_findings(*folders: str | Path) -> list[Finding]:
    """Findings in ``claims/`` of these folders (reports) and anywhere below, the newest of a claim and machine only."""
    newest: dict[tuple[str, str], Finding] = {}
    for folder in folders:
        for file in sorted(Path(folder).glob("**/claims/*.json")):
            finding = Finding(**json.loads(file.read_text(encoding="utf-8")))
            key = finding.claim, finding.machine
            if key not in newest or newest[key].date < finding.date:
                newest[key] = finding
    return sorted(newest.values(), key=lambda finding: finding.claim)


def known_findings(*folders: str | Path, measure: Iterable[Claim] = ()) -> list[Finding]:
    """What is known: findings of the folders, of ``data/measurements`` where they say nothing, and of claims measured now.

    Args:
        measure: claims to measure on the spot if the folders have no finding of theirs; each needs its ``measure``.
    """
    from llmlab.measure.measurements import stored_findings

    found = read_findings(*folders)
    there = {finding.claim for finding in found}
    found += [judge(one.id, one.measure()) for one in measure if one.measure is not None and one.id not in there]
    there = {(finding.claim, finding.machine) for finding in found}
    found += [finding for finding in stored_findings() if (finding.claim, finding.machine) not in there]
    return sorted(found, key=lambda finding: finding.claim)


def claims_table(*folders: str | Path, measure: bool = True, findings: Sequence[Finding] | None = None) -> pd.DataFrame:
    """One row a claim and machine: claim, statement, verdict, numbers, rule, measured on.

    Args:
        folders: where findings are; those of ``data/measurements`` are shown beside them.
        measure: measure the claims on the spot that need neither model nor accelerator and have no finding yet.
        findings: show these instead of what :func:`known_findings` gives.
    """
    import pandas as pd

    if findings is None:
        findings = known_findings(*folders, measure=quick_claims() if measure else ())
    rows = []
    for one in register():
        mine = [finding for finding in findings if finding.claim == one.id]
        if not mine:
            rows.append(_row(one, f"not measured here: needs {one.needs}" if one.needs else "not measured yet"))
        for f in mine:
            where = ", ".join(filter(None, (f.machine, f.model, f.date[:10])))
            rows.append(_row(one, str(f.verdict), numbers_text(f.numbers), where))
    return pd.DataFrame(rows)


def numbers_text(numbers: Numbers) -> str:
    """``a 1.23, b 4.5e+03``: numbers in one line, four digits at most."""
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def quick_claims() -> Iterable[Claim]:
    """The claims that can be measured at once, with neither model nor accelerator."""
    return (one for one in register() if one.measure is not None)


def _row(one: Claim, verdict: str, numbers: str = "", where: str = "") -> dict[str, str]:
    return {
        "claim": one.id,
        "statement": one.statement,
        "verdict": verdict,
        "numbers": numbers,
        "rule": one.rule,
        "measured on": where,
    }


def _this_machine() -> str:
    from llmlab.measure.hardware import describe_machine

    return describe_machine("cpu").device
