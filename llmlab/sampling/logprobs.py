"""Log-probabilities as users get them: vLLM's ``Logprob`` by token id, and OpenAI's shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmlab.tokenizer import Tokenizer


@dataclass
class Logprob:
    """One token at one position.

    logprob: natural logarithm of its probability. rank: number of tokens at least as likely, 1 is best.
    decoded_token: its text, with U+FFFD where its bytes are only part of a character; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


def to_dicts(
    logprobs: Sequence[Sequence[float]],
    token_ids: Sequence[Sequence[int]],
    ranks: Sequence[Sequence[int]],
    num_logprobs: Sequence[int],
    tokenizer: Tokenizer | None,
) -> list[dict[int, Logprob]]:
    """One dict a row: the row's own token first, then its ``num_logprobs`` most likely ones in order."""
    text: dict[int, str | None] = {}
    rows: list[dict[int, Logprob]] = []
    for values, ids, places, n in zip(logprobs, token_ids, ranks, num_logprobs, strict=True):
        row: dict[int, Logprob] = {}
        for value, token_id, rank in zip(values[: n + 1], ids, places, strict=False):
            if token_id not in text:
                text[token_id] = None if tokenizer is None else _text(tokenizer.token_bytes(token_id))
            row[token_id] = Logprob(value, rank, text[token_id])
        rows.append(row)
    return rows


def to_openai(
    token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], tokenizer: Tokenizer, top_logprobs: int
) -> list[dict[str, Any]]:
    """The ``content`` list of OpenAI's chat completions: token, logprob, bytes and top_logprobs for each output token.

    ``bytes`` are the token's own, also where they are part of a character: joined over the tokens and decoded they give the
    output's text, which the ``token`` texts need not. As there, -9999.0 stands for a probability of 0.

    Args:
        logprobs: of each token, as a completion reports them. top_logprobs: how many of them to list.
    """
    content = []
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        best = sorted(entries.items(), key=lambda entry: (-entry[1].logprob, entry[0]))[:top_logprobs]
        content.append(
            _openai_entry(token_id, entries[token_id].logprob, tokenizer)
            | {"top_logprobs": [_openai_entry(i, entry.logprob, tokenizer) for i, entry in best]}
        )
    return content


def _openai_entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    value = logprob if math.isfinite(logprob) else -9999.0
    return {"token": _text(raw), "logprob": value, "bytes": list(raw)}


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")
