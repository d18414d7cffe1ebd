"""A tiny vocabulary whose tokens one can read, requests without an engine, and the two CPU faces of every sampling op."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmlab import bpe
from llmlab import ops as all_ops
from llmlab.engine.request import Request
from llmlab.pretokenize import LLAMA3_PATTERN, PreTokenizer
from llmlab.sampling.params import SamplingParams
from llmlab.sampling.sampler import Sampler
from llmlab.tokenizer import Tokenizer


@pytest.fixture(params=["reference", "torch"])
def ops(request: pytest.FixtureRequest) -> Any:
    """All ops bound to their references, then to their CPU twins."""
    return all_ops.bind(request.param, "cpu")


def byte_tokenizer(*more: str, special: tuple[str, ...] = ("<eos>", "<eot>")) -> Tokenizer:
    """Ids 0…255 are the bytes, then the given strings as whole tokens (no merge leads to them), then special ones."""
    vocab = {bytes([i]): i for i in range(256)} | {text.encode(): 256 + i for i, text in enumerate(more)}
    added = [bpe.AddedToken(len(vocab) + i, text) for i, text in enumerate(special)]
    plain = bpe.Tokenizer(vocab, {}, PreTokenizer.from_pattern(LLAMA3_PATTERN), added_tokens=added)
    return Tokenizer.load(plain)


def make_request(
    sampler: Sampler, prompt: list[int] | None = None, output: list[int] | None = None, name: str = "r", **params: Any
) -> Request:
    """A request as the engine would add it, with some output already kept."""
    one = Request(name, prompt or [1], SamplingParams(**params))
    sampler.add_request(one)
    for token_id in output or []:
        one.append_output_token_id(token_id)
    return one


def generate(
    sampler: Sampler, requests: list[Request], logits_of: Callable[[Request], torch.Tensor], steps: int
) -> list[list[int]]:
    """Let every request of a batch sample ``steps`` tokens, with logits that depend on the request alone."""
    for _ in range(steps):
        out = sampler(torch.stack([logits_of(r) for r in requests]), requests)
        assert not out.errors
        for one, token_id in zip(requests, out.token_ids, strict=True):
            one.append_output_token_id(token_id)
    return [one.output_token_ids for one in requests]


@pytest.fixture
def kit() -> SimpleNamespace:
    return SimpleNamespace(tokenizer=byte_tokenizer, request=make_request, generate=generate)
