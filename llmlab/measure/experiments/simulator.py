"""Is the simulator right? The same workload through the real engine and through the simulator, side by side.

The simulator's clock is fitted on steps of *other* workloads (:func:`calibrate`), so what is compared was not seen before:
:func:`validate`. Everything that both have in common, the scheduler's decisions, is compared exactly in the tests.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from llmlab.measure.clock import CALIBRATED_TERMS, CalibratedClock, RooflineClock, StepSample
from llmlab.measure.efficiency import PERFECT
from llmlab.measure.hardware import ceilings
from llmlab.measure.plan import measured_hardware
from llmlab.measure.serving import STEP_COLUMNS, ServingRun, histogram, request_table
from llmlab.sampling.params import SamplingParams
from llmlab.simulate import run
from llmlab.workload import Lengths, Workload, synthetic, trace

if TYPE_CHECKING:
    from llmlab import LLM
    from llmlab.engine.plan import SchedulerOutput

THROUGHPUT_WITHIN, LATENCY_WITHIN = 0.15, 0.25
"""What the simulator promises of a calibrated clock: relative errors of tokens/s, and of median TTFT and ITL."""


@dataclass(frozen=True)
class Replay:
    """A workload that a real engine has served: its record, and every step's shape with the seconds that it took."""

    run: ServingRun
    steps: list[StepSample]


def replay(llm: LLM, workload: Workload) -> Replay:
    """Serve a workload with a real engine, requests arriving in real time; greedy, every output exactly as long as it says.

    The prefix cache is emptied first. Raises ValueError if the engine is not idle.
    """
    engine, scheduler = llm.engine, llm.engine.scheduler
    if engine.has_unfinished_requests():
        raise ValueError("the engine is busy: it has unfinished requests")
    scheduler.kv_cache_manager.reset_prefix_cache()
    prompts = [{"prompt_token_ids": workload.prompt_token_ids(i)} for i in range(len(workload))]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in workload.output_lens.tolist()]
    requests, steps, samples = [], [], []
    itl, last_token = array("d"), {}
    plans: list[SchedulerOutput] = []
    plan = scheduler.schedule
    scheduler.schedule = lambda: plans.append(plan()) or plans[-1]  # type: ignore[method-assign]  # until the end
    try:
        start, num_added = time.monotonic(), 0
        while num_added < len(workload) or engine.has_unfinished_requests():
            while num_added < len(workload) and workload.arrivals[num_added] <= time.monotonic() - start:
                due = start + float(workload.arrivals[num_added])
                engine.add_request(str(num_added), prompts[num_added], params[num_added], arrival_time=due)
                num_added += 1
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, start + float(workload.arrivals[num_added]) - time.monotonic()))
                continue
            began = time.monotonic()
            outputs = engine.step()
            ended = time.monotonic()
            for output in outputs:
                now, before = output.metrics.last_token_time, last_token.get(output.request_id)
                last_token[output.request_id] = now
                if before is not None:
                    itl.append(now - before)
                if output.finished:
                    requests.append(_row(output, start))
            stats = scheduler.stats.records[-1]
            values = {"time": ended - start, "seconds": ended - began}
            steps.append(tuple(values[name] if name in values else getattr(stats, name) for name in STEP_COLUMNS))
            samples.append(_sample(plans[-1], {output.request_id for output in outputs}, ended - began))
    finally:
        del scheduler.schedule
    record = ServingRun(
        request_table(requests),
        pd.DataFrame(steps, columns=list(STEP_COLUMNS)).assign(replica=0),
        *histogram(itl, np.ones(len(itl), np.int64)),
    )
    return Replay(record, samples)


def _row(output, start: float) -> tuple[float, ...]:
    m, completion = output.metrics, output.outputs[0]
    times = (m.arrival_time, m.first_scheduled_time, m.first_token_time, m.finished_time)
    lengths = (len(output.prompt_token_ids), len(completion.token_ids), output.num_cached_tokens)
    return int(output.request_id), *(t - start for t in times), *lengths, m.num_preemptions


def _sample(plan: SchedulerOutput, got_a_token: set[str], seconds: float) -> StepSample:
    query_lens = np.array(list(plan.num_scheduled_tokens.values()))
    seq_lens = query_lens + list(plan.num_computed_tokens.values())
    return StepSample(query_lens, seq_lens, np.array([r in got_a_token for r in plan.num_scheduled_tokens]), seconds)


