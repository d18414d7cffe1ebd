"""Logprobs: raw and processed, top-n with ranks, of prompts, and in OpenAI's shape."""

from __future__ import annotations

import math

import pytest
import torch

from llmlab import ops as all_ops
from llmlab.sampling.logprobs import Logprob, to_openai
from llmlab.sampling.sampler import Sampler

V = 12


@pytest.fixture(params=["reference", "torch"])
def build(request):
    return lambda mode="raw_logprobs", tokenizer=None: Sampler(
        V if tokenizer is None else tokenizer.vocab_size,
        {0},
        tokenizer,
        ops=all_ops.bind(request.param, "cpu"),
        logprobs_mode=mode,
        seed=0,
    )


def logits(rows: int = 1) -> torch.Tensor:
    return (torch.randn(rows, V, generator=torch.Generator().manual_seed(0)) * 3).round() / 2  # with ties


def test_raw_logprobs_are_the_models_whatever_is_done_to_the_logits(kit, build):
    sampler, x = build(), logits()
    expected = x.log_softmax(-1)[0]
    wishes = [{"temperature": 0.1}, {"temperature": 2.0}, {"top_k": 1}, {"allowed_token_ids": [4]}, {"temperature": 0}]
    for wish in wishes:
        (entries,) = sampler(x, [kit.request(sampler, logprobs=3, seed=1, repetition_penalty=1.5, **wish)]).logprobs
        for token_id, entry in entries.items():
            assert entry.logprob == pytest.approx(expected[token_id].item(), abs=1e-6)


def test_processed_logprobs_sum_to_one_over_the_kept_set(kit, build):
    sampler, x = build("processed_logprobs"), logits()
    request = kit.request(sampler, logprobs=-1, seed=1, top_k=3, top_p=0.9, temperature=0.5)
    (entries,) = sampler(x, [request]).logprobs
    kept = {i: e for i, e in entries.items() if e.logprob > -math.inf}
    assert sum(math.exp(e.logprob) for e in kept.values()) == pytest.approx(1.0, abs=1e-6)
    assert 1 <= len(kept) < V and len(entries) == V
    greedy = kit.request(sampler, logprobs=0, temperature=0, logit_bias={4: 50.0})
    assert sampler(x, [greedy]).logprobs[0][4].logprob == pytest.approx(0.0, abs=1e-6)


def test_processed_and_raw_differ_only_through_processing(kit, build):
    x = logits()
    rows = [s(x, [kit.request(s, logprobs=V, seed=1)]).logprobs[0] for s in (build(), build("processed_logprobs"))]
    assert rows[0].keys() == rows[1].keys()
    assert all(rows[0][i].logprob == pytest.approx(rows[1][i].logprob, abs=1e-6) for i in rows[0])


def test_each_row_gets_as_many_as_it_asked_for_and_its_own_token(kit, build):
    sampler, x = build(), logits(5)
    wanted = [3, None, 0, 5, -1]
    out = sampler(x, [kit.request(sampler, logprobs=n, seed=i, temperature=3.0) for i, n in enumerate(wanted)])
    for row, (n, entries) in enumerate(zip(wanted, out.logprobs, strict=True)):
        if n is None:
            assert entries is None
            continue
        token_id = out.token_ids[row]
        best = sorted(range(V), key=lambda i: (-x[row, i].item(), i))[: V if n == -1 else n]
        assert list(entries) == [token_id, *[i for i in best if i != token_id]]
        for i, entry in entries.items():
            assert entry.rank == int((x[row] >= x[row, i]).sum())  # ties count against a token
            assert entry.decoded_token is None


def test_prompt_logprobs_are_those_of_the_tokens_that_follow(build):
    sampler, x = build(), logits(4)
    rows = sampler.prompt_logprobs(x, [3, 0, 7, 7], 2)
    expected = x.log_softmax(-1)
    for t, (token_id, entries) in enumerate(zip([3, 0, 7, 7], rows, strict=True)):
        assert next(iter(entries)) == token_id and 2 <= len(entries) <= 3
        assert entries[token_id].logprob == pytest.approx(expected[t, token_id].item(), abs=1e-6)
    assert [len(r) for r in sampler.prompt_logprobs(x, [3, 0, 7, 7], 0)] == [1] * 4
    assert [len(r) for r in sampler.prompt_logprobs(x, [3, 0, 7, 7], -1)] == [V] * 4
    assert sampler.prompt_logprobs(x[:0], [], 2) == []


def test_bytes_in_openais_shape_are_right_inside_a_character(kit, build):
    """The three bytes of 客 as three tokens: no text of their own, but bytes that join to it."""
    tokenizer = kit.tokenizer()
    sampler = build(tokenizer=tokenizer)
    text = "a客"
    request = kit.request(sampler, temperature=0, logprobs=2, max_tokens=9)
    rows = []
    for byte in text.encode():
        x = torch.zeros(1, tokenizer.vocab_size)
        x[0, byte], x[0, 65] = 9.0, 5.0
        out = sampler(x, [request])
        request.append_output_token_id(out.token_ids[0])
        rows.append(out.logprobs[0])
    content = to_openai(request.output_token_ids, rows, tokenizer, top_logprobs=2)
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == text
    assert [entry["token"] for entry in content] == ["a", "\ufffd", "\ufffd", "\ufffd"]
    assert rows[1][0xE5].decoded_token == "\ufffd"
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert [top["token"] for top in entry["top_logprobs"]] == [entry["token"], "A"]
        assert entry["top_logprobs"][0] == {k: entry[k] for k in ("token", "logprob", "bytes")}


def test_openais_shape_lists_the_token_itself_even_where_it_is_not_among_the_best(kit):
    tokenizer = kit.tokenizer()
    entries = {7: Logprob(-9.0, 3), 65: Logprob(-0.1, 1), 66: Logprob(-2.5, 2)}
    (content,) = to_openai([7], [entries], tokenizer, top_logprobs=2)
    assert (content["logprob"], content["bytes"]) == (-9.0, [7])
    assert [top["token"] for top in content["top_logprobs"]] == ["A", "B"]
    (content,) = to_openai([7], [{7: Logprob(-math.inf, 3)}], tokenizer, top_logprobs=0)
    assert content["logprob"] == -9999.0 and content["top_logprobs"] == []
