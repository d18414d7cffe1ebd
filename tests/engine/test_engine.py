"""The engine's own work between sampler and reader: text and stop strings, failures of one request, parts that must fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from llmlab import LLM, SamplingParams, bpe
from llmlab.engine.engine import LLMEngine
from llmlab.engine.scheduler import Scheduler
from llmlab.sampling.processors import LogitsProcessor
from llmlab.tokenizer import Tokenizer

WORDS = {word: 256 + i for i, word in enumerate(["ab", "cST", "OPx", "STOP"])}


class Script(LogitsProcessor):
    """Writes the tokens that the request brings in ``extra_args``, whatever the model says."""

    def is_argmax_invariant(self) -> bool:
        return False

    def apply(self, logits: Tensor, requests) -> Tensor:
        for row, request in enumerate(requests):
            script = request.sampling_params.extra_args["script"]
            others = torch.arange(logits.shape[1]) != script[request.num_output_tokens % len(script)]
            logits[row, others] = float("-inf")
        return logits


def plain_tokenizer() -> bpe.Tokenizer:
    """Bytes, and some words as tokens of their own."""
    vocab = {bytes([i]): i for i in range(256)} | {word.encode(): i for word, i in WORDS.items()}
    return bpe.Tokenizer(vocab, {}, bpe.PreTokenizer.from_pattern("."))


@pytest.fixture(scope="module")
def folder(random_hf_model):
    return random_hf_model(seed=2, vocab_size=300, num_hidden_layers=1)[1]


@pytest.fixture
def llm(folder) -> LLM:
    settings = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 32, "block_size": 4}
    return LLM(folder, tokenizer=plain_tokenizer(), logits_processors=[Script()], **settings)


def script(*words: str, **params) -> SamplingParams:
    params = {"temperature": 0, "max_tokens": len(words), "ignore_eos": True} | params
    return SamplingParams(extra_args={"script": [WORDS.get(word, ord(word[0])) for word in words]}, **params)


def assert_idle(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    assert not llm.engine.has_unfinished_requests() and not scheduler.has_unfinished_requests()
    assert pool.num_free == pool.num_blocks
    pool.check()


# ---- stop strings ----------------------------------------------------------------------------------------------------


def test_a_stop_string_ends_the_request_in_the_scheduler_too(llm):
    """It lies across two tokens; the ids keep what was sampled, the text is cut, the others go on."""
    stopped = script("ab", "cST", "OPx", "ab", stop=["STOP"], max_tokens=20)
    first, second = llm.generate(["x", "y"], [stopped, script("ab", max_tokens=9)], use_tqdm=False)
    assert first.outputs[0].token_ids == [WORDS["ab"], WORDS["cST"], WORDS["OPx"]]
    assert (first.outputs[0].text, first.outputs[0].finish_reason) == ("abc", "stop")
    assert first.outputs[0].stop_reason == "STOP"
    assert (second.outputs[0].text, second.outputs[0].finish_reason) == ("ab" * 9, "length")
    assert_idle(llm)


@pytest.mark.parametrize(("include", "text"), [(False, "abc"), (True, "abcSTOP")])
def test_a_stop_string_that_the_last_allowed_token_completes_is_a_stop(llm, include, text):
    params = script("ab", "cST", "OPx", stop="STOP", include_stop_str_in_output=include)
    (output,) = llm.generate(["x"], params, use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (
        text,
        "stop",
        "STOP",
    )
    assert_idle(llm)


def test_streams_never_show_what_may_begin_a_stop_string(llm):
    assert "".join(llm.stream("x", script("ab", "cST", "OPx", "ab", stop=["STOP"]))) == "abc"
    pieces = list(llm.stream("x", script("ab", "cST", "ab", stop=["STOP"])))  # it was none: released
    assert "".join(pieces) == "abcSTab" and not any(piece.endswith("S") for piece in pieces)
    assert_idle(llm)


@pytest.mark.parametrize(("min_tokens", "count"), [(0, 1), (1, 3), (3, 4)])
def test_min_tokens_holds_stop_strings_off(llm, min_tokens, count):
    params = script("STOP", "ab", "STOP", "ab", stop=["STOP"], min_tokens=min_tokens)
    (output,) = llm.generate(["x"], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == count
    assert output.outputs[0].finish_reason == ("stop" if count < 4 else "length")


def test_a_stop_string_in_the_prompt_stops_nothing(llm):
    """Nor one that begins in the prompt and ends in the output."""
    for prompt in ("STOP", "xST"):
        (output,) = llm.generate([prompt], script("OPx", "ab", stop=["STOP"]), use_tqdm=False)
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("OPxab", "length")


# ---- failures of one request -----------------------------------------------------------------------------------------


class Unreadable(Tokenizer):
    """Decodes whole texts only, and breaks on some ids."""

    is_bytewise, special_token_ids, vocab_size = False, frozenset(), 300

    def __init__(self) -> None:
        super().__init__(None, None)

    def decode(self, ids, skip_special_tokens=True):
        if ord("!") in ids:
            raise RuntimeError("no such token")
        return "".join(chr(i) for i in ids)

    def encode(self, prompt, add_special_tokens=True):
        return [ord(char) for char in prompt]

    def render_chat(self, messages, chat_template=None, add_generation_prompt=True):
        raise NotImplementedError

    def _lookup_bytes(self, token_id):
        return bytes([token_id % 256])


@pytest.mark.parametrize("when", ["midway", "with the last token"])
def test_text_that_cannot_be_decoded_fails_its_own_request_alone(folder, when):
    """The others keep their text, and the engine goes on."""
    settings = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 32, "block_size": 4}
    llm = LLM(folder, tokenizer=Unreadable(), logits_processors=[Script()], **settings)
    broken = script("a", "b", "!", max_tokens=9 if when == "midway" else 3)
    good = script("x", "y", "z", max_tokens=7)
    outputs = llm.generate(["p", "q", "r"], [good, broken, good], use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert [o.outputs[0].text for o in outputs] == ["xyzxyzx", "ab", "xyzxyzx"]
    assert outputs[1].outputs[0].token_ids == [ord("a"), ord("b"), ord("!")]
    assert "no such token" in outputs[1].error and outputs[0].error is None
    assert_idle(llm)
    (again,) = llm.generate(["p"], good, use_tqdm=False)
    assert again.outputs[0].text == "xyzxyzx"


# ---- parts that must fit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "blocks", "message"),
    [
        ({"max_model_len": 65}, {}, "max_model_len=65, but the model's rotary table has 64 positions"),
        ({}, {"num_blocks": 33}, "num_blocks=33, but the memory holds 32 blocks"),
        ({}, {"num_host_blocks": 1}, "num_host_blocks=1, but the memory holds 0 blocks"),
        ({}, {"block_size": 8}, "block_size=8, but the KV cache has blocks of 4 tokens"),
    ],
)
def test_a_scheduler_may_not_plan_beyond_the_runners_memory(llm, limits, blocks, message):
    engine = llm.engine
    old = engine.scheduler
    scheduler = Scheduler(replace(old.config, **limits), replace(old.cache_config, **blocks))
    with pytest.raises(ValueError, match=message):
        LLMEngine(engine.runner, scheduler, engine.sampler, engine.tokenizer)


def test_positions_end_one_before_the_last_of_the_table(llm):
    """A prompt of all but one position, and a request that runs to the end: the last position is never computed."""
    seen = []
    forward = llm.engine.runner.forward
    llm.engine.runner.forward = lambda batch: (seen.append(int(batch.positions.max())), forward(batch))[1]
    outputs = llm.generate([[65] * 63, [65] * 5], script("a", max_tokens=None), use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 59]
    assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 2
    assert max(seen) == 62
