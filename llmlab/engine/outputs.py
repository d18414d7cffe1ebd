"""What a user gets back: vLLM's ``RequestOutput`` and ``CompletionOutput``, field for field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmlab.sampling.logprobs import Logprob


@dataclass
class CompletionOutput:
    """One of the ``n`` outputs of a request.

    Attributes:
        index: which of the ``n``.
        text: the decoded output; cut at a stop string.
        token_ids: all sampled ids, the stopping one included.
        cumulative_logprob: sum of the sampled tokens' logprobs; None if logprobs were not asked for.
        logprobs: for each token a dict from token id to :class:`Logprob`; None if not asked for.
        finish_reason: "stop", "length", "abort", "error", or None while running.
        stop_reason: the stop string or stop token id that ended it; None for EOS and the other reasons.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times of one request, in seconds of ``time.monotonic()``; None for what has not happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass
class RequestOutput:
    """A request's state after a step; the last one has ``finished`` set.

    Attributes:
        prompt: the prompt's text, None if it was given as token ids.
        prompt_logprobs: None for the first token, then a dict for each prompt token; None if not asked for.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        error: why this request alone failed, with finish reason "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = field(default=None)
