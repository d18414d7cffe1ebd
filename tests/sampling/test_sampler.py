"""The sampler as a whole: order of the steps, every constraint, failures of one request alone, and independence of the batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from llmlab import ops as all_ops
from llmlab.engine.request import Request
from llmlab.ops import record_ops
from llmlab.sampling.metadata import SamplingBatch
from llmlab.sampling.params import SamplingParams
from llmlab.sampling.processors import LogitsProcessor
from llmlab.sampling.sampler import Sampler

NEG_INF = float("-inf")
EOS = (2, 3)


@pytest.fixture(params=["reference", "torch"])
def sampler(request) -> Sampler:
    return Sampler(8, EOS, ops=all_ops.bind(request.param, "cpu"), seed=0)


def peaked(vocab_size: int, *best: int, scale: float = 5.0) -> Tensor:
    """Logits that favour the given ids in this order."""
    logits = torch.zeros(vocab_size)
    for place, token_id in enumerate(best):
        logits[token_id] = scale * (len(best) - place)
    return logits


def noisy(request: Request, vocab_size: int = 8) -> Tensor:
    """Logits that are a function of the request's tokens, as a model's are."""
    generator = torch.Generator().manual_seed(hash(tuple(request.all_token_ids)) % 2**31)
    return torch.randn(vocab_size, generator=generator) * 2


# ---- the ways to choose ----------------------------------------------------------------------------------------------


def test_greedy_and_random_rows_share_a_batch(kit, sampler):
    requests = [kit.request(sampler, temperature=0), kit.request(sampler, seed=1), kit.request(sampler, temperature=0)]
    logits = torch.stack([peaked(8, 5), peaked(8, 1, 4, scale=0.5), peaked(8, 7)])
    before = logits.clone()
    out = sampler(logits, requests)
    assert (out.token_ids[0], out.token_ids[2]) == (5, 7)
    assert torch.equal(logits, before) and out.logprobs == [None] * 3 and out.errors == {}


def test_greedy_is_decided_before_temperature(kit, sampler):
    """Dividing can round two logits to one, and then the first of them would win; a greedy row is not divided."""
    logits = torch.tensor([1.9999998, 1.9999999, *[0.0] * 6]).repeat(2, 1)
    divided = logits[0] / 1.9
    assert logits[0, 0] < logits[0, 1] and divided[0] == divided[1]
    requests = [kit.request(sampler, temperature=0), kit.request(sampler, temperature=1.9, top_k=2, seed=0)]
    assert sampler(logits, requests).token_ids[0] == 1


def test_an_all_greedy_batch_pays_for_one_argmax_and_nothing_else(kit, sampler):
    requests = [kit.request(sampler, temperature=0) for _ in range(3)]
    with record_ops() as ledger:
        sampler(torch.randn(3, 8), requests)
    assert [record.op for record in ledger.records] == ["greedy_argmax"]


def test_plain_sampling_is_one_pass_and_filters_cost_only_when_asked_for(kit, sampler):
    plain, filtered = kit.request(sampler, temperature=0.7), kit.request(sampler, top_p=0.9, min_p=0.1)
    for requests, expected in (
        ([plain], ["gumbel_argmax"]),
        ([plain, filtered], ["apply_temperature", "apply_min_p", "apply_top_k_top_p", "gumbel_argmax"]),
    ):
        with record_ops() as ledger:
            sampler(torch.randn(len(requests), 8), requests)
        assert [record.op for record in ledger.records] == expected


def test_top_k_one_is_greedy_at_any_temperature(kit, sampler):
    requests = [kit.request(sampler, temperature=100.0, top_k=1, seed=s) for s in range(50)]
    logits = torch.stack([peaked(8, s % 8, scale=0.1) for s in range(50)])
    assert sampler(logits, requests).token_ids == [s % 8 for s in range(50)]


@pytest.mark.parametrize(("temperature", "allowed"), [(0.5, {0}), (1.0, {0, 1}), (2.0, {0, 1, 2, 3})])
def test_min_p_sees_the_tempered_distribution(kit, sampler, temperature, allowed):
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0, *[NEG_INF] * 4])
    requests = [kit.request(sampler, temperature=temperature, min_p=0.2, seed=s) for s in range(300)]
    assert set(sampler(logits.repeat(300, 1), requests).token_ids) == allowed


def test_half_precision_logits(kit, sampler):
    """fp16 logits divided by 1e-4 would be infinite; the temperature is raised and the division is float32."""
    with pytest.warns(UserWarning, match="below 0.01"):
        request = kit.request(sampler, temperature=1e-4)
    logits = torch.full((1, 8), -10.0, dtype=torch.float16)
    logits[0, :2] = torch.tensor([10.0, 9.0])
    assert sampler(logits, [request]).token_ids == [0]
    assert sampler(logits.bfloat16(), [kit.request(sampler, temperature=0)]).token_ids == [0]


# ---- constraints -----------------------------------------------------------------------------------------------------


def test_allowed_token_ids(kit, sampler):
    requests = [kit.request(sampler, temperature=0, allowed_token_ids=[6, 1]), kit.request(sampler, temperature=0)]
    assert sampler(torch.stack([peaked(8, 5, 6, 1)] * 2), requests).token_ids == [6, 5]


def test_logit_bias_is_added_and_can_ban(kit, sampler):
    requests = [
        kit.request(sampler, temperature=0, logit_bias={4: 100.0}),
        kit.request(sampler, temperature=0, logit_bias={5: -math.inf, 1: 0.25}),
        kit.request(sampler, temperature=0, logit_bias={}),
    ]
    assert sampler(torch.stack([peaked(8, 5)] * 3), requests).token_ids == [4, 1, 5]


def test_min_tokens_holds_back_every_stop_token(kit, sampler):
    """EOS {2, 3}, min_tokens 2, logits that favour 3: neither for two tokens, then 3."""
    request = kit.request(sampler, temperature=0, min_tokens=2, stop_token_ids=[7], max_tokens=9)
    output = kit.generate(sampler, [request], lambda r: peaked(8, 3, 2, 7, 5), 3)
    assert output == [[5, 5, 3]]


def test_min_tokens_with_ignore_eos_lets_eos_pass(kit, sampler):
    """EOS stops nothing then, so there is nothing to hold back; stop_token_ids still do."""
    request = kit.request(sampler, temperature=0, min_tokens=2, stop_token_ids=[7], ignore_eos=True)
    assert kit.generate(sampler, [request], lambda r: peaked(8, 7, 3), 3) == [[3, 3, 7]]


def test_min_tokens_of_each_request_end_on_their_own(kit, sampler):
    requests = [kit.request(sampler, temperature=0, min_tokens=n, max_tokens=9) for n in (0, 1, 3)]
    assert kit.generate(sampler, requests, lambda r: peaked(8, 2, 6), 4) == [[2] * 4, [6, 2, 2, 2], [6, 6, 6, 2]]


@pytest.mark.parametrize(
    ("penalties", "expected"),
    [
        ((2.0, 0.5, 0.25), [1.0, -5.25, 1.0, -2.0, 0.5]),
        ((2.0, 0.0, 0.0), [1.0, -4.0, 1.0, -2.0, 0.5]),
        ((1.0, 0.5, 0.0), [2.0, -3.0, 1.0, -1.0, 0.5]),
        ((1.0, 0.0, 0.25), [2.0, -2.25, 1.0, -1.0, 0.5]),
    ],
)
def test_penalties_count_prompt_and_output_as_they_should(kit, sampler, penalties, expected):
    """Logits [2, −2, 1, −1, .5], prompt {0, 3}, output [1, 1]: read off the processed logprobs."""
    logits = torch.tensor([2.0, -2.0, 1.0, -1.0, 0.5, *[NEG_INF] * 3])
    report = Sampler(8, EOS, ops=sampler.ops, logprobs_mode="processed_logprobs")
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    request = kit.request(
        report, prompt=[0, 3, 0], output=[1, 1], logprobs=5, **dict(zip(names, penalties, strict=True))
    )
    entries = report(logits[None], [request]).logprobs[0]
    found = torch.tensor([entries[i].logprob for i in range(5)])
    assert torch.allclose(found, torch.tensor(expected).log_softmax(-1), atol=1e-6)


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.5}, {"presence_penalty": 2.0}, {"frequency_penalty": 1.0}]
)
def test_counts_kept_step_by_step_are_those_counted_afresh(kit, sampler, penalty):
    """In a batch whose make-up changes under way, against a request that is added with its whole output at once."""
    report = Sampler(8, EOS, ops=sampler.ops, logprobs_mode="processed_logprobs")
    requests = [kit.request(report, prompt=[1, i], seed=i, logprobs=8, max_tokens=99, **penalty) for i in range(4)]
    generator = torch.Generator().manual_seed(0)
    for step in range(60):
        present = [r for i, r in enumerate(requests) if (step // (i + 2)) % 3 != 1] or requests[:1]
        if step % 7 == 0:
            present.reverse()
        logits = torch.randn(len(present), 8, generator=generator) * 2
        out = report(logits, present)
        for row, request in enumerate(present):
            fresh = Request("fresh", request.prompt_token_ids, request.sampling_params)
            report_alone = Sampler(8, EOS, ops=sampler.ops, logprobs_mode="processed_logprobs")
            report_alone.add_request(fresh)
            for token_id in request.output_token_ids:
                fresh.append_output_token_id(token_id)
            expected = report_alone(logits[row : row + 1], [fresh])
            assert expected.token_ids[0] == out.token_ids[row] and expected.logprobs[0] == out.logprobs[row]
        for request, token_id in zip(present, out.token_ids, strict=True):
            request.append_output_token_id(token_id)


# ---- failures of one request -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_left_fails_alone(kit, sampler, temperature):
    requests = [
        kit.request(sampler, temperature=temperature, logprobs=1, seed=0),
        kit.request(sampler, temperature=temperature, logprobs=1, allowed_token_ids=[2], min_tokens=1),
        kit.request(sampler, temperature=temperature, logprobs=1, seed=0, top_p=0.5),
        kit.request(sampler, temperature=temperature, logprobs=1),
        kit.request(sampler, temperature=temperature, logprobs=1),
        kit.request(sampler, temperature=temperature, logprobs=1),
    ]
    logits = torch.stack([peaked(8, 5)] * 6)
    logits[3, 1] = float("nan")
    logits[4] = NEG_INF
    logits[5, 0] = float("inf")
    out = sampler(logits, requests)
    assert set(out.errors) == {1, 3, 4, 5}
    assert "constraints" in out.errors[1] and all("model" in out.errors[row] for row in (3, 4, 5))
    assert out.token_ids[0] == out.token_ids[2] == 5
    assert [entry is None for entry in out.logprobs] == [False, True, False, True, True, True]


def test_a_mask_does_not_cover_a_models_nan_up(kit, sampler):
    requests = [kit.request(sampler, allowed_token_ids=[1, 2], temperature=t) for t in (0, 1, 1)]
    logits = torch.zeros(3, 8)
    logits[:2, 5] = float("nan")
    out = sampler(logits, requests)
    assert set(out.errors) == {0, 1} and all("NaN" in e for e in out.errors.values())
    assert out.token_ids[2] in (1, 2)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"allowed_token_ids": [8]}, "token id 8 is outside the vocabulary"),
        ({"logit_bias": {99: 1.0}}, "token id 99"),
        ({"stop_token_ids": [8]}, "token id 8"),
        ({"logprobs": 9}, "above the vocabulary's 8 tokens"),
        ({"prompt_logprobs": 9}, "prompt_logprobs"),
        ({"bad_words": ["a"]}, "tokenizer"),
    ],
)
def test_what_the_model_cannot_serve_is_refused_at_the_door(kit, sampler, params, message):
    with pytest.raises(ValueError, match=message):
        kit.request(sampler, **params)


def test_a_field_changed_after_construction_is_checked_at_the_door(sampler):
    request = Request("r", [1], SamplingParams())
    request.sampling_params.temperature = -3
    with pytest.raises(ValueError, match="temperature"):
        sampler.add_request(request)


def test_later_changes_of_the_users_object_change_nothing(kit, sampler):
    params = SamplingParams(temperature=0, logit_bias={4: 100.0})
    request = Request("r", [1], params)
    sampler.add_request(request)
    params.logit_bias[5] = 1000.0
    assert sampler(peaked(8, 1)[None], [request]).token_ids == [4]


def test_shapes_and_settings_of_the_sampler_itself(kit, sampler):
    with pytest.raises(ValueError, match=r"\[1, 8\]"):
        sampler(torch.zeros(1, 9), [kit.request(sampler)])
    assert sampler(torch.zeros(0, 8), []).token_ids == []
    with pytest.raises(ValueError, match="logprobs_mode"):
        Sampler(8, EOS, logprobs_mode="raw")
    with pytest.raises(ValueError, match="eos_token_ids"):
        Sampler(8, {8})


# ---- independence of the batch ---------------------------------------------------------------------------------------


def test_a_seeded_request_is_the_same_alone_and_in_any_crowd(kit, sampler):
    mine = {"seed": 7, "temperature": 0.9, "max_tokens": 99}
    (alone,) = kit.generate(sampler, [kit.request(sampler, **mine)], noisy, 30)
    crowd = [kit.request(sampler, prompt=[4], max_tokens=99, **p) for p in ({}, {"top_p": 0.5}, {"temperature": 0})]
    for place in range(4):
        batch = [*crowd[:place], kit.request(sampler, **mine), *crowd[place:]]
        assert kit.generate(sampler, batch, noisy, 30)[place] == alone
    assert len(set(alone)) > 3  # and the steps differ from one another


def test_different_seeds_and_unseeded_requests_differ(kit, sampler):
    requests = [kit.request(sampler, prompt=[1], seed=s, max_tokens=99) for s in (1, 1, 2, None, None)]
    outputs = kit.generate(sampler, requests, noisy, 40)
    assert outputs[0] == outputs[1]
    assert len({tuple(o) for o in outputs}) == 4


def test_all_64_bits_of_a_seed_count(kit):
    sampler = Sampler(512, {0}, seed=0)
    seeds = [1, 1 + 2**32, 1 + 2**63, 2**64 - 2, -2]
    logits = torch.zeros(len(seeds), 512)
    tokens = sampler(logits, [kit.request(sampler, seed=s) for s in seeds]).token_ids
    assert len(set(tokens[:4])) == 4 and tokens[3] == tokens[4]


def test_the_samplers_seed_determines_unseeded_requests(kit):
    def run(seed: int | None) -> list[list[int]]:
        sampler = Sampler(8, EOS, seed=seed)
        return kit.generate(sampler, [kit.request(sampler, max_tokens=99) for _ in range(3)], noisy, 20)

    assert run(5) == run(5) != run(6)
    assert run(None) != run(None)


def test_discarded_steps_do_not_advance_a_request(kit, sampler):
    """Noise belongs to a position: what was not sampled for this request (a partial prefill, a preemption) cannot shift it."""
    request = kit.request(sampler, seed=3, max_tokens=99)
    kit.generate(sampler, [request], noisy, 5)
    resumed = kit.request(sampler, seed=3, max_tokens=99, output=request.output_token_ids[:3])
    kit.generate(sampler, [resumed], noisy, 2)
    assert resumed.output_token_ids == request.output_token_ids


def test_batch_tensors_are_kept_exactly_while_the_requests_stay_the_same(kit, sampler, monkeypatch):
    built = []
    original = SamplingBatch.__init__
    monkeypatch.setattr(SamplingBatch, "__init__", lambda self, *a: (built.append(1), original(self, *a))[1])
    first, second = kit.request(sampler, temperature=0), kit.request(sampler, temperature=0, logit_bias={4: 99.0})
    logits = torch.stack([peaked(8, 1)] * 2)
    for _ in range(3):
        assert sampler(logits, [first, second]).token_ids == [1, 4]
    assert len(built) == 1
    assert sampler(logits, [second, first]).token_ids == [4, 1]
    assert sampler(logits[:1], [first]).token_ids == [1]
    twin = kit.request(sampler, temperature=0, logit_bias={6: 99.0})  # same id and parameters' shape, another object
    assert sampler(logits, [first, twin]).token_ids == [1, 6]
    assert len(built) == 4


# ---- custom processors -----------------------------------------------------------------------------------------------


class OnlyEven(LogitsProcessor):
    """Bans odd ids for requests that ask for it."""

    def is_argmax_invariant(self) -> bool:
        return False

    def validate_params(self, params: SamplingParams) -> None:
        if not isinstance((params.extra_args or {}).get("even", False), bool):
            raise ValueError("extra_args['even'] must be a bool")

    def apply(self, logits: Tensor, requests) -> Tensor:
        rows = [row for row, r in enumerate(requests) if (r.sampling_params.extra_args or {}).get("even")]
        logits[rows, 1::2] = NEG_INF
        return logits


class Sharpen(LogitsProcessor):
    """Argmax-invariant: keeps the ratio of logits, doubles their distances."""

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor, requests) -> Tensor:
        return logits * 1000


def test_a_custom_processor_serves_the_requests_that_ask_for_it(kit, sampler):
    sampler.logits_processors.append(OnlyEven())
    requests = [kit.request(sampler, temperature=0, extra_args={"even": on}) for on in (True, False)]
    logits = torch.stack([peaked(8, 5, 6)] * 2)
    assert sampler(logits, requests).token_ids == [6, 5]
    assert logits[0, 5] > 0  # the model's logits stay
    with pytest.raises(ValueError, match="even"):
        kit.request(sampler, extra_args={"even": 3})


def test_an_argmax_invariant_processor_runs_after_temperature_and_never_for_greedy_batches(kit, sampler):
    sampler.logits_processors.append(Sharpen())
    logits = peaked(8, 5, scale=0.1).repeat(50, 1)
    assert set(sampler(logits, [kit.request(sampler, seed=s) for s in range(50)]).token_ids) == {5}
    with record_ops() as ledger:
        sampler(logits, [kit.request(sampler, temperature=0) for _ in range(50)])
    assert [record.op for record in ledger.records] == ["greedy_argmax"]


def test_a_custom_processor_that_returns_something_else_is_named(kit, sampler):
    class Forgetful(OnlyEven):
        def apply(self, logits: Tensor, requests) -> None:
            logits[:, 0] = 1.0

    sampler.logits_processors.append(Forgetful())
    with pytest.raises(ValueError, match=r"Forgetful.apply must return float32 \[1, 8\], got NoneType"):
        sampler(torch.zeros(1, 8), [kit.request(sampler)])


def test_custom_processors_come_after_the_bias_and_before_the_penalties(kit, sampler):
    seen = []

    class Spy(OnlyEven):
        def apply(self, logits: Tensor, requests) -> Tensor:
            seen.append(logits.clone())
            return logits

    sampler.logits_processors.append(Spy())
    request = kit.request(sampler, prompt=[0], temperature=0, logit_bias={0: 1.0}, repetition_penalty=2.0)
    sampler(torch.zeros(1, 8), [request])
    assert seen[0].tolist() == [[1.0, *[0.0] * 7]]


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
@pytest.mark.parametrize("bias", [1e30, -3.4028234e38])
def test_the_largest_values_allowed_overflow_nothing(kit, ops, bias, penalty):
    sampler = Sampler(6, (), ops=ops)
    logits = torch.tensor([[1e5, -1e5, 3.0, 2.0, 1.0, 0.0]])
    request = kit.request(
        sampler, prompt=[0, 1], temperature=0.01, seed=1, repetition_penalty=penalty, logit_bias={0: bias}
    )
    out = sampler(logits, [request])
    assert not out.errors
    if bias > 0:
        assert out.token_ids == [0]
