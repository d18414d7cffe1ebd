"""Timers on a clock that the test turns by hand: what is counted, what is left out, and what may be concluded from it."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmlab.measure import timer
from llmlab.measure.timer import Measurement, compare, measure, measure_in_turns, rotation, torch_threads


class Clock:
    """Stands for the module ``time``: moves only when the work that is clocked says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timer, "time", clock)
    return clock


def test_percentiles_are_numpys() -> None:
    samples = tuple(np.random.default_rng(0).exponential(size=31).tolist())
    measured = Measurement(samples)
    assert (measured.low, measured.median, measured.high) == pytest.approx(np.percentile(samples, (10, 50, 90)))
    assert measured.best == min(samples)
    assert measured.repeats == 31


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        Measurement(())


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.5 s"), (3.25e-3, "3.25 ms"), (4e-5, "40 µs")])
def test_text_has_unit_spread_and_repeats(seconds: float, text: str) -> None:
    assert str(Measurement((seconds,) * 5)).startswith(text)
    assert "5 repeats" in str(Measurement((seconds,) * 5))


def test_samples_are_the_times_of_the_calls_without_the_warm_up(clock: Clock) -> None:
    times = iter([9.0, 8.0, 7.0, 6.0, 0.1, 0.2, 0.3, 0.4])  # three warm-ups, one to choose the number of calls

    def work() -> None:
        clock.now += next(times)

    assert measure(work, warmup=3, repeats=4, max_seconds=1e9).samples == pytest.approx((0.1, 0.2, 0.3, 0.4))


def test_short_calls_are_clocked_several_at_a_time(clock: Clock) -> None:
    calls = 0

    def work() -> None:
        nonlocal calls
        calls += 1
        clock.now += 2**-20  # exact in binary: 53 of them make 50 µs

    measured = measure(work, warmup=1, repeats=5)
    assert measured.samples == (2**-20,) * 5
    assert calls == 1 + 1 + 5 * 53


def test_stops_in_time_but_not_before_three_samples(clock: Clock) -> None:
    def work() -> None:
        clock.now += 10.0

    assert measure(work, warmup=0, repeats=100, max_seconds=1.0).repeats == 3
    assert measure(work, warmup=0, repeats=100, max_seconds=65.0).repeats == 7


def test_arguments_are_used_in_turn(clock: Clock) -> None:
    seen = []

    def work(x: int) -> None:
        seen.append(x)
        clock.now += 1.0

    measure(work, inputs=[(1,), (2,), (3,)], warmup=0, repeats=6, max_seconds=1e9)
    assert seen == [1, 2, 3] + [1] + [1, 2, 3, 1, 2, 3]


def test_ways_take_turns_sample_by_sample(clock: Clock) -> None:
    order = []

    def way(name: str):
        def work() -> None:
            order.append(name)
            clock.now += 1.0

        return work

    measured = measure_in_turns({"a": way("a"), "b": way("b")}, warmup=0, repeats=3, max_seconds=1e9)
    assert order[-6:] == ["a", "b", "a", "b", "a", "b"]
    assert measured["a"].repeats == measured["b"].repeats == 3


@pytest.mark.parametrize("bad", [{"repeats": 2}, {"warmup": -1}, {"inputs": []}])
def test_bad_arguments_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match="need repeats"):
        measure(lambda: None, **bad)


def test_a_drift_that_both_share_does_not_hide_a_difference() -> None:
    drift = np.linspace(1, 10, 21)
    comparison = compare("new", Measurement(tuple(drift)), "old", Measurement(tuple(1.2 * drift)))
    assert comparison.ratio == pytest.approx(1.2)
    assert comparison.shown and not comparison.inside_spread
    assert "new is faster than old: 1.20×" in str(comparison)


def test_noise_alone_shows_no_difference() -> None:
    rng = np.random.default_rng(1)
    a, b = (Measurement(tuple(rng.lognormal(0, 0.2, 25))) for _ in range(2))
    assert not compare("a", a, "b", b).shown
    assert "no difference shown" in str(compare("a", a, "b", b))


def test_a_small_sure_difference_is_called_inside_the_spread() -> None:
    rng = np.random.default_rng(2)
    a, b = Measurement(tuple(rng.normal(1, 0.1, 400))), Measurement(tuple(rng.normal(1.05, 0.1, 400)))
    comparison = compare("a", a, "b", b)
    assert comparison.shown and comparison.inside_spread
    assert "inside the spread" in str(comparison)


def test_unequal_numbers_of_samples_are_compared_as_a_whole() -> None:
    comparison = compare("a", Measurement((1.0,) * 9), "b", Measurement((3.0,) * 5))
    assert comparison.ratio == comparison.sure_low == comparison.sure_high == 3.0


@given(st.integers(3, 200))
def test_the_interval_of_the_median_covers_it_with_95_percent(n: int) -> None:
    left_out = timer._order_statistic(n, n)
    missed = 2 * scipy.stats.binom.cdf(left_out, n, 0.5)
    # With up to five samples even the whole range does not reach 95 %; nothing is left out then.
    assert missed <= 0.05 or left_out == 0
    assert 2 * scipy.stats.binom.cdf(left_out + 1, n, 0.5) > 0.05, "wider than it needs to be"


def test_rotation_is_larger_than_the_cache() -> None:
    sets = rotation(lambda: (torch.zeros(1000),), cache_bytes=20_000)
    assert sum(t.nbytes for (t,) in sets) >= 40_000
    assert len({t.data_ptr() for (t,) in sets}) == len(sets)
    assert len(rotation(lambda: (torch.zeros(1),), cache_bytes=10**9, most=5)) == 5


@pytest.mark.gpu
def test_cuda_events_time_the_device() -> None:
    x = torch.randn(2048, 2048, device="cuda")
    measured = measure(lambda: x @ x, device="cuda", repeats=10)
    assert measured.repeats == 10
    assert 0 < measured.best < 1


def test_nothing_is_decided_on_a_busy_machine() -> None:
    fast, slow = Measurement((1.0,) * 25, load=0.1), Measurement((2.0,) * 25, load=0.6)
    disturbed = compare("fast", fast, "slow", slow)
    assert disturbed.load == 0.6
    assert not disturbed.shown
    assert str(disturbed).endswith("not decided (machine busy)")
    quiet = compare("fast", fast, "slow", Measurement((2.0,) * 25))
    assert quiet.shown
    assert "faster" in str(quiet)


def test_threads_come_back() -> None:
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="inside"), torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise RuntimeError("inside")
    assert torch.get_num_threads() == before
