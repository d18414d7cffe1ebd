"""Workloads: what was asked for is what arrives, shared prefixes are shared, nonsense is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llmlab.workload import Lengths, synthetic, trace


def test_a_poisson_process_has_exponential_gaps() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    arrivals = synthetic(4000, rate=5.0, seed=3).arrivals
    gaps = np.diff(arrivals, prepend=0.0)
    assert scipy_stats.kstest(gaps, "expon", args=(0, 1 / 5.0)).pvalue > 0.01
    assert len(arrivals) / arrivals[-1] == pytest.approx(5.0, rel=0.05)


def test_an_infinite_rate_is_all_at_once() -> None:
    assert not synthetic(10).arrivals.any()


@pytest.mark.parametrize(
    ("text", "low", "high", "mean"),
    [("7", 7, 7, 7), ("uniform:10:20", 10, 20, 15), ("lognormal:100:0.5:400", 1, 400, 100 * math.exp(0.125))],
)
def test_lengths(text: str, low: int, high: int, mean: float) -> None:
    drawn = Lengths.parse(text).sample(np.random.default_rng(0), 20_000)
    assert (low, high) == (drawn.min(), drawn.max()) or text.startswith("lognormal")
    assert drawn.min() >= low and drawn.max() <= high
    assert drawn.mean() == pytest.approx(mean, rel=0.03)


def test_the_median_of_lognormal_lengths_is_what_was_asked_for() -> None:
    drawn = Lengths("lognormal", 300, 0.9).sample(np.random.default_rng(0), 20_000)
    assert np.median(drawn) == pytest.approx(300, rel=0.03)
    assert np.log(drawn).std() == pytest.approx(0.9, rel=0.03)


def test_lengths_without_bounds_do_not_overflow() -> None:
    drawn = Lengths("lognormal", 1e6, 300.0).sample(np.random.default_rng(0), 1000)
    assert drawn.min() == 1 and drawn.max() == 2**31 - 1


def test_a_trace_that_is_no_file(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no trace file"):
        trace(tmp_path)
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match="is not a CSV file"):
        trace(tmp_path / "binary")


def test_the_same_seed_is_the_same_workload() -> None:
    make = lambda seed: synthetic(50, 3.0, "uniform:5:90", "lognormal:30:1", num_prefixes=3, prefix_len=8, seed=seed)
    a, b, other = make(1), make(1), make(2)
    for name in ("arrivals", "prompt_lens", "output_lens", "prefix_ids"):
        assert np.array_equal(getattr(a, name), getattr(b, name))
        assert not np.array_equal(getattr(a, name), getattr(other, name))
    assert [a.prompt_token_ids(i) for i in range(50)] == [b.prompt_token_ids(i) for i in range(50)]
    assert a.prompt_token_ids(0) != other.prompt_token_ids(0)


def test_prefixes_are_shared_and_the_rest_is_not() -> None:
    workload = synthetic(60, prompt="uniform:4:9", num_prefixes=2, prefix_len=33, vocab_size=1000)
    prompts = [workload.prompt_token_ids(i) for i in range(60)]
    assert [len(p) for p in prompts] == workload.prompt_lens.tolist()
    heads = {tuple(p[:33]) for p in prompts}
    assert len(heads) == 2
    assert len({tuple(p[33:]) for p in prompts}) == 60
    by_prefix = {int(k): {tuple(p[:33]) for p, j in zip(prompts, workload.prefix_ids) if j == k} for k in (0, 1)}
    assert all(len(of_prefix) == 1 for of_prefix in by_prefix.values())
    assert all(0 <= token < 1000 for p in prompts for token in p)


def test_a_part_keeps_times_lengths_and_prefixes() -> None:
    workload = synthetic(9, 2.0, "uniform:4:9", num_prefixes=2, prefix_len=5)
    part = workload.part(slice(1, None, 2))
    assert np.array_equal(part.arrivals, workload.arrivals[1::2])
    assert np.array_equal(part.prompt_lens, workload.prompt_lens[1::2])
    for i, j in enumerate(range(1, 9, 2)):
        assert part.prompt_token_ids(i)[:5] == workload.prompt_token_ids(j)[:5]


def test_a_trace_of_rows_and_of_a_file_is_sorted(tmp_path) -> None:
    rows = [(2.0, 30, 4), (0.5, 10, 2)]
    file = tmp_path / "trace.csv"
    file.write_text("arrival,prompt_len,output_len,prefix_id,prefix_len,priority\n2.0,30,4,1,16,\n0.5,10,2,,,3\n")
    for workload in (
        trace(rows),
        trace(file),
        trace([dict(zip(("arrival", "prompt_len", "output_len"), r)) for r in rows]),
    ):
        assert workload.arrivals.tolist() == [0.5, 2.0]
        assert workload.prompt_lens.tolist() == [10, 30]
        assert workload.output_lens.tolist() == [2, 4]
    read = trace(file)
    assert (read.prefix_ids.tolist(), read.prefix_lens.tolist(), read.priorities.tolist()) == ([-1, 1], [0, 16], [3, 0])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no request"),
        ([(0.0, 3)], r"row 0 of the trace must be \(arrival, prompt_len, output_len\)"),
        ([(0.0, 3, 0)], "output_lens must be at least 1 token; request 0 has 0"),
        ([(0.0, -3, 1)], "prompt_lens must be at least 1 token"),
        ([(-1.0, 3, 1)], "arrivals must be finite seconds from 0 on"),
        ([(math.nan, 3, 1)], "row 0 of the trace: arrival must be a number"),
        ([(0.0, 3.5, 1)], "prompt_len must be a number, got 3.5"),
        ([{"arrival": 0, "prompt_len": "x", "output_len": 1}], "prompt_len must be a number, got 'x'"),
        ([{"arrival": 0, "prompt_len": 4}], "row 0 of the trace has no output_len"),
        ([{"arrival": 0, "prompt_len": 4, "output_len": 1, "tokens": 3}], r"unknown columns \['tokens'\]"),
        ([{"arrival": 0, "prompt_len": 4, "output_len": 1, "prefix_len": 4}], "prefix of 4 tokens does not fit"),
        ([{"arrival": 0, "prompt_len": 9, "output_len": 1, "prefix_len": 4, "prefix_id": -2}], "prefix_id"),
    ],
)
def test_a_bad_trace_is_refused(rows, message) -> None:
    with pytest.raises(ValueError, match=message):
        trace(rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_requests": 0}, "num_requests must be an integer of at least 1, got 0"),
        ({"num_requests": True}, "num_requests"),
        ({"num_requests": 3, "rate": 0}, "rate must be positive"),
        ({"num_requests": 3, "rate": -2.0}, "rate must be positive .* got -2.0"),
        ({"num_requests": 3, "rate": math.nan}, "rate must be positive"),
        ({"num_requests": 3, "num_prefixes": 2}, "needs num_prefixes and prefix_len"),
        ({"num_requests": 3, "prefix_len": 2}, "needs num_prefixes and prefix_len"),
        ({"num_requests": 3, "prompt": "gamma:3:4"}, "constant, uniform or lognormal, got 'gamma'"),
        ({"num_requests": 3, "prompt": "uniform:9:3"}, "low <= high"),
        ({"num_requests": 3, "prompt": "uniform:9"}, "low <= high"),
        ({"num_requests": 3, "prompt": "0"}, "start at 1 token"),
        ({"num_requests": 3, "prompt": "1e300"}, "end at 2147483647"),
        ({"num_requests": 3, "prompt": "nan"}, "start at 1 token"),
        ({"num_requests": 3, "prompt": "1.5"}, "whole tokens"),
        ({"num_requests": 3, "output": "lognormal:5:-1"}, "sigma"),
        ({"num_requests": 3, "output": "lognormal:5:1:0"}, "longest"),
        ({"num_requests": 3, "output": "uniform:a:b"}, "uniform:a:b"),
        ({"num_requests": 3, "output": "uniform:1:2:3:4"}, "wrong number of values"),
        ({"num_requests": 3, "output": "constant:5:6"}, "constant lengths take one number"),
    ],
)
def test_nonsense_is_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        synthetic(**arguments)
