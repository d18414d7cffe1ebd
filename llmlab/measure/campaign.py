"""One go on a machine that one has for a few minutes: what it is, what limits it, are the kernels right, how fast is everything.

``python -m llmlab.measure.campaign --minutes 8 --out DIR`` needs no network, no model and nothing but torch, Triton, numpy,
pandas and jaxtyping. The most valuable comes first, every section is guarded, and one JSON (see ``data/measurements/README.md``)
is written as results come in, so that a run which is cut off still counts.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmlab.measure import campaign_claims, campaign_correctness, campaign_engine, campaign_kernels
from llmlab.measure.claims import judge, quick_claims
from llmlab.measure.hardware import Ceilings, describe_machine
from llmlab.measure.measurements import COLUMNS, ROOT, new_entry, slug, store, write
from llmlab.measure.system import LoadMeter

SAVE_EVERY = 2.0
"""Seconds between two writes of the file."""


def _say(line: str) -> None:
    print(line, flush=True)  # a borrowed machine's output is often read through a pipe


def _traceback() -> str:
    return traceback.format_exc().replace(f"{ROOT}/", "")  # where a checkout lies is nobody's business


class OutOfTime(Exception):
    """A section's time is over: what it found so far stays."""


@dataclass
class Campaign:
    """A run: its entry, which is saved as it grows, and the time that is left.

    Attributes:
        quick: sizes that a test can afford; nothing in the entry is worth keeping then but its form and the correctness.
    """

    device: torch.device
    minutes: float
    quick: bool
    file: Path
    say: Callable[[str], None] = _say
    entry: dict[str, Any] = field(init=False)
    ceilings: Ceilings | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.machine = describe_machine(self.device)
        self.entry = new_entry("campaign", self.machine, {"minutes": self.minutes, "quick": self.quick})
        self._started = time.monotonic()
        self._until = math.inf
        self._saved = 0.0

    @property
    def left(self) -> float:
        """Seconds left to the whole run."""
        return 60 * self.minutes - (time.monotonic() - self._started)

    def add(self, table: str, row: dict[str, Any]) -> None:
        """Keep a row, save now and then; raises OutOfTime when the section has had its share."""
        missing = set(COLUMNS[table]) - set(row)
        if missing:
            raise ValueError(f"a row of {table} lacks {sorted(missing)}")
        self.entry[table].append({key: _plain(value) for key, value in row.items()})
        self.tick()

    def tick(self) -> None:
        if time.monotonic() - self._saved > SAVE_EVERY:
            self.save()
        if time.monotonic() > self._until:
            raise OutOfTime

    def save(self) -> None:
        write(self.entry, self.file)
        self._saved = time.monotonic()

    def section(self, name: str, share: float, run: Callable[[], str | None]) -> None:
        """Run a part for at most ``share`` of the whole time; whatever happens is recorded. ``run`` may return why it skipped."""
        record = {"name": name, "status": "running", "seconds": 0.0, "reason": ""}
        self.entry["sections"].append(record)
        start = time.monotonic()
        self._until = start + min(share * 60 * self.minutes, self.left)
        if self.left <= 0:
            record |= {"status": "skipped", "reason": "no time left"}
        else:
            self.say(f"{time.monotonic() - self._started:6.1f} s  {name}")
            try:
                skipped = run()
                record |= {"status": "skipped" if skipped else "done", "reason": skipped or ""}
            except OutOfTime:
                record["status"] = "cut off"
            except Exception:  # the rest of a run on a borrowed machine must not be lost with one part
                record |= {"status": "failed", "reason": _traceback()}
                self.say(f"          failed: {record['reason'].strip().splitlines()[-1]}")
        record["seconds"] = round(time.monotonic() - start, 2)
        if self.device.type == "cuda":
            with contextlib.suppress(Exception):
                torch.cuda.empty_cache()
        self.save()

    def finding(self, claim: str, numbers: Callable[[], dict[str, float]], model: str = "", load: float = 0.0) -> None:
        """Judge a claim; one whose experiment raises is recorded as a skipped section of its own.

        ``load``: the highest while what the numbers come from was clocked, if that was before.
        """
        meter = LoadMeter()
        try:
            found = {name: float(value) for name, value in numbers().items()}
            if not all(map(math.isfinite, found.values())):
                raise ValueError(f"a number is missing in {found}")
            finding = judge(claim, found, machine=self.machine.device, model=model, load=max(load, meter.share))
        except OutOfTime:
            raise
        except Exception:
            reason = _traceback()
            self.entry["sections"].append({"name": claim, "status": "skipped", "seconds": 0.0, "reason": reason})
            self.say(f"          {claim} skipped: {reason.strip().splitlines()[-1]}")
        else:
            self.entry["findings"].append(asdict(finding))
        self.tick()


