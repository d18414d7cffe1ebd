"""How long a step takes, from its shape alone, in microseconds of computing: the simulator's clocks.

Every op's cost is affine in six numbers of a step (:func:`step_features`), whatever the requests in it. The coefficients are not
written down again: each op's own cost is asked at a few shapes (:func:`affine_costs`), once; a step then costs one small
matrix product. A clock is any object with ``seconds(query_lens, seq_lens, num_sampled)``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from llmlab.config import ModelConfig
from llmlab.measure.cost import LINEAR_GROUPS, step_costs
from llmlab.measure.plan import Efficiency, Hardware, communication_seconds, shard_config

Ints = NDArray[np.int64]
NUM_FEATURES = 6


class Clock(Protocol):
    """Seconds of one step: request ``r`` has ``query_lens[r]`` new tokens, the last of which sees ``seq_lens[r]``.

    ``num_sampled`` of the requests have their whole prompt computed, and get a token.
    """

    def seconds(self, query_lens: Ints, seq_lens: Ints, num_sampled: int) -> float: ...


@dataclass(frozen=True)
class ConstantClock:
    """A step takes ``per_step`` seconds and ``per_token`` for each of its tokens: for queues that can be solved by hand."""

    per_step: float
    per_token: float = 0.0

    def seconds(self, query_lens: Ints, seq_lens: Ints, num_sampled: int) -> float:
        return self.per_step + self.per_token * int(query_lens.sum())


def step_features(query_lens: Ints, seq_lens: Ints, block_size: int, window: int | None = None) -> NDArray[np.float64]:
    """``[1, tokens, requests, (query, key) pairs, distinct keys, block-table entries]`` of a step.

    The last three are attention's: causal, and within a sliding window if there is one.
    """
    tokens, requests = query_lens.sum(), len(query_lens)
    first = seq_lens - query_lens + 1  # keys that a request's first query sees
    if window is None:
        pairs, keys = query_lens * first + query_lens * (query_lens - 1) // 2, seq_lens
    else:
        growing = np.clip(window - first, 0, query_lens)  # queries that see fewer keys than the window holds
        pairs = growing * first + growing * (growing - 1) // 2 + (query_lens - growing) * window
        keys = np.minimum(seq_lens, query_lens + window - 1)
    entries = -(-keys // block_size)
    return np.array([1, tokens, requests, pairs.sum(), keys.sum(), entries.sum()], np.float64)


@dataclass(frozen=True)
class AffineCosts:
    """``flops`` and ``bytes`` ``[num_ops, 6]``: coefficients of the six features; ``calls [num_ops]``; names by op."""

    stages: tuple[str, ...]
    groups: tuple[str, ...]
    calls: NDArray[np.float64]
    flops: NDArray[np.float64]
    bytes: NDArray[np.float64]


def affine_costs(config: ModelConfig, dtype: torch.dtype, block_size: int) -> AffineCosts:
    """Every op of a step of a model without sliding windows, as coefficients of :func:`step_features`.

    Found by asking ``step_costs`` at more shapes than there are features; costs are whole numbers, and so are these.
    """
    plain = replace(config, sliding_windows=(None,) * config.num_layers)
    b = block_size
    shapes = [
        ([1], [1]),
        ([2], [2]),
        ([1, 1], [1, 1]),
        ([1], [b + 3]),
        ([3], [5 * b]),
        ([2, 3], [9, 7]),
        ([5, 1], [5, 2 * b]),
    ]
    asked = [step_costs(plain, q, s, dtype=dtype, block_size=b) for q, s in shapes]
    features = np.stack([step_features(np.array(q), np.array(s), b) for q, s in shapes])

    def coefficients(column: int) -> NDArray[np.float64]:
        values = np.array([[op.cost[column] for op in costs] for costs in asked], np.float64)
        return np.rint(np.linalg.lstsq(features, values, rcond=None)[0]).T

    ops = asked[0]
    return AffineCosts(
        stages=tuple(op.stage for op in ops),
        groups=tuple(op.group for op in ops),
        calls=np.array([op.calls for op in ops], np.float64),
        flops=coefficients(0),
        bytes=coefficients(1),
    )


class RooflineClock:
    """The cost model's clock: for each op the slower of arithmetic and traffic, on one rank; then what ranks tell each other.

    Ops run one after the other and hide nothing of each other, all-reduces neither (as in the simplest engines). Sampling is not
    modelled beyond the LM head; ``efficiency.step_overhead`` stands for it and for the host's work.

    Args:
        hardware: one device. efficiency: which shares of its roof are reached, assumed.
        tensor_parallel_size: devices that share every layer.
        block_size: tokens in a KV block.

    Raises ValueError if the model can't be split so.
    """

    def __init__(
        self,
        config: ModelConfig,
        hardware: Hardware,
        efficiency: Efficiency,
        *,
        tensor_parallel_size: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        block_size: int = 16,
    ) -> None:
        self.config, self.hardware, self.efficiency = config, hardware, efficiency
        self.tensor_parallel_size, self.dtype, self.block_size = tensor_parallel_size, dtype, block_size
        costs = affine_costs(shard_config(config, tensor_parallel_size), dtype, block_size)
        roof = hardware.roof
        attention = np.array([group == "attention" for group in costs.groups])
        # seconds [rows, 6]: one row an op, attention apart as its features depend on the layer's window
        self._flop_seconds = costs.flops / (roof.flops * efficiency.flops)
        self._byte_seconds = costs.bytes / (roof.bandwidth * efficiency.bandwidth)
        self._calls, self._attention = costs.calls, attention
        self._windows = Counter(config.sliding_windows)
        self._head = np.array([group == "head" for group in costs.groups])
        self._linear = np.array([group in LINEAR_GROUPS for group in costs.groups])

    def seconds(self, query_lens: Ints, seq_lens: Ints, num_sampled: int) -> float:
        return sum(self.parts(query_lens, seq_lens, num_sampled).values())

    def parts(self, query_lens: Ints, seq_lens: Ints, num_sampled: int) -> dict[str, float]:
        """Seconds of "linear", "attention", "rest", "communication" and "overhead"."""
        features = step_features(query_lens, seq_lens, self.block_size)
        features_of_head = features.copy()
        features_of_head[2] = num_sampled  # only kept rows meet the LM head
        rows = np.where(self._head[:, None], features_of_head, features)
        seconds = self._calls * self._longer(slice(None), rows)
        attention = 0.0
        for window, layers in self._windows.items():
            windowed = features if window is None else step_features(query_lens, seq_lens, self.block_size, window)
            attention += layers * float(self._longer(self._attention, windowed).sum())
        linear = float(seconds[self._linear].sum())
        return {
            "linear": linear,
            "attention": attention,
            "rest": float(seconds[~self._attention].sum()) - linear,
            "communication": communication_seconds(
                self.config,
                self.hardware,
                self.efficiency,
                self.tensor_parallel_size,
                features[1],
                num_sampled,
                self.dtype,
            ),
            "overhead": self.efficiency.step_overhead,
        }

    def _longer(self, ops: slice | NDArray[np.bool_], features: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.maximum((self._flop_seconds[ops] * features).sum(-1), (self._byte_seconds[ops] * features).sum(-1))


CALIBRATED_TERMS = ("step", "mixed step", "request", "linear", "attention", "rest")


@dataclass(frozen=True)
class StepSample:
    """One step of a real engine: its shape, and the seconds that it took."""

    query_lens: Ints
    seq_lens: Ints
    num_sampled: int
    seconds: float


class CalibratedClock:
    """A clock for one machine: seconds are a sum of six terms, their weights fitted to measured steps.

    Terms (:data:`CALIBRATED_TERMS`): a step; a step that is not all decodes (those may be played from a recorded graph); a
    request in it; and the cost model's seconds of linear layers, attention and the rest. No weight is negative.

    Attributes:
        weights: seconds for the first three terms; for the others, measured seconds for each second on the roof.
    """

    def __init__(self, base: RooflineClock, weights: Sequence[float]) -> None:
        self.base = base
        self.weights = np.asarray(weights, np.float64)

    @classmethod
    def fit(cls, base: RooflineClock, samples: Sequence[StepSample]) -> CalibratedClock:
        """Least squares over *relative* errors: a decode step counts as much as a prefill that takes a hundred times longer.

        Raises ValueError for fewer samples than terms, or steps that took no time.
        """
        if len(samples) < len(CALIBRATED_TERMS):
            raise ValueError(f"{len(samples)} steps are too few to fit {len(CALIBRATED_TERMS)} terms")
        seconds = np.array([sample.seconds for sample in samples])
        if not (np.isfinite(seconds).all() and (seconds > 0).all()):
            raise ValueError("every measured step must have taken a positive time")
        terms = np.stack([_terms(base, s.query_lens, s.seq_lens, s.num_sampled) for s in samples])
        return cls(base, _nonnegative_least_squares(terms / seconds[:, None], np.ones(len(samples))))

    def seconds(self, query_lens: Ints, seq_lens: Ints, num_sampled: int) -> float:
        return float(self.weights @ _terms(self.base, query_lens, seq_lens, num_sampled))


def _terms(base: RooflineClock, query_lens: Ints, seq_lens: Ints, num_sampled: int) -> NDArray[np.float64]:
    parts = base.parts(query_lens, seq_lens, num_sampled)
    mixed = float(query_lens.max() > 1)
    return np.array([1.0, mixed, len(query_lens), parts["linear"], parts["attention"], parts["rest"]])


def _nonnegative_least_squares(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x >= 0 with the least ``|a·x − b|``: the active-set method of Lawson and Hanson (1974, chapter 23)."""
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], bool)
    scale = np.abs(a).max(axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    for _ in range(10 * a.shape[1]):
        gradient = a.T @ (b - a @ x)
        gradient[free] = -np.inf
        if gradient.max() <= 1e-10 * len(b):
            break
        free[gradient.argmax()] = True
        while True:
            step = np.zeros_like(x)
            step[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if (step[free] > 0).all():
                break
            blocked = free & (step <= 0)
            with np.errstate(divide="ignore", invalid="ignore"):
                share = np.nanmin((x / (x - step))[blocked])
            x = x + share * (step - x)
            free &= x > 1e-14
            x[~free] = 0.0
        x = step
    return x / scale