def calibration_workloads(llm: LLM, max_num_seqs: int) -> tuple[list[Workload], list[Workload]]:
    """Small workloads whose steps span what a clock must know: ``(prompts, the rest)``.

    Prompts come alone and together, up to the token budget. The rest are decodes, four steps and more at every batch size, and
    prompts that arrive among decodes.
    """
    vocab_size, limit = llm.config.vocab_size, llm.engine.scheduler.max_num_tokens
    room = lambda n: max(1, min(n, limit // 4))
    budget = llm.engine.scheduler.config.max_num_batched_tokens
    together = [[16], [64], [192], [512], [40] * 8, [100] * 8, [200] * max(1, min(max_num_seqs, budget // 200))]
    prompts = [
        trace([(0.0, room(n), 1) for n in lengths], vocab_size=vocab_size, seed=100 + i)
        for i, lengths in enumerate(together)
    ]
    stairs = [(0.0, room(16 + 40 * (i % 5)), 5 + 4 * i) for i in range(max_num_seqs)]
    among = synthetic(16, 20.0, Lengths("uniform", 16, room(256)), "uniform:4:24", vocab_size=vocab_size, seed=99)
    return prompts, [trace(stairs, vocab_size=vocab_size, seed=98), among]


def calibrate(llm: LLM, max_num_seqs: int = 16) -> tuple[CalibratedClock, list[StepSample]]:
    """Fit a clock to this machine and model on some hundred steps: ``(clock, the steps)``.

    Prompts run once before they count, to compile and to touch memory; the first step of each shape, which is
    recorded, is an outlier that the fit does not follow.
    """
    prompts, rest = calibration_workloads(llm, max_num_seqs)
    for workload in prompts:
        replay(llm, workload)
    samples = [sample for workload in (*prompts, *prompts, *rest) for sample in replay(llm, workload).steps]
    return CalibratedClock.fit(roofline_clock(llm), samples), samples


def roofline_clock(llm: LLM) -> RooflineClock:
    """The cost model's clock on this machine's measured ceilings, at their full height."""
    dtype, device = llm.engine.runner.kv_cache.dtype, llm.engine.runner.device
    hardware = measured_hardware(ceilings(device.type), llm.config, dtype)
    block_size = llm.engine.scheduler.cache_config.block_size
    return RooflineClock(llm.config, hardware, PERFECT, dtype=dtype, block_size=block_size)


def simulate_like(llm: LLM, workload: Workload, clock: CalibratedClock) -> ServingRun:
    """The simulator with exactly the scheduler and cache that an engine has."""
    scheduler = llm.engine.scheduler
    return run(workload, clock, scheduler.config, scheduler.cache_config)


def compare(real: Mapping[str, float], simulated: Mapping[str, float]) -> pd.DataFrame:
    """One row a figure: real, simulated, relative error, and whether that is within what is promised (NaN: nothing is)."""
    promised = {
        "output_tokens_per_s": THROUGHPUT_WITHIN,
        "ttft_p50": LATENCY_WITHIN,
        "itl_p50": LATENCY_WITHIN,
        "itl_p99": np.nan,
        "latency_p50": np.nan,
    }
    rows = [
        (name, real[name], simulated[name], simulated[name] / real[name] - 1, most) for name, most in promised.items()
    ]
    table = pd.DataFrame(rows, columns=["figure", "real", "simulated", "error", "promised"]).set_index("figure")
    held = np.where(table["error"].abs() <= table["promised"], "yes", "no")
    return table.assign(holds=np.where(table["promised"].isna(), "", held))


def validate(
    llm: LLM, workloads: Mapping[str, Workload], clock: CalibratedClock, repeats: int = 1
) -> tuple[pd.DataFrame, dict[str, tuple[ServingRun, ServingRun]]]:
    """Each workload served for real (``repeats`` times, figures are medians) and simulated.

    Returns the tables of :func:`compare`, one under the other, and by workload the last real run and the simulated one.
    """
    tables, runs = {}, {}
    for name, workload in workloads.items():
        reals = [replay(llm, workload).run for _ in range(repeats)]
        simulated = simulate_like(llm, workload, clock)
        real = pd.DataFrame([run.summary() for run in reals]).median().to_dict()
        tables[name] = compare(real, simulated.summary())
        runs[name] = reals[-1], simulated
    return pd.concat(tables, names=["workload"]), runs


def fit_errors(clock: CalibratedClock, samples: Sequence[StepSample]) -> pd.DataFrame:
    """One row a step: kind ("decode" or "mixed"), tokens, requests, longest context, measured and modelled seconds."""
    rows = [
        (
            "decode" if s.query_lens.max() == 1 else "mixed",
            int(s.query_lens.sum()),
            len(s.query_lens),
            int(s.seq_lens.max()),
            s.seconds,
            clock.seconds(s.query_lens, s.seq_lens, s.sampled),
        )
        for s in samples
    ]
    return pd.DataFrame(rows, columns=["kind", "tokens", "requests", "longest", "measured", "modelled"])


def validation_workloads(
    llm: LLM, num_requests: int, *, longest_output: int = 64, seed: int = 7
) -> dict[str, Workload]:
    """Mixed lengths, all at once; and the same kind at random times, at half the rate at which the engine served a third lot."""
    limit, vocab_size = llm.engine.scheduler.max_num_tokens, llm.config.vocab_size
    lengths = f"uniform:8:{max(8, min(224, limit // 3))}", f"uniform:6:{max(6, min(longest_output, limit // 4))}"
    make = lambda i, rate: synthetic(num_requests, rate, *lengths, vocab_size=vocab_size, seed=seed + i)
    capacity = replay(llm, make(0, np.inf)).run.summary()["requests_per_s"]
    return {"all at once": make(1, np.inf), "Poisson, half load": make(2, capacity / 2)}


def main() -> None:
    """``python -m llmlab.measure.experiments.simulator``: calibrate, serve for real, simulate, print what holds. A minute."""
    from llmlab import LLM

    parser = argparse.ArgumentParser(description="Hold the simulator against the real engine on this machine.")
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="as for llmlab generate (default: %(default)s)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="requests at once (default: %(default)s)")
    parser.add_argument("--num-requests", type=int, default=40, help="of each workload (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="real runs of each workload (default: %(default)s)")
    args = parser.parse_args()
    llm = LLM(args.model, device=args.device, max_num_seqs=args.max_num_seqs)
    clock, samples = calibrate(llm, args.max_num_seqs)
    errors = fit_errors(clock, samples)
    off = (errors["modelled"] / errors["measured"] - 1).abs().groupby(errors["kind"]).median()
    print(f"{len(samples)} steps fitted; median error: decode {off['decode']:.1%}, mixed {off['mixed']:.1%}")
    print(dict(zip(CALIBRATED_TERMS, clock.weights.round(6).tolist())))
    table, _ = validate(llm, validation_workloads(llm, args.num_requests), clock, args.repeats)
    print(table.round({"real": 4, "simulated": 4, "error": 3}).to_string())


if __name__ == "__main__":
    main()