def run(campaign: Campaign) -> None:
    """All sections, the most valuable first."""
    on_gpu = campaign.device.type == "cuda"
    large, small, two_layers = campaign_engine.SHAPES
    first = two_layers if campaign.quick else large if on_gpu else small
    second = small if on_gpu and not campaign.quick else ""
    drivers: dict[str, Any] = {}
    campaign.section("ceilings", 0.2, lambda: _ceilings(campaign))
    campaign.section("correctness, bfloat16", 0.2, lambda: _correctness(campaign, torch.bfloat16))
    campaign.section(f"engine: {first}", 0.35, lambda: _engine(campaign, first, drivers))
    campaign.section("claims on steps", 0.1, lambda: _step_claims(campaign, first, drivers))
    drivers.clear()
    campaign.section("kernels", 0.2, lambda: _kernels(campaign, compiled=False))
    campaign.section("correctness, float16", 0.1, lambda: _correctness(campaign, torch.float16))
    campaign.section("more than 2^31 elements", 0.1, lambda: _far(campaign))
    campaign.section("claims", 0.25, lambda: _claims(campaign))
    if second:
        campaign.section(f"engine: {second}", 0.15, lambda: _engine(campaign, second, drivers))
        campaign.section("claims on steps, small model", 0.1, lambda: _step_claims(campaign, second, drivers))
        drivers.clear()
    campaign.section("claims that need no device", 0.1, lambda: _quick_claims(campaign))
    campaign.section("kernels, compiled", 1.0, lambda: _kernels(campaign, compiled=True))


def _ceilings(campaign: Campaign) -> None:
    from llmlab.measure.ceilings import measure_ceilings
    from llmlab.measure.hardware import ceilings

    if campaign.quick:  # no ceilings, and not to be kept
        small = {"gemm_sizes": (64, 128), "largest_buffer": 4 << 20}
        campaign.ceilings = measure_ceilings(campaign.machine, campaign.device, **small)
    else:
        campaign.ceilings = ceilings(campaign.device, remeasure=True)
    campaign.entry["ceilings"] = campaign.ceilings.to_dict()


def _correctness(campaign: Campaign, dtype: torch.dtype) -> None:
    how = "gpu" if campaign.device.type == "cuda" else "interpreter"
    torch.manual_seed(int(time.time()))  # fresh data each run
    for case in campaign_correctness.cases(campaign.device, campaign_correctness.SIZES[how], dtype):
        _keep_checked(campaign, campaign_correctness.check(case, how))


def _far(campaign: Campaign) -> str | None:
    if campaign.device.type != "cuda" or campaign.quick:
        return "needs a CUDA device with 32 GB of free memory, and its time"
    if torch.cuda.mem_get_info(campaign.device)[0] < 32e9:
        return f"needs 32 GB of free memory, there are {torch.cuda.mem_get_info(campaign.device)[0] / 1e9:.0f}"
    for case in campaign_kernels.far_cases(campaign.device):
        _keep_checked(campaign, campaign_correctness.check(case, "gpu"))
        torch.cuda.empty_cache()
    return None


def _keep_checked(campaign: Campaign, row: dict[str, Any]) -> None:
    if not row["ok"]:
        campaign.say(
            f"          wrong: {row['op']}, {row['dtype']}, {row['case']}: {row['error'] or row['reason'][-300:]}"
        )
    campaign.add("correctness", row)


