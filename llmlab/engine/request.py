"""One request: its tokens, how far they have been computed, and when it has to stop. No torch here.

A request has no prefill and no decode phase. It has ``num_tokens`` (prompt + output so far) and ``num_computed_tokens``
(those whose keys and values lie in the KV cache); every step lets the second number chase the first, and whenever they
meet, one new token is sampled. Names are vLLM v1's (``vllm/v1/request.py``, ``vllm/v1/core/sched/utils.py``).
"""

from __future__ import annotations

import enum
import math
import sys
import time
from array import array
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any


class RequestStatus(enum.Enum):
    """Where a request stands. PREEMPTED is WAITING with a past; the four FINISHED values are final."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @property
    def is_finished(self) -> bool:
        return self in FINISH_REASONS

    @property
    def finish_reason(self) -> str | None:
        """``"stop"``, ``"length"``, ``"abort"`` or ``"error"``; None while unfinished."""
        return FINISH_REASONS.get(self)


FINISH_REASONS = MappingProxyType(
    {
        RequestStatus.FINISHED_STOPPED: "stop",
        RequestStatus.FINISHED_LENGTH_CAPPED: "length",
        RequestStatus.FINISHED_ABORTED: "abort",
        RequestStatus.FINISHED_ERROR: "error",
    }
)


class Request:
    """The engine's record of one sequence. Token ids are plain ints; times are seconds of the scheduler's clock.

    The border between prompt and output never moves: a preempted request computes its output again together with its
    prompt, but for penalties, ``min_tokens`` and ``max_tokens`` those tokens stay output.

    Raises:
        ValueError: the prompt is empty, or holds something that is not a token id (an int in [0, 2³¹)); or a value that
            requests are ordered by can't be ordered.
    """

    __slots__ = (
        "all_token_ids",
        "arrival_time",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "error",
        "extra_keys",
        "finished_time",
        "first_scheduled_time",
        "first_token_time",
        "host_block_ids",
        "ignore_eos",
        "last_token_time",
        "max_tokens",
        "min_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens_to_recompute",
        "output_token_ids",
        "priority",
        "prompt_token_ids",
        "queue_key",
        "request_id",
        "sampling_params",
        "sampling_state",
        "skip_reading_prefix_cache",
        "status",
        "stop_reason",
        "stop_token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Iterable[int],
        sampling_params: Any,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        cache_tags: tuple[tuple[str, str], ...] = (),
    ) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"request {request_id!r}: priority must be an integer, got {priority!r}")
        if arrival_time is not None and not math.isfinite(arrival_time):
            raise ValueError(f"request {request_id!r}: arrival_time must be a finite number, got {arrival_time!r}")
        self.request_id = request_id
        self.prompt_token_ids: list[int] = _checked_token_ids(request_id, prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.all_token_ids: list[int] = self.prompt_token_ids.copy()
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.priority = priority  # a smaller number goes first
        self.cache_salt = cache_salt
        # What must be equal, besides the tokens, for two requests to share blocks: (kind, value) pairs.
        salt = () if cache_salt is None else (("cache_salt", cache_salt),)
        self.extra_keys: tuple[tuple[str, str], ...] = (*cache_tags, *salt)

        # What the scheduler reads of the sampling parameters, once instead of at every token.
        self.sampling_params = sampling_params
        self.min_tokens: int = sampling_params.min_tokens
        self.max_tokens: int = sys.maxsize if sampling_params.max_tokens is None else sampling_params.max_tokens
        self.ignore_eos: bool = sampling_params.ignore_eos
        self.stop_token_ids = frozenset(sampling_params.stop_token_ids or ())
        # Logits of a cached position are never computed, so prompt logprobs and cache hits exclude each other.
        self.skip_reading_prefix_cache: bool = sampling_params.prompt_logprobs is not None
        self.sampling_state: Any = None  # the sampler's own

        # The scheduler's part.
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_cached_tokens = -1  # prefix-cache hits at the first admission; -1 before
        self.num_preemptions = 0
        self.num_tokens_to_recompute = 0  # positions below this had been computed when it was preempted
        self.queue_key: tuple[int, float, int] = (0, 0.0, 0)  # (priority, arrival, sequence number), given on arrival
        self.block_ids: list[int] = []  # the block table: append-only, and replaced (never cleared) when freed
        self.host_block_ids: list[int] = []  # where its KV lies while it is swapped out
        self.block_hashes: list[bytes] = []  # of its full blocks, extended as tokens arrive

        self.stop_reason: int | str | None = None  # the stop token id or stop string that ended it
        self.error: str | None = None  # why it alone failed, with FINISHED_ERROR

        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.finished_time: float | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output together: the number that ``num_computed_tokens`` chases."""
        return len(self.all_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    @property
    def finish_reason(self) -> str | None:
        return self.status.finish_reason

    def append_output_token_id(self, token_id: int) -> None:
        self.output_token_ids.append(token_id)
        self.all_token_ids.append(token_id)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, computed {self.num_computed_tokens}/{self.num_tokens}, "
            f"prompt {self.num_prompt_tokens})"
        )


def check_stop(request: Request, max_num_tokens: int, eos_token_ids: frozenset[int]) -> bool:
    """Decide whether the output token just appended is the last one; if so, set status and stop_reason.

    vLLM's order: ``min_tokens``, then EOS, then ``stop_token_ids``, then lengths. So a last allowed token that is EOS
    gives "stop", not "length". One thing is stricter than there: ``max_num_tokens`` (prompt + output), a limit of the
    model or of the memory, ends a request even when ``min_tokens`` is not reached; it could never go on anyway.
    """
    num_output_tokens = len(request.output_token_ids)
    if num_output_tokens >= request.min_tokens:
        token_id = request.output_token_ids[-1]
        if token_id in eos_token_ids and not request.ignore_eos:
            request.status = RequestStatus.FINISHED_STOPPED
            return True
        if token_id in request.stop_token_ids:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = token_id
            return True
    if num_output_tokens >= request.max_tokens or len(request.all_token_ids) >= max_num_tokens:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True
    return False


def _checked_token_ids(request_id: str, token_ids: Iterable[int]) -> list[int]:
    """A copy as a list of plain ints: hashing a block must never be what finds out that a token id is none."""
    try:
        checked = array("i", token_ids).tolist()
    except (TypeError, OverflowError) as error:
        raise ValueError(f"request {request_id!r}: token ids must be integers in [0, 2**31): {error}") from error
    if not checked:
        raise ValueError(f"request {request_id!r} has an empty prompt; at least one token is needed")
    if min(checked) < 0:
        raise ValueError(f"request {request_id!r}: token id {min(checked)} is negative")
    return checked
