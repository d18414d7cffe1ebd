"""``llmlab claims``: the register with what was found, here and now, in reports, and on the machines of ``data/measurements``."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmlab.measure.claims import Claim, Finding, claim, known_findings, register


def show_claims(
    names: Sequence[str] = (), reports: Sequence[str] = (), *, measure: bool = True, as_json: bool = False
) -> int:
    """Print all claims in a table, or some of them in full; those are measured that take about a second, under a bar.

    Args:
        names: claims such as "C14" or "14"; empty for all.
        reports: folders of reports whose findings are shown too.

    Raises:
        ValueError: an unknown claim. FileNotFoundError: a folder that is not there.
    """
    chosen = [claim(_full(name)) for name in names] or list(register())
    for folder in reports:
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"no report at {folder}")
    quick = [one for one in chosen if one.measure is not None] if measure else []
    findings = known_findings(*reports, measure=_with_bar(quick))
    rows = [(one, [f for f in findings if f.claim == one.id]) for one in chosen]
    if as_json:
        print(json.dumps([_record(one, found) for one, found in rows], indent=2, ensure_ascii=False))
    elif names:
        print("\n\n".join(_in_full(one, found) for one, found in rows))
    else:
        print("\n".join(_in_a_line(one, found) for one, found in rows))
    return 0


def _with_bar(claims: Sequence[Claim]) -> Sequence[Claim]:
    from tqdm import tqdm

    return tqdm(
        claims, desc="measuring", unit="claim", leave=False, disable=not sys.stderr.isatty(), dynamic_ncols=True
    )


def _full(name: str) -> str:
    return f"C{int(name):02d}" if name.isdigit() else name.upper()


def _missing(one: Claim) -> str:
    return f"not measured here: needs {one.needs}" if one.needs else "not measured yet: llmlab report measures it"


def _where(finding: Finding) -> str:
    return ", ".join(filter(None, (finding.machine, finding.model, finding.date[:10])))


def _in_a_line(one: Claim, found: Sequence[Finding]) -> str:
    """Claim and statement, and under it a line for each machine."""
    width = max(shutil.get_terminal_size((120, 24)).columns, 60)
    lines = textwrap.wrap(f"{one.id}  {one.statement}", width, subsequent_indent=" " * 5)
    if not found:
        lines.append(f"     – {_missing(one)}")
    for finding in found:
        lines += textwrap.wrap(
            f"{_mark(finding)} {finding.verdict} ({_numbers(finding)}) · {_where(finding)}",
            width,
            initial_indent=" " * 5,
            subsequent_indent=" " * 7,
        )
    return "\n".join(lines)


def _in_full(one: Claim, found: Sequence[Finding]) -> str:
    lines = [f"{one.id}  {one.statement}", f"     rule: {one.rule}", "     numbers:"]
    lines += [f"       {name}: {meaning}" for name, meaning in one.numbers.items()]
    if not found:
        lines.append(f"     – {_missing(one)}")
    for finding in found:
        lines.append(f"     {_mark(finding)} {finding.verdict}, on {_where(finding)}")
        lines += [f"       {name} = {value:.6g}" for name, value in finding.numbers.items()]
    return "\n".join(lines)


def _mark(finding: Finding) -> str:
    return {"confirmed": "✓", "refuted": "✗", "depends": "~"}.get(finding.verdict.word, "?")


def _numbers(finding: Finding) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in finding.numbers.items())


def _record(one: Claim, found: Sequence[Finding]) -> dict[str, Any]:
    return {
        "claim": one.id,
        "statement": one.statement,
        "rule": one.rule,
        "needs": one.needs,
        "findings": [
            {
                "verdict": str(f.verdict),
                "numbers": f.numbers,
                "machine": f.machine,
                "model": f.model,
                "date": f.date,
                "load": f.load,
            }
            for f in found
        ],
    }
