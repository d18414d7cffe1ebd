"""How long a step takes, from its shape alone, in microseconds of computing: the simulator's clocks.

Every op's cost is affine in six numbers of a step (:func:`step_features`), whatever the requests in it. The coefficients are not
written down again: each op's own cost is asked at a few shapes (:class:`AffineCosts`), once; a step then costs one small
matrix product. A clock is any object with ``seconds(query_lens, seq_lens, sampled)``.
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
from llmlab.measure.efficiency import Efficiency
from llmlab.measure.plan import Hardware, communication_seconds, shard_config

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


class Clock(Protocol):
    """Seconds of one step: request ``r`` has ``query_lens[r]`` new tokens, the last of which sees ``seq_lens[r]``.

    ``sampled[r]`` (bool) says whether its whole prompt is computed then, so that it gets a token.
    """

    def seconds(self, query_lens: Ints, seq_lens: Ints, sampled: Bools) -> float: ...


@dataclass(frozen=True)
class ConstantClock:
    """A step takes ``per_step`` seconds and ``per_token`` for each of its tokens: for queues that can be solved by hand."""

    per_step: float
    per_token: float = 0.0

    def seconds(self, query_lens: Ints, seq_lens: Ints, sampled: Bools) -> float:
        return self.per_step + self.per_token * int(query_lens.sum())


def step_features(query_lens: Ints, seq_lens: Ints, block_size: int, window: int | None = None) -> Floats:
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


# Requests as (query_len, seq_len), seq_len in blocks and tokens. Tokens over requests is nowhere a whole number but in decodes:
# where it is the group size, norms over query heads and KV heads have equal costs and would be taken for one op.
_DECODES = [[(1, 0, 1)], [(1, 0, 3)], [(1, 2, 1)], [(1, 0, 1)] * 2, [(1, 5, 2), (1, 0, 1), (1, 1, 0)]]
_MIXED = [
    [(1, 0, 1), (2, 0, 2)],
    [(4, 0, 4), (1, 3, 2)],
    [(3, 4, 1), (4, 1, 6)],
    [(1, 0, 2), (1, 0, 1), (2, 0, 3)],
    [(2, 2, 0), (4, 9, 5), (1, 0, 1)],
    [(1, 0, 1), (1, 6, 1), (1, 2, 3), (2, 0, 7)],
    [(2, 0, 2), (1, 0, 1), (3, 0, 3), (5, 7, 1)],
    [(9, 0, 9), (2, 3, 1)],
]


@dataclass(frozen=True)
class AffineCosts:
    """The ops of a step: coefficients ``flops, bytes [num_ops, 6]`` of its features, ``calls [num_ops]``, names.

    Attributes:
        of_sampled: ops that work on the sampled tokens alone (the LM head, and what the last layer does for nobody else): their
            features are those of a step of these tokens.
    """

    groups: tuple[str, ...]
    calls: Floats
    flops: Floats
    bytes: Floats
    of_sampled: Bools

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, block_size: int, decode: bool) -> AffineCosts:
        """Ask ``step_costs`` for a model without sliding windows, at some shapes of all decodes or of mixed steps.

        The features determine every cost exactly, so least squares leaves nothing over.
        """
        plain = replace(config, sliding_windows=(None,) * config.num_layers)
        shapes = [
            ([q for q, _, _ in step], [max(q, blocks * block_size + rest) for q, blocks, rest in step])
            for step in (_DECODES if decode else _MIXED)
        ]
        asked = [step_costs(plain, q, s, dtype=dtype, block_size=block_size) for q, s in shapes]
        features = np.stack([step_features(np.array(q), np.array(s), block_size) for q, s in shapes])
        flops, nbytes = (
            np.linalg.lstsq(features, np.array([[op.cost[i] for op in costs] for costs in asked], np.float64))[0].T
            for i in range(2)
        )
        per_token = np.abs(flops[:, 1]) + np.abs(nbytes[:, 1])
        calls = np.array([op.calls for op in asked[0]], np.float64)
        return cls(tuple(op.group for op in asked[0]), calls, flops, nbytes, per_token < 1e-3)


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
        rank = shard_config(config, tensor_parallel_size)
        self._decode = self._kind(AffineCosts.of(rank, dtype, block_size, decode=True))
        self._mixed = self._kind(AffineCosts.of(rank, dtype, block_size, decode=False))

    def seconds(self, query_lens: Ints, seq_lens: Ints, sampled: Bools) -> float:
        return sum(self.parts(query_lens, seq_lens, sampled).values())

    def parts(self, query_lens: Ints, seq_lens: Ints, sampled: Bools) -> dict[str, float]:
        """Seconds of "linear", "attention", "rest", "communication" and "overhead"."""
        c, tp = self.config, self.tensor_parallel_size
        ops = self._decode if query_lens.sum() == len(query_lens) else self._mixed
        features = step_features(query_lens, seq_lens, self.block_size)
        seconds = dict.fromkeys(("linear", "attention", "rest"), 0.0)
        for name, rows in ops.plain.items():
            seconds[name] += rows.seconds(features)
        for window, layers in ops.windows.items():
            windowed = features if window is None else step_features(query_lens, seq_lens, self.block_size, window)
            seconds["attention"] += layers * ops.attention.seconds(windowed)
        num_sampled = int(sampled.sum())
        if num_sampled and ops.of_sampled:
            ones, window = np.ones(num_sampled, np.int64), c.sliding_windows[-1]
            features_of_sampled = step_features(ones, seq_lens[sampled], self.block_size, window)
            for name, rows in ops.of_sampled.items():
                seconds[name] += rows.seconds(features_of_sampled)
        num_tokens = float(features[1])
        seconds["communication"] = communication_seconds(
            c, self.hardware, self.efficiency, tp, num_tokens, num_sampled, self.dtype
        )
        return seconds | {"overhead": self.efficiency.step_overhead}

    def _kind(self, costs: AffineCosts) -> _StepKind:
        names = np.array(
            [{"attention": "attention"}.get(g, "linear" if g in LINEAR_GROUPS else "rest") for g in costs.groups]
        )
        attention = (names == "attention") & ~costs.of_sampled
        last_apart = ((names == "attention") & costs.of_sampled).any()
        windows = self.config.sliding_windows[:-1] if last_apart else self.config.sliding_windows

        def rows(mask: Bools, calls: Floats) -> _Rows:
            roof, share = self.hardware.roof, self.efficiency
            return _Rows(
                calls[mask],
                costs.flops[mask] / (roof.flops * share.flops),
                costs.bytes[mask] / (roof.bandwidth * share.bandwidth),
            )

        def by_name(among: Bools) -> dict[str, _Rows]:
            return {name: rows(among & (names == name), costs.calls) for name in np.unique(names[among]).tolist()}

        return _StepKind(
            plain=by_name(~costs.of_sampled & ~attention),
            of_sampled=by_name(costs.of_sampled),
            attention=rows(attention, np.ones_like(costs.calls)),
            windows=Counter(windows),
        )


@dataclass(frozen=True)
class _Rows:
    """Some ops: how often each runs, and its seconds of arithmetic and of traffic as coefficients of the features."""

    calls: Floats
    arithmetic: Floats
    traffic: Floats

    def seconds(self, features: Floats) -> float:
        return float(self.calls @ np.maximum(self.arithmetic @ features, self.traffic @ features))


@dataclass(frozen=True)
class _StepKind:
    """The ops of a step of all decodes, or of a mixed one; attention apart, by the windows of the layers that run it whole."""

    plain: dict[str, _Rows]
    of_sampled: dict[str, _Rows]
    attention: _Rows
    windows: Counter[int | None]


CALIBRATED_TERMS = ("step", "mixed step", "request", "linear", "attention", "rest")


@dataclass(frozen=True)
class StepSample:
    """One step of a real engine: its shape, and the seconds that it took."""

    query_lens: Ints
    seq_lens: Ints
    sampled: Bools
    seconds: float


class CalibratedClock:
    """A clock for one machine: seconds are a sum of six terms, their weights fitted to measured steps.

    Terms (:data:`CALIBRATED_TERMS`): a step; a step that is not all decodes (it has more kernels, and is filled up with tokens
    that nobody wants); a request in it; and the cost model's seconds of linear layers, attention and the rest. No weight is
    negative.

    Attributes:
        weights: seconds for the first three terms; for the others, measured seconds for each second on the roof.
    """

    def __init__(self, base: RooflineClock, weights: Sequence[float]) -> None:
        self.base = base
        self.weights = np.asarray(weights, np.float64)

    @classmethod
    def fit(cls, base: RooflineClock, samples: Sequence[StepSample]) -> CalibratedClock:
        """Least absolute *relative* errors: a decode counts as much as a prefill that takes a hundred times longer.

        Absolute, so that steps disturbed by other work do not drag the fit along; found by least squares, reweighted.
        Raises ValueError for fewer samples than terms, or steps that took no time.
        """
        if len(samples) < len(CALIBRATED_TERMS):
            raise ValueError(f"{len(samples)} steps are too few to fit {len(CALIBRATED_TERMS)} terms")
        seconds = np.array([sample.seconds for sample in samples])
        if not (np.isfinite(seconds).all() and (seconds > 0).all()):
            raise ValueError("every measured step must have taken a positive time")
        terms = np.stack([_terms(base, s.query_lens, s.seq_lens, s.sampled) for s in samples]) / seconds[:, None]
        trust = np.ones((len(samples), 1))
        for _ in range(20):
            weights = _nonnegative_least_squares(terms * trust, trust[:, 0])
            trust = 1 / np.sqrt(np.maximum(np.abs(terms @ weights - 1), 0.01))[:, None]
        return cls(base, weights)

    def seconds(self, query_lens: Ints, seq_lens: Ints, sampled: Bools) -> float:
        return float(self.weights @ _terms(self.base, query_lens, seq_lens, sampled))


def _terms(base: RooflineClock, query_lens: Ints, seq_lens: Ints, sampled: Bools) -> Floats:
    parts = base.parts(query_lens, seq_lens, sampled)
    mixed = float(query_lens.max() > 1)
    return np.array([1.0, mixed, len(query_lens), parts["linear"], parts["attention"], parts["rest"]])


def _nonnegative_least_squares(a: Floats, b: Floats) -> Floats:
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
