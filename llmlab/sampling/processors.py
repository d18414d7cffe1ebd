"""What may change the logits before a token is chosen: the built-in edits of a batch, and the protocol for one's own.

Each built-in edit is made for one batch of requests (``None`` if no request asks for it) and knows the cells (row · vocab_size
+ token id) that it touches. ``update`` runs at every step and says whether there is anything to do; ``apply`` then edits the
logits in place. Everything is vectorised over the batch; Python only walks the requests that have multi-token bad words.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from llmlab.engine.request import Request
    from llmlab.sampling.bad_words import BadWords
    from llmlab.sampling.params import SamplingParams

NEG_INF = float("-inf")


class LogitsProcessor(ABC):
    """A custom step between the model and the sampler, for all requests of a batch at once.

    Give instances to ``Sampler(logits_processors=[...])``. What a request wants of it, it says in
    ``SamplingParams(extra_args={...})``. One that can change which token is most likely runs after the logit bias and before
    the penalties; an argmax-invariant one runs after temperature and min-p, before top-k, and never for an all-greedy batch.
    """

    def validate_params(self, params: SamplingParams) -> None:  # noqa: B027 (most have nothing to check)
        """Raise ValueError for parameters that this processor can't serve; called when a request is added."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the most likely token of every row stays the most likely one."""

    @abstractmethod
    def apply(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        """The new logits [num_reqs, vocab_size] float32 of these requests, row by row; ``logits`` may be edited in place."""


class AllowedTokens:
    """−inf for every token that is not on its request's list."""

    def __init__(self, lists: Sequence[tuple[int, Sequence[int]]], vocab_size: int, device: torch.device):
        self._rows = torch.tensor([row for row, _ in lists], device=device)
        self._cells = _cells(lists, vocab_size, device)

    def update(self, requests: Sequence[Request], num_outputs: np.ndarray) -> bool:
        return True

    def apply(self, logits: Tensor) -> None:
        flat = logits.view(-1)
        kept = flat[self._cells]
        logits.index_fill_(0, self._rows, NEG_INF)
        flat[self._cells] = kept


class BannedWords:
    """−inf for the tokens that are a bad word, or would complete one."""

    def __init__(self, words: Sequence[tuple[int, BadWords]], vocab_size: int, device: torch.device):
        self._words = words
        self._vocab_size = vocab_size
        self._always = _cells([(row, w.always) for row, w in words], vocab_size, device)
        self._now: list[int] = []

    def update(self, requests: Sequence[Request], num_outputs: np.ndarray) -> bool:
        self._now = [
            row * self._vocab_size + token_id
            for row, words in self._words
            for token_id in words.banned_after(requests[row].output_token_ids)
        ]
        return len(self._always) + len(self._now) > 0

    def apply(self, logits: Tensor) -> None:
        flat = logits.view(-1)
        flat.index_fill_(0, self._always, NEG_INF)
        if self._now:
            flat.index_fill_(0, torch.tensor(self._now, device=logits.device), NEG_INF)


class MinTokens:
    """−inf for every token that would stop a request, EOS of each kind included, while its output is too short."""

    def __init__(
        self,
        stops: Sequence[tuple[int, Sequence[int]]],
        min_tokens: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ):
        self._rows = np.array([row for row, _ in stops])
        self._min_tokens = np.array(min_tokens)
        self._cells = _cells(stops, vocab_size, device)
        self._stop_of_cell = torch.from_numpy(np.repeat(np.arange(len(stops)), [len(ids) for _, ids in stops]))
        self._held = np.ones(len(stops), dtype=bool)
        self._held_cells = self._cells

    def update(self, requests: Sequence[Request], num_outputs: np.ndarray) -> bool:
        held = num_outputs[self._rows] < self._min_tokens
        if (held != self._held).any():
            self._held = held
            mask = torch.from_numpy(held)[self._stop_of_cell]
            self._held_cells = self._cells[mask.to(self._cells.device)]
        return len(self._held_cells) > 0

    def apply(self, logits: Tensor) -> None:
        logits.view(-1).index_fill_(0, self._held_cells, NEG_INF)


class LogitBias:
    """A constant added to the logits of some tokens."""

    def __init__(self, biases: Sequence[tuple[int, dict[int, float]]], vocab_size: int, device: torch.device):
        self._cells = _cells([(row, list(bias)) for row, bias in biases], vocab_size, device)
        values = [value for _, bias in biases for value in bias.values()]
        self._values = torch.tensor(values, dtype=torch.float32, device=device)

    def update(self, requests: Sequence[Request], num_outputs: np.ndarray) -> bool:
        return len(self._cells) > 0

    def apply(self, logits: Tensor) -> None:
        logits.view(-1).index_add_(0, self._cells, self._values)


def _cells(lists: Sequence[tuple[int, Sequence[int]]], vocab_size: int, device: torch.device) -> Tensor:
    """Flat indices of (row, token id) pairs, int64."""
    sizes = [len(ids) for _, ids in lists]
    rows = np.repeat(np.array([row for row, _ in lists], dtype=np.int64), sizes)
    ids = np.array([token_id for _, ids in lists for token_id in ids], dtype=np.int64)
    return torch.from_numpy(rows * vocab_size + ids).to(device)
