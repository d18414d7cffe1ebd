"""SamplingParams: vLLM's defaults, every limit, and what contradicts what."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from llmlab.sampling.params import SamplingParams, StructuredOutputsParams

NAN = float("nan")


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert (params.logprobs, params.prompt_logprobs) == (None, None)
    assert (params.stop, params.stop_token_ids, params.bad_words) == ([], [], [])
    assert (params.ignore_eos, params.skip_special_tokens, params.include_stop_str_in_output) == (False, True, False)
    assert (params.logit_bias, params.allowed_token_ids, params.structured_outputs) == (None, None, None)


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("n", 0, "at least 1"),
        ("n", 1.5, "integer"),
        ("n", True, "integer"),
        ("temperature", -0.1, "[0.0"),
        ("temperature", NAN, "finite"),
        ("temperature", math.inf, "finite"),
        ("temperature", "hot", "number"),
        ("temperature", 1e39, "3.4028"),
        ("temperature", 10**400, "number"),
        ("top_p", 0.0, "(0, 1]"),
        ("top_p", -0.5, "[0.0, 1.0]"),
        ("top_p", 1.0001, "[0.0, 1.0]"),
        ("top_p", NAN, "[0.0, 1.0]"),
        ("top_k", -2, "at least -1"),
        ("top_k", 2.5, "integer"),
        ("min_p", -0.01, "[0.0, 1.0]"),
        ("min_p", 1.01, "[0.0, 1.0]"),
        ("presence_penalty", 2.1, "[-2.0, 2.0]"),
        ("frequency_penalty", -2.1, "[-2.0, 2.0]"),
        ("frequency_penalty", NAN, "[-2.0, 2.0]"),
        ("repetition_penalty", 0.0, "[1e-06, 1000000.0]"),
        ("repetition_penalty", -1.0, "[1e-06"),
        ("repetition_penalty", 1e-38, "[1e-06"),
        ("repetition_penalty", 1e38, "1000000.0]"),
        ("repetition_penalty", math.inf, "finite"),
        ("seed", 2**64, str(2**64 - 1)),
        ("seed", -(2**63) - 1, str(-(2**63))),
        ("seed", 1.5, "integer"),
        ("max_tokens", 0, "at least 1"),
        ("min_tokens", -1, "at least 0"),
        ("logprobs", -2, "at least -1"),
        ("prompt_logprobs", 1.5, "integer"),
        ("stop", "", "non-empty"),
        ("stop", ["a", ""], "non-empty"),
        ("stop", [3], "non-empty"),
        ("stop", 3, "non-empty"),
        ("bad_words", [""], "non-empty"),
        ("stop_token_ids", [-1], "at least 0"),
        ("stop_token_ids", ["a"], "integer"),
        ("stop_token_ids", "12", "list of token ids"),
        ("stop_token_ids", 0, "list of token ids"),
        ("stop_token_ids", np.int64(7), "list of token ids"),
        ("stop_token_ids", np.array([1.0, 2.0]), "integer"),
        ("stop_token_ids", np.array([[1, 2]]), "integer"),
        ("allowed_token_ids", np.array([], dtype=np.int64), "at least one"),
        ("stop", np.array(["a", ""]), "non-empty"),
        ("allowed_token_ids", [], "at least one"),
        ("allowed_token_ids", [1.0], "integer"),
        ("logit_bias", {-1: 1.0}, "at least 0"),
        ("logit_bias", {1: NAN}, "finite"),
        ("logit_bias", {1: math.inf}, "finite"),
        ("logit_bias", {1: 1e39}, "1e+30]"),
        ("logit_bias", {1: -1e39}, "[-3.4028"),
        ("logit_bias", {1: 3.4e38}, "1e+30]"),
        ("logit_bias", {1: 10**400}, "number"),
        ("logit_bias", [1], "dict"),
        ("structured_outputs", {"json": {}}, "StructuredOutputsParams"),
        ("ignore_eos", 1, "True or False"),
        ("extra_args", [1], "dict"),
    ],
)
def test_a_bad_value_is_named_with_its_limit(field, value, limit):
    with pytest.raises(ValueError, match=field) as caught:
        SamplingParams(**{field: value})
    assert limit in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"min_tokens": 17},
        {"max_tokens": 3, "min_tokens": 4},
        {"temperature": 0, "n": 2},
        {"allowed_token_ids": [1, 2], "logit_bias": {1: -math.inf, 2: -math.inf}},
    ],
)
def test_contradictions_are_refused(settings):
    with pytest.raises(ValueError):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"json": {}, "regex": "a"},
        {"choice": []},
        {"choice": ["a", ""]},
        {"choice": "ab"},
        {"regex": ""},
        {"grammar": 3},
        {"json": 3},
        {"json_object": False},
    ],
)
def test_structured_outputs_ask_for_exactly_one_thing(settings):
    with pytest.raises(ValueError, match="structured_outputs"):
        StructuredOutputsParams(**settings)


def test_greedy_switches_the_filters_off():
    params = SamplingParams(temperature=9e-6, top_p=0.5, top_k=3, min_p=0.1)
    assert params.is_greedy
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)


def test_a_tiny_temperature_is_raised_with_a_warning():
    with pytest.warns(UserWarning, match=r"0\.001 is below 0\.01"):
        assert SamplingParams(temperature=1e-3).temperature == 0.01
    assert SamplingParams(temperature=0.01).temperature == 0.01


def test_values_are_brought_to_one_form():
    params = SamplingParams(stop="end", logit_bias={"5": 1}, logprobs=True, seed=-1, top_k=-1)
    assert (params.stop, params.logit_bias, params.logprobs, params.seed) == (["end"], {5: 1.0}, 1, None)


def test_lists_may_be_arrays():
    choice = StructuredOutputsParams(choice=np.array(["yes", "no"]))
    params = SamplingParams(
        stop_token_ids=np.array([3, 5], dtype=np.int32), allowed_token_ids=torch.tensor([7, 8]),
        stop=np.array(["a", "bc"]), bad_words=("x",), structured_outputs=choice,
    )  # fmt: skip
    assert (params.stop_token_ids, params.allowed_token_ids) == ([3, 5], [7, 8])
    assert (params.stop, params.bad_words, choice.choice) == (["a", "bc"], ["x"], ["yes", "no"])
    assert all(type(t) is int for t in params.stop_token_ids + params.allowed_token_ids)


def test_a_field_assigned_later_is_checked_by_validate():
    params = SamplingParams()
    params.top_p = 7
    with pytest.raises(ValueError, match="top_p"):
        params.validate()


def test_outputs_of_one_prompt_have_seeds_of_their_own():
    params = SamplingParams(n=3, seed=2**64 - 2)
    assert [params.for_output(i).seed for i in range(3)] == [2**64 - 2, 2**64 - 1, 0]
    assert all(params.for_output(i).n == 1 for i in range(3))
    assert SamplingParams(n=3).for_output(1).seed is None
    assert SamplingParams(n=2, seed=-2).for_output(1).seed == 2**64 - 1  # not −1, which means "no seed"


def test_the_parameters_need_no_torch():
    code = "import sys; from llmlab.sampling.params import SamplingParams; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
