"""Who asks for what, and when: arrival times, prompt and output lengths, shared prefixes. No torch, no model, no clock.

A :class:`Workload` is five arrays and a seed. Token ids are made when a request is looked at, and requests that share a prefix
really share its ids, so that a prefix cache finds them. The same workload drives the simulator and the real engine.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

NO_PREFIX = -1
LONGEST = 2**31 - 1
"""Tokens in any prompt or output, so that no sum of them overflows."""


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts: ``constant`` (first), ``uniform`` (first … second, both included), or ``lognormal``
    (median first, sigma of the logarithm second); rounded, at least 1, at most ``longest``.

    Raises ValueError for a kind that is not known and for parameters that describe no such distribution.
    """

    kind: Literal["constant", "uniform", "lognormal"]
    first: float
    second: float = 0.0
    longest: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "uniform", "lognormal"):
            raise ValueError(f"length distribution must be constant, uniform or lognormal, got {self.kind!r}")
        if not 1 <= self.first <= LONGEST:
            raise ValueError(f"{self.kind} lengths start at 1 token and end at {LONGEST}, got {self.first!r}")
        if self.kind == "constant" and self.second:
            raise ValueError(f"constant lengths take one number, got {self.first!r} and {self.second!r}")
        if self.kind == "uniform" and not self.first <= self.second <= LONGEST:
            raise ValueError(f"uniform lengths need low <= high <= {LONGEST}, got {self.first!r} and {self.second!r}")
        if self.kind == "lognormal" and not (math.isfinite(self.second) and self.second >= 0):
            raise ValueError(f"the sigma of lognormal lengths must be at least 0, got {self.second!r}")
        if self.kind != "lognormal" and not float(self.first).is_integer():
            raise ValueError(f"{self.kind} lengths are whole tokens, got {self.first!r}")
        if self.kind == "uniform" and not float(self.second).is_integer():
            raise ValueError(f"uniform lengths are whole tokens, got {self.second!r}")
        if self.longest is not None and self.longest < 1:
            raise ValueError(f"the longest length must be at least 1, got {self.longest!r}")

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """``128``, ``uniform:16:256``, ``lognormal:512:0.8`` or ``lognormal:512:0.8:4096`` (at most 4096)."""
        kind, *numbers = text.split(":") if ":" in text else ("constant", text)
        try:
            values = [float(number) for number in numbers]
            longest = int(values.pop(2)) if len(values) == 3 else None
            return cls(kind, *values, longest=longest)  # type: ignore[arg-type]
        except (TypeError, OverflowError):
            wrong: str = "wrong number of values"
        except ValueError as error:
            wrong = str(error)
        raise ValueError(f"lengths {text!r} (such as 128, uniform:16:256, lognormal:512:0.8): {wrong}") from None

    def sample(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """``count`` lengths, int64."""
        if self.kind == "constant":
            drawn = np.full(count, int(self.first), np.int64)
        elif self.kind == "uniform":
            drawn = rng.integers(int(self.first), int(self.second), count, endpoint=True)
        else:
            with np.errstate(over="ignore"):
                drawn = np.rint(self.first * np.exp(self.second * rng.standard_normal(count)))
        return np.clip(drawn, 1, self.longest or LONGEST).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests in order of arrival; every array has one entry a request.

    Attributes:
        arrivals: seconds since the start, ascending, float64.
        prompt_lens, output_lens: tokens, int64; a prompt's length includes its prefix. Outputs are exactly so long.
        prefix_ids: which shared prefix the prompt begins with; −1 for none.
        prefix_lens: its length in tokens; 0 without one.
        priorities: for the "priority" policy, smaller goes first.
        vocab_size: token ids are in [0, vocab_size).
        seed: of the token ids.

    Raises ValueError for arrays that do not describe requests.
    """

    arrivals: NDArray[np.float64]
    prompt_lens: NDArray[np.int64]
    output_lens: NDArray[np.int64]
    prefix_ids: NDArray[np.int64]
    prefix_lens: NDArray[np.int64]
    priorities: NDArray[np.int64]
    vocab_size: int = 32000
    seed: int = 0

    def __post_init__(self) -> None:
        columns = ("arrivals", "prompt_lens", "output_lens", "prefix_ids", "prefix_lens", "priorities")
        sizes = {name: len(getattr(self, name)) for name in columns}
        if len(set(sizes.values())) != 1 or not len(self.arrivals):
            raise ValueError(f"a workload needs at least one request and one entry a request in each column: {sizes}")
        if not (np.isfinite(self.arrivals).all() and self.arrivals[0] >= 0 and (np.diff(self.arrivals) >= 0).all()):
            raise ValueError("arrivals must be finite seconds from 0 on, in ascending order")
        for name in ("prompt_lens", "output_lens"):
            if (values := getattr(self, name)).min() < 1:
                raise ValueError(f"{name} must be at least 1 token; request {values.argmin()} has {values.min()}")
        # the last token of a prompt is the request's own, or two requests would be the same
        wrong = np.flatnonzero((self.prefix_lens < 0) | (self.prefix_lens >= self.prompt_lens))
        if wrong.size:
            i = wrong[0]
            raise ValueError(
                f"request {i}: a prefix of {self.prefix_lens[i]} tokens does not fit in its prompt of "
                f"{self.prompt_lens[i]}, of which at least one token must be its own"
            )
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {self.vocab_size}")

    def __len__(self) -> int:
        return len(self.arrivals)

    def prompt_token_ids(self, i: int) -> list[int]:
        """The prompt of request ``i``: the tokens of its prefix, which others share, then its own."""
        shared = int(self.prefix_lens[i])
        own = self._draw(0, i, int(self.prompt_lens[i]) - shared)
        return self._draw(1, int(self.prefix_ids[i]), shared) + own if shared else own

    def part(self, chosen: Any) -> Workload:
        """The requests that an index or mask chooses. Their own token ids are drawn anew, those of prefixes stay."""
        columns = ("arrivals", "prompt_lens", "output_lens", "prefix_ids", "prefix_lens", "priorities")
        return replace(self, **{name: getattr(self, name)[chosen] for name in columns})

    def _draw(self, kind: int, index: int, count: int) -> list[int]:
        return np.random.default_rng((self.seed, kind, index)).integers(0, self.vocab_size, count).tolist()


def synthetic(
    num_requests: int,
    rate: float = math.inf,
    prompt: Lengths | str | int = 256,
    output: Lengths | str | int = 128,
    *,
    num_prefixes: int = 0,
    prefix_len: int = 0,
    vocab_size: int = 32000,
    seed: int = 0,
) -> Workload:
    """Requests that arrive at random (a Poisson process), or all at once.

    Args:
        rate: mean arrivals per second; ``inf`` for all at time 0.
        prompt, output: distributions of lengths, or what :meth:`Lengths.parse` understands. A shared prefix comes on top.
        num_prefixes, prefix_len: each prompt begins with one of so many prefixes of so many tokens, chosen evenly at random.

    Raises ValueError for a number or rate that is not positive, or a prefix without a length (or the other way round).
    """
    if isinstance(num_requests, bool) or not isinstance(num_requests, int) or num_requests < 1:
        raise ValueError(f"num_requests must be an integer of at least 1, got {num_requests!r}")
    if not rate > 0:
        raise ValueError(f"rate must be positive (requests per second, inf for all at once), got {rate!r}")
    if num_prefixes < 0 or prefix_len < 0 or bool(num_prefixes) != bool(prefix_len):
        raise ValueError(f"a shared prefix needs num_prefixes and prefix_len, got {num_prefixes} and {prefix_len}")
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / rate, num_requests) if math.isfinite(rate) else np.zeros(num_requests)
    prefix_lens = np.full(num_requests, prefix_len, np.int64)
    return Workload(
        arrivals=np.cumsum(gaps),
        prompt_lens=_lengths(prompt).sample(rng, num_requests) + prefix_lens,
        output_lens=_lengths(output).sample(rng, num_requests),
        prefix_ids=rng.integers(0, num_prefixes, num_requests) if num_prefixes else np.full(num_requests, NO_PREFIX),
        prefix_lens=prefix_lens,
        priorities=np.zeros(num_requests, np.int64),
        vocab_size=vocab_size,
        seed=seed,
    )


TRACE_COLUMNS = ("arrival", "prompt_len", "output_len")
TRACE_OPTIONS = ("prefix_id", "prefix_len", "priority")


def trace(
    rows: str | Path | Iterable[Sequence[float] | dict[str, Any]], *, vocab_size: int = 32000, seed: int = 0
) -> Workload:
    """Requests as they were recorded.

    Args:
        rows: a CSV file with the columns arrival (seconds), prompt_len, output_len, and if wanted prefix_id, prefix_len,
            priority; or dicts with these keys; or sequences of the first three. In any order: they are sorted by arrival.

    Raises FileNotFoundError for a file that is not there, ValueError naming the row that is wrong.
    """
    if isinstance(rows, (str, Path)):
        path = Path(rows)
        if not path.is_file():
            raise FileNotFoundError(f"there is no trace file {path}")
        try:
            with path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a CSV file: {error}") from error
    table = [_trace_row(i, row) for i, row in enumerate(rows)]
    if not table:
        raise ValueError("the trace holds no request")
    table.sort(key=lambda row: row[0])
    arrivals, *columns = zip(*table, strict=True)
    arrays = [np.array(column, np.int64) for column in columns]
    return Workload(np.array(arrivals, np.float64), *arrays, vocab_size=vocab_size, seed=seed)


def _trace_row(i: int, row: Sequence[float] | dict[str, Any]) -> tuple[float, int, int, int, int, int]:
    if not isinstance(row, dict):
        if len(row) != len(TRACE_COLUMNS):
            raise ValueError(f"row {i} of the trace must be (arrival, prompt_len, output_len), got {row!r}")
        row = dict(zip(TRACE_COLUMNS, row, strict=True))
    if missing := [name for name in TRACE_COLUMNS if row.get(name) in (None, "")]:
        raise ValueError(f"row {i} of the trace has no {', '.join(missing)}")
    if unknown := sorted(str(name) for name in set(row) - {*TRACE_COLUMNS, *TRACE_OPTIONS}):
        raise ValueError(
            f"row {i} of the trace has unknown columns {unknown}; known are {TRACE_COLUMNS + TRACE_OPTIONS}"
        )

    def number(name: str, default: int) -> float:
        try:
            value = float(row.get(name) or default)
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value) or (name != "arrival" and not value.is_integer()):
            raise ValueError(f"row {i} of the trace: {name} must be a number, got {row.get(name)!r}")
        return value

    whole = lambda name, default=0: int(number(name, default))
    prefix_len = whole("prefix_len")
    prefix_id = whole("prefix_id", 0) if prefix_len else NO_PREFIX
    if prefix_len and prefix_id < 0:
        raise ValueError(f"row {i} of the trace: prefix_id must be at least 0, got {prefix_id}")
    lengths = whole("prompt_len"), whole("output_len")
    return number("arrival", 0), *lengths, prefix_id, prefix_len, whole("priority")


def _lengths(given: Lengths | str | int) -> Lengths:
    return given if isinstance(given, Lengths) else Lengths.parse(str(given))
