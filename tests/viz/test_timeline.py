"""The timeline: what is recorded is what was scheduled, and the figure is drawn for 4 and for 64 requests."""

from __future__ import annotations

import itertools
import random

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from llmlab.config import CacheConfig, SchedulerConfig
from llmlab.engine.request import Request
from llmlab.engine.scheduler import Scheduler
from llmlab.sampling.params import SamplingParams
from llmlab.viz.timeline import record_schedule, timeline_figure


def run(num_requests: int, num_blocks: int, budget: int):
    """A scheduler fed two requests a step until all are done, every third with a shared prefix; its outputs beside the record."""
    rng = random.Random(0)
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=200, max_num_batched_tokens=budget), CacheConfig(num_blocks, block_size=4)
    )
    pending = [
        Request(
            f"r{i}",
            ([9] * 12 if i % 3 == 0 else []) + [rng.randrange(50) for _ in range(rng.randint(4, 24))],
            SamplingParams(max_tokens=rng.randint(4, 16)),
        )
        for i in range(num_requests)
    ]
    outputs = []
    with record_schedule(scheduler) as schedule:
        while pending or scheduler.has_unfinished_requests():
            for request in pending[:2]:
                scheduler.add_request(request)
            pending = pending[2:]
            output = scheduler.schedule()
            outputs.append(output)
            scheduler.update_from_output(output, {r: rng.randrange(50) for r in output.num_scheduled_tokens})
    return scheduler, schedule, outputs


def test_the_record_is_what_was_scheduled():
    scheduler, schedule, outputs = run(12, 16, 16)
    tokens, events = schedule.token_table(), schedule.event_table()
    for output in outputs:
        rows = tokens[tokens["step"] == output.step].set_index("request_id")
        assert rows["num_tokens"].to_dict() == output.num_scheduled_tokens
        assert rows["first_position"].to_dict() == output.num_computed_tokens
    totals = scheduler.stats.totals
    assert (events["event"] == "preempted").sum() == totals.num_preemptions > 0
    hits = events[events["event"] == "hit"]["num_tokens"].sum()
    assert hits == totals.prefix_cache_hits + totals.resumed_cache_hits > 0
    assert len(schedule.step_table()) == len(outputs)
    assert schedule.step_table()["blocks_used"].max() <= 16
    # a request's first chunk, and only tokens of its prompt, are prefill; nothing is a decode because it is one token
    assert set(tokens["kind"]) == {"prefill", "decode", "recompute"}
    assert (tokens[tokens["kind"] == "decode"]["num_tokens"] == 1).all()


def test_recording_ends_with_the_block():
    scheduler, schedule, _ = run(2, 16, 16)
    before = len(schedule.tokens)
    scheduler.add_request(Request("late", [1, 2, 3], SamplingParams(max_tokens=1)))
    scheduler.schedule()
    assert len(schedule.tokens) == before


@pytest.mark.parametrize(("num_requests", "num_blocks"), [(4, 14), (64, 60)])
def test_legible_for_few_and_for_many(num_requests, num_blocks):
    _, schedule, _ = run(num_requests, num_blocks, 16)
    figure = timeline_figure(schedule, "a title")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    requests, tokens, blocks = figure.axes
    assert [requests.get_ylabel(), tokens.get_ylabel(), blocks.get_xlabel()] == ["request", "tokens", "step"]
    renderer = canvas.get_renderer()
    boxes = [label.get_window_extent(renderer) for label in requests.get_yticklabels()]
    assert all(not a.overlaps(b) for a, b in itertools.pairwise(boxes))
    assert all(box.x0 >= 0 for box in boxes)


def test_nothing_recorded():
    scheduler = Scheduler(SchedulerConfig(max_model_len=8), CacheConfig(4))
    with record_schedule(scheduler) as schedule:
        pass
    with pytest.raises(ValueError, match="nothing was recorded"):
        timeline_figure(schedule, "empty")
