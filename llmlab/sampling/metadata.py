"""What the sampler keeps for a request, and what it builds once for a batch of them.

A batch's tensors depend on which requests it holds and in what order, and on nothing that changes from step to step; so they
are kept as long as the sequence of request objects stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from llmlab.sampling.bad_words import BadWords
from llmlab.sampling.grammar import Grammar, GrammarMask
from llmlab.sampling.params import SamplingParams
from llmlab.sampling.processors import AllowedTokens, BannedWords, LogitBias, MinTokens
from llmlab.sampling.token_counts import BatchCounts, TokenCounts

if TYPE_CHECKING:
    from llmlab.engine.request import Request


@dataclass
class RequestState:
    """One request's part, made when it is added and kept in ``request.sampling_state``.

    The parameters are a copy, so that a later change of the user's object changes nothing here.
    """

    params: SamplingParams
    seed: int  # the bits of the 64-bit seed as a signed integer
    stop_token_ids: list[int]  # all that would stop it, EOS included
    counts: TokenCounts | None = None
    bad_words: BadWords | None = None
    grammar: Grammar | None = None


class SamplingBatch:
    """The tensors of one sequence of requests. A field is None where no request needs it, and then costs nothing."""

    def __init__(self, requests: Sequence[Request], vocab_size: int, device: torch.device):
        self.requests = list(requests)  # held, so that no other object can get one of their ids
        self.ids = [id(request) for request in requests]
        self._device = device
        states: list[RequestState] = [request.sampling_state for request in requests]
        self.states = states
        params = [state.params for state in states]
        self.num_prompt_tokens = np.array([request.num_prompt_tokens for request in requests])

        self.all_greedy = all(p.is_greedy for p in params)
        self.temperatures = self._floats([p.temperature for p in params])
        # Once the logits are divided, only who is greedy still matters.
        self.random = self._floats([0.0 if p.is_greedy else 1.0 for p in params])
        self.seeds = torch.tensor([state.seed for state in states], dtype=torch.int64, device=device)
        self.min_p = self._floats([p.min_p for p in params]) if any(p.min_p for p in params) else None
        self.top_k = self.top_p = None
        if any(0 < p.top_k < vocab_size or p.top_p < 1.0 for p in params):
            self.top_k = torch.tensor([min(max(p.top_k, 0), vocab_size) for p in params], device=device)
            self.top_p = self._floats([p.top_p for p in params])

        self.edits = self._edits(vocab_size)
        self._build_penalties()
        self.grammars = [(row, s.grammar) for row, s in enumerate(states) if s.grammar is not None]
        wanted = [p.logprobs for p in params]
        self.num_logprobs = [vocab_size if n == -1 else n for n in wanted if n is not None]
        self.logprob_rows = [row for row, n in enumerate(wanted) if n is not None]

    def _floats(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def _edits(self, vocab_size: int) -> list[AllowedTokens | GrammarMask | BannedWords | MinTokens | LogitBias]:
        """The edits that some request needs, in the order in which they apply."""
        rows = list(enumerate(self.states))
        allowed = [(r, s.params.allowed_token_ids) for r, s in rows if s.params.allowed_token_ids is not None]
        grammars = [(r, s.grammar) for r, s in rows if s.grammar is not None]
        words = [(r, s.bad_words) for r, s in rows if s.bad_words is not None]
        stops = [(r, s.stop_token_ids) for r, s in rows if s.params.min_tokens > 0 and s.stop_token_ids]
        biases = [(r, s.params.logit_bias) for r, s in rows if s.params.logit_bias]
        return [
            *([AllowedTokens(allowed, vocab_size, self._device)] if allowed else []),
            *([GrammarMask(grammars, len(rows), vocab_size)] if grammars else []),
            *([BannedWords(words, vocab_size, self._device)] if words else []),
            *(
                [MinTokens(stops, [self.states[r].params.min_tokens for r, _ in stops], vocab_size, self._device)]
                if stops
                else []
            ),
            *([LogitBias(biases, vocab_size, self._device)] if biases else []),
        ]

    def _build_penalties(self) -> None:
        self.penalised = [row for row, state in enumerate(self.states) if state.counts is not None]
        self.counts = None
        if self.penalised:
            counts = [self.states[row].counts for row in self.penalised]
            for row, one in zip(self.penalised, counts, strict=True):
                one.catch_up(self.requests[row].output_token_ids)
            self.counts = BatchCounts(self.penalised, counts, self._device)
            params = [state.params for state in self.states]
            self.repetition_penalties = self._floats([p.repetition_penalty for p in params])
            self.frequency_penalties = self._floats([p.frequency_penalty for p in params])
            self.presence_penalties = self._floats([p.presence_penalty for p in params])
