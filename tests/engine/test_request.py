"""A request's bookkeeping, and when it stops: vLLM's order of the rules."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llmlab.engine.request import Request, RequestStatus, check_stop
from llmlab.sampling.params import SamplingParams

EOS = frozenset({2, 3})


def stops(
    output: list[int], max_model_len: int = 100, prompt: int = 4, **params
) -> tuple[str | None, int | str | None]:
    """Feed ``output`` token by token; (finish_reason, stop_reason) at the first stop, which must be the last token."""
    request = Request("r", list(range(10, 10 + prompt)), SamplingParams(**params))
    for i, token_id in enumerate(output):
        request.append_output_token_id(token_id)
        if check_stop(request, max_model_len, EOS):
            assert i == len(output) - 1, f"stopped early, at {output[: i + 1]}"
            assert request.is_finished
            break
    return request.finish_reason, request.stop_reason


def test_finish_reasons_are_vllms():
    reasons = {status.name: status.finish_reason for status in RequestStatus if status.is_finished}
    assert reasons == {
        "FINISHED_STOPPED": "stop",
        "FINISHED_LENGTH_CAPPED": "length",
        "FINISHED_ABORTED": "abort",
        "FINISHED_ERROR": "error",
    }
    assert not any(s.is_finished for s in (RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED))


def test_tokens_are_counted():
    request = Request("r", (5, 6, 7), SamplingParams())
    request.append_output_token_id(8)
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (3, 1, 4)
    assert request.prompt_token_ids == [5, 6, 7] and request.output_token_ids == [8]
    assert request.all_token_ids == [5, 6, 7, 8]
    assert request.num_cached_tokens == -1 and request.num_computed_tokens == 0


def test_the_callers_list_is_copied():
    prompt = [1, 2, 3]
    request = Request("r", prompt, SamplingParams())
    prompt.append(4)
    request.append_output_token_id(9)
    assert request.prompt_token_ids == [1, 2, 3] and prompt == [1, 2, 3, 4]


def test_token_ids_become_plain_ints():
    request = Request("r", np.array([1, 2], dtype=np.int64), SamplingParams())
    assert [type(t) for t in request.prompt_token_ids] == [int, int]


@pytest.mark.parametrize("prompt", [[], [-1], [1.5], ["1"], [None], [2**31], [2**70], [[1]], 7, None, "text"], ids=repr)
def test_what_is_no_prompt_is_refused(prompt):
    with pytest.raises(ValueError, match="'r'"):
        Request("r", prompt, SamplingParams())


@pytest.mark.parametrize("bad", [{"priority": None}, {"priority": 1.5}, {"priority": True}, {"arrival_time": math.nan}])
def test_what_cannot_be_ordered_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Request("r", [1], SamplingParams(), **bad)


def test_any_eos_stops():
    assert stops([7, 2]) == ("stop", None)
    assert stops([7, 3]) == ("stop", None)


def test_stop_token_id_is_the_stop_reason():
    assert stops([7, 8, 9], stop_token_ids=[9, 11]) == ("stop", 9)


def test_eos_comes_before_stop_token_ids():
    assert stops([2], stop_token_ids=[2]) == ("stop", None)


def test_ignore_eos_ignores_eos_only():
    assert stops([2, 3, 7], ignore_eos=True, stop_token_ids=[7]) == ("stop", 7)
    assert stops([2, 3], ignore_eos=True, stop_token_ids=[3]) == ("stop", 3)
    assert stops([2, 2, 2], ignore_eos=True, max_tokens=3) == ("length", None)


def test_length_by_max_tokens_and_by_max_model_len():
    assert stops([7, 7, 7], max_tokens=3) == ("length", None)
    assert stops([7, 7], max_model_len=6, prompt=4, max_tokens=None) == ("length", None)
    assert stops([7] * 96, max_model_len=100, prompt=4, max_tokens=None) == ("length", None)


def test_eos_as_last_allowed_token_is_a_stop():
    assert stops([7, 7, 2], max_tokens=3) == ("stop", None)
    assert stops([7, 2], max_model_len=6, prompt=4) == ("stop", None)
    assert stops([7, 9], max_tokens=2, stop_token_ids=[9]) == ("stop", 9)


def test_min_tokens_holds_back_every_stop_id():
    assert stops([2, 3, 9, 2], min_tokens=4, stop_token_ids=[9]) == ("stop", None)
    assert stops([2, 2], min_tokens=2) == ("stop", None)
    assert stops([2, 2, 2], min_tokens=3, max_tokens=3, ignore_eos=True) == ("length", None)


def test_min_tokens_cannot_hold_back_the_end_of_the_context():
    """A request that may neither stop nor grow would stay for ever."""
    assert stops([7, 2], max_model_len=6, prompt=4, min_tokens=10, max_tokens=20) == ("length", None)