def _kernels(campaign: Campaign, compiled: bool) -> str | None:
    ceilings = _need_ceilings(campaign)
    if compiled and (campaign.quick or campaign.device.type != "cuda"):
        return "compiling for a CPU takes longer than it teaches"
    tokens, seconds = (1, 16, 256, 4096), 0.1
    attention = ((1, 1, 8192), (64, 1, 2048), (1, 2048, 2048), (16, 1, 512), (8, 1, 8192), (4, 512, 2048))
    if campaign.device.type == "cpu":
        tokens, attention, seconds = (1, 16, 128), ((1, 1, 2048), (8, 1, 512), (1, 256, 256)), 0.15
    if campaign.quick:
        tokens, attention, seconds = (1,), ((1, 1, 64),), 0.01
    groups: list[Iterable[campaign_kernels.Contest]] = [
        campaign_kernels.contests(campaign.device, (64, 1024) if compiled else tokens, compiled)
    ]
    if not compiled:
        groups.insert(0, campaign_kernels.attention_contests(campaign.device, attention))
        rows, vocab = ((4,), 1000) if campaign.quick else ((1, 64), 128_256)
        groups.append(campaign_kernels.sampling_contests(campaign.device, rows, vocab))
    for contest in (contest for group in groups for contest in group):
        for row in campaign_kernels.clock(contest, ceilings, campaign.device, seconds):
            campaign.add("kernels", row)
    return None


def _engine(campaign: Campaign, model: str, drivers: dict[str, Any]) -> None:
    ceilings, shapes = _need_ceilings(campaign), campaign_engine.SHAPES[model]
    drivers[model] = campaign_engine.make_driver(model, campaign.device, shapes)
    for row in campaign_engine.steps(model, drivers[model], ceilings, shapes, 0.05 if campaign.quick else 0.6):
        campaign.add("engine", row)


def _step_claims(campaign: Campaign, model: str, drivers: dict[str, Any]) -> str | None:
    import pandas as pd

    if model not in drivers:
        return "the engine did not run"
    length = min(
        32 if campaign.quick else 2048 if campaign.device.type == "cuda" else 512, drivers[model].max_model_len
    )
    campaign.finding("C14", lambda: campaign_claims.bound_by(drivers[model], _need_ceilings(campaign), length), model)
    for claim, numbers, load in campaign_claims.from_steps(pd.DataFrame(campaign.entry["engine"]), model):
        campaign.finding(claim, numbers, model, float(load))
    return None


def _claims(campaign: Campaign) -> None:
    for claim, experiment, gpu_only in campaign_claims.EXPERIMENTS:
        if campaign.quick or (gpu_only and campaign.device.type != "cuda"):
            continue
        campaign.finding(claim, lambda e=experiment: e(campaign.device))


def _quick_claims(campaign: Campaign) -> None:
    for one in () if campaign.quick else quick_claims():
        campaign.finding(one.id, one.measure)  # type: ignore[arg-type]


def _need_ceilings(campaign: Campaign) -> Ceilings:
    if campaign.ceilings is None:
        raise RuntimeError("no ceilings were measured")
    return campaign.ceilings


def _plain(value: Any) -> Any:
    """As JSON has it: numpy's numbers as Python's, NaN and infinities as null."""
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(argv: list[str] | None = None) -> int:
    """Returns 0 if every section came to its end and every kernel is right, else 1: the file says which did not."""
    parser = argparse.ArgumentParser(prog="python -m llmlab.measure.campaign", description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="time for everything (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("campaign"), help="folder to write to (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    parser.add_argument("--store", action="store_true", help="keep the entry in data/measurements as well")
    args = parser.parse_args(argv)
    if args.minutes <= 0:
        parser.error(f"--minutes must be positive, got {args.minutes}")
    if args.store and args.quick:
        parser.error("--store keeps measurements; --quick gives none worth keeping")
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    name = slug(describe_machine(device).device)
    campaign = Campaign(device, args.minutes, args.quick, args.out / f"campaign-{name}.json")
    run(campaign)
    wrong = [row for row in campaign.entry["correctness"] if not row["ok"]]
    failed = [s for s in campaign.entry["sections"] if s["status"] == "failed"]
    tables = ", ".join(f"{len(campaign.entry[table])} {table}" for table in (*COLUMNS, "findings"))
    print(f"{campaign.file}: {tables}; {len(wrong)} wrong, {len(failed)} sections failed")
    if args.store:
        print(store(campaign.entry))
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
