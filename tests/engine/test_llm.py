"""The public API: vLLM's offline calls, greedy text equal to Hugging Face's, bad input refused with the engine intact."""

from __future__ import annotations

import pytest
import torch

from llmlab import LLM, SamplingParams, record_ops

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 6, 7], [11] * 9, list(range(20, 45)), [3]]


@pytest.fixture(scope="module")
def hf(random_hf_model):
    return random_hf_model(seed=3)


def make(folder, **kwargs) -> LLM:
    return LLM(folder, **{"num_kv_blocks": 64, "block_size": 4, **kwargs})


@pytest.fixture
def llm(hf):
    with pytest.warns(UserWarning, match="has no tokenizer"):
        return make(hf[1])


def tokens(outputs) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


def hf_greedy(model, prompt: list[int], count: int) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    return out[0, len(prompt) :].tolist()


def assert_idle(llm: LLM) -> None:
    """Nothing is left: no request anywhere, every block free."""
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_unfinished_requests()
    assert not scheduler.has_unfinished_requests()
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.num_free == pool.num_blocks


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
def test_greedy_is_hugging_faces_token_for_token(random_hf_model, architecture, backend):
    extra = {"sliding_window": 9} if architecture == "MistralForCausalLM" else {}
    model, folder = random_hf_model(architecture, **extra)
    outputs = make(folder, backend=backend).generate(PROMPTS, GREEDY, use_tqdm=False)
    assert tokens(outputs) == [hf_greedy(model, p, 12) for p in PROMPTS]


@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
@pytest.mark.parametrize(("backend", "budget"), [("torch", 1), ("torch", 5), ("reference", 5)])
def test_a_sliding_window_over_chunks_and_cached_blocks(random_hf_model, backend, budget):
    """Windows smaller than a prompt and not a multiple of a block, prompts in pieces, and their blocks hit again."""
    model, folder = random_hf_model("MistralForCausalLM", sliding_window=6)
    llm = make(folder, backend=backend, max_num_batched_tokens=budget)
    expected = [hf_greedy(model, p, 12) for p in PROMPTS]
    for _ in range(2):
        assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    assert llm.engine.scheduler.stats.totals.prefix_cache_hits > 0


@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_length_dependent_rope_in_generate(random_hf_model, rope_type):
    """Prompts on both sides of the threshold, outputs that cross it, chunks, and a shared prefix of another length."""
    parameters = {
        "dynamic": {"rope_type": "dynamic", "factor": 4.0},
        "longrope": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16,
                     "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]},
    }[rope_type]  # fmt: skip
    limit = 16 if rope_type == "dynamic" else 64
    model, folder = random_hf_model(
        rope_parameters={"rope_theta": 10000.0, **parameters}, max_position_embeddings=limit
    )
    long = list(range(30, 54))
    prompts = [long, long[:10], long[:20], [7] * 14]
    llm = make(folder, max_model_len=60, max_num_batched_tokens=9)
    for prompt in prompts:  # one after the other, so that a later one could hit an earlier one's blocks
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        fresh = type(model).from_pretrained(
            folder
        )  # a used one keeps the frequencies of the longest sequence it has seen
        assert output.outputs[0].token_ids == hf_greedy(fresh, prompt, 12), len(prompt)


def test_a_vllm_script(llm):
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.finished
        assert output.prompt is None
        assert output.prompt_token_ids == prompt
        (completion,) = output.outputs
        assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
        assert len(completion.token_ids) == 12
        assert output.metrics.time_to_first_token > 0
    assert_idle(llm)


@pytest.mark.parametrize("prompt", [[5, 6, 7], {"prompt_token_ids": [5, 6, 7]}, [[5, 6, 7]]])
def test_forms_of_a_prompt(llm, prompt):
    assert len(llm.generate(prompt, GREEDY, use_tqdm=False)) == 1


def test_step_by_step(llm):
    llm.engine.add_request("a", [5, 6, 7], SamplingParams(temperature=0, max_tokens=3))
    lengths = []
    while llm.engine.has_unfinished_requests():
        (output,) = llm.engine.step()
        lengths.append((len(output.outputs[0].token_ids), output.finished))
    assert lengths == [(1, False), (2, False), (3, True)]
    assert llm.engine.step() == []


def test_n_outputs_share_the_prompt(llm):
    prompt = list(range(20, 45))
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert [o.index for o in output.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in output.outputs}) > 1
    alone = llm.generate(
        [prompt], SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True), use_tqdm=False
    )
    assert alone[0].outputs[0].token_ids == output.outputs[0].token_ids
    first = llm.engine.scheduler.stats
    assert first is not None
    assert_idle(llm)


def test_logprobs_and_prompt_logprobs(hf, llm):
    model, _ = hf
    prompt = list(range(20, 33))
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    (completion,) = output.outputs
    with torch.no_grad():
        expected = model(torch.tensor([prompt + completion.token_ids])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
        assert entry[prompt[position]].logprob == pytest.approx(
            expected[position - 1, prompt[position]].item(), abs=1e-4
        )
    for i, (token, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        assert entry[token].logprob == pytest.approx(expected[len(prompt) - 1 + i, token].item(), abs=1e-4)
        assert entry[token].rank == 1
    assert completion.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True))
    )


def test_stream_joins_to_generate_and_closing_it_aborts(default_model):
    llm = LLM(default_model, max_model_len=256, num_kv_blocks=64)
    params = SamplingParams(temperature=0, max_tokens=12)
    pieces = list(llm.stream("The capital of France is", params))
    (output,) = llm.generate("The capital of France is", params, use_tqdm=False)
    assert "".join(pieces) == output.outputs[0].text
    assert len(pieces) > 3
    stream = llm.stream("One two three", params)
    next(stream)
    stream.close()
    assert_idle(llm)


def test_ledger_of_a_step(llm):
    with record_ops() as ledger:
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    table = ledger.table()
    layers = table["layer"].dropna().unique().tolist()
    assert layers == [0, 1, 2]
    of_layer = ledger.costs().query("layer == 1")
    assert of_layer["stage"].tolist() == [
        "input_layernorm", "qkv_proj", "rotary_emb", "kv_cache", "attention", "o_proj",
        "post_attention_layernorm", "gate_up_proj", "act_fn", "down_proj",
    ]  # fmt: skip


def test_forward_logits_is_hugging_faces_and_disturbs_nobody(hf, llm):
    model, _ = hf
    llm.engine.add_request("a", [5, 6, 7], GREEDY)
    llm.engine.step()
    logits = llm.forward_logits([1, 2, 3, 4, 5])
    with torch.no_grad():
        expected = model(torch.tensor([[1, 2, 3, 4, 5]])).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs = llm.engine.step()
    assert outputs[0].outputs[0].token_ids == hf_greedy(model, [5, 6, 7], 12)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "prompt is empty"),
        ([97], GREEDY, r"token id 97 is outside the vocabulary \[0, 97\)"),
        ([-1], GREEDY, "token id -1 is outside"),
        ([1] * 64, GREEDY, "max_model_len=64"),
        ("text", GREEDY, "no tokenizer"),
        ([1.5], GREEDY, "a prompt must be text"),
        (None, GREEDY, "a prompt must be text"),
        ({"tokens": [1]}, GREEDY, "unknown keys"),
        ([1], SamplingParams(allowed_token_ids=[97]), "97"),
        ([1], SamplingParams(logit_bias={97: 1.0}), "97"),
        ([1], SamplingParams(stop_token_ids=[970]), "970"),
    ],
)
def test_bad_requests_are_refused_at_the_door(llm, prompt, params, message):
    llm.engine.add_request("good", [5, 6, 7], GREEDY)
    llm.engine.step()
    with pytest.raises(ValueError, match=message):
        llm.engine.add_request("bad", prompt, params)
    while llm.engine.has_unfinished_requests():
        last = llm.engine.step()
    assert len(last[0].outputs[0].token_ids) == 12
    assert_idle(llm)


def test_one_bad_prompt_stops_the_call_and_leaves_nothing(llm):
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.generate([[1, 2], []], GREEDY, use_tqdm=False)
    assert_idle(llm)
    assert llm.generate([[1, 2]], GREEDY, use_tqdm=False)[0].finished


def test_ids_in_use_and_lengths_of_lists(llm):
    llm.engine.add_request("a", [1], GREEDY)
    with pytest.raises(ValueError, match="in use"):
        llm.engine.add_request("a", [1], GREEDY)
    with pytest.raises(ValueError, match="1 sampling_params for 2 prompts"):
        llm.generate([[1], [2]], [GREEDY])


def test_abort_at_any_moment(llm):
    llm.engine.add_request("a", [1, 2, 3], GREEDY)
    llm.engine.add_request("b", [4, 5, 6], GREEDY)
    llm.engine.abort_request("a")  # before its first step
    llm.engine.abort_request("a")  # again
    llm.engine.abort_request("nobody")
    reasons = {o.request_id: o.outputs[0].finish_reason for o in llm.engine.step()}
    assert reasons == {"a": "abort", "b": None}
    llm.engine.abort_request("b")
    assert [o.outputs[0].finish_reason for o in llm.engine.step()] == ["abort"]
    assert_idle(llm)


def test_a_failing_forward_fails_its_step_and_no_more(llm, monkeypatch):
    llm.engine.add_request("a", [1, 2, 3], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner.model, "forward", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.engine.step()
    (output,) = llm.engine.step()
    assert (output.outputs[0].finish_reason, output.finished) == ("error", True)
    assert "ZeroDivisionError" in output.error
    assert_idle(llm)
    assert llm.generate([[1, 2]], GREEDY, use_tqdm=False)[0].finished


def test_an_abort_before_a_failing_step_is_still_reported(llm, monkeypatch):
    llm.engine.add_request("a", [1, 2, 3], GREEDY)
    llm.engine.add_request("b", [4, 5, 6], GREEDY)
    llm.engine.step()
    llm.engine.abort_request("b")
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner.model, "forward", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.engine.step()
    assert {o.request_id: o.outputs[0].finish_reason for o in llm.engine.step()} == {"a": "error", "b": "abort"}
    assert_idle(llm)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"device": "tpu"}, "device"),
        ({"backend": "jax"}, "backend must be one of"),
        ({"max_model_len": 65}, r"max_model_len must be an integer in \[1, 64\]"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"num_kv_blocks": 0}, "num_kv_blocks must be"),
        ({"num_kv_blocks": 2**40}, "bytes; .* are free"),
        ({"num_kv_blocks": None, "kv_cache_memory_bytes": 10}, "at least one block"),
        ({"kv_cache_memory_bytes": 10**6}, "not both"),
        ({"block_size": 0}, "block_size"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size must be 1"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 8}, "without chunked prefill"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
def test_impossible_engines_are_refused(hf, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(hf[1], **kwargs)


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        LLM(tmp_path)
    with pytest.raises((FileNotFoundError, ValueError)):
        LLM(str(tmp_path / "nothing"))


def test_default_model_speaks(default_model):
    """Text of the real model, through its chat template, in bf16."""
    llm = LLM(default_model, max_model_len=512, num_kv_blocks=128)
    params = SamplingParams(temperature=0, max_tokens=24)
    (answer,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], params, use_tqdm=False)
    assert "Paris" in answer.outputs[0].text
    assert answer.outputs[0].finish_reason == "stop"
    assert answer.prompt.count("<|im_start|>assistant") == 1


@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
def test_custom_logits_processors(hf):
    from llmlab.sampling.processors import LogitsProcessor

    class OnlyToken(LogitsProcessor):
        """Leaves one token, whatever the model says."""

        def is_argmax_invariant(self) -> bool:
            return False

        def apply(self, logits, requests):
            kept = logits[:, 41].clone()
            logits.fill_(float("-inf"))
            logits[:, 41] = kept
            return logits

    (output,) = make(hf[1], logits_processors=[OnlyToken()]).generate([[1, 2]], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == [41] * 12


def test_ctrl_c_inside_the_scheduler_leaves_no_trace(llm):
    """Blocks are published while planning: a plan that is cut short must not leave any that were never written."""
    prompt = list(range(20, 60))
    (expected,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    llm.reset_prefix_cache()
    scheduler = llm.engine.scheduler
    plan = scheduler.schedule

    def cut_short():
        plan()
        raise KeyboardInterrupt

    scheduler.schedule = cut_short
    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt], GREEDY, use_tqdm=False)
    del scheduler.schedule
    assert_idle(llm)
    (again,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids
    assert again.num_cached_tokens == 0


def test_streams_and_generate_share_an_engine(default_model):
    # float32: in bf16 the sums of another batch size may part at a near tie
    llm = LLM(default_model, dtype="float32", max_model_len=128, num_kv_blocks=64)
    params = SamplingParams(temperature=0, max_tokens=8)
    alone = ["".join(llm.stream(prompt, params)) for prompt in ("One, two,", "The sky is")]
    first, second = llm.stream("One, two,", params), llm.stream("The sky is", params)
    pieces = ["", ""]
    pieces[0] += next(first)
    llm.engine.add_request("mine", "Hello", params)
    llm.generate("Good morning", params, use_tqdm=False)
    pieces[1] += "".join(second)
    pieces[0] += "".join(first)
    assert pieces == alone
    finished = []
    while llm.engine.has_unfinished_requests():
        finished += [output.request_id for output in llm.engine.step() if output.finished]
    assert finished == ["mine"]


def test_a_stream_that_nobody_reads_holds_nothing(llm):
    stream = llm.stream([1, 2, 3], GREEDY)
    assert llm.engine.has_unfinished_requests()
    del stream
    assert_idle(llm)


def test_an_output_does_not_change_after_it_was_given(llm):
    llm.engine.add_request("a", [1, 2], SamplingParams(temperature=0, max_tokens=3, logprobs=1, ignore_eos=True))
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    assert [len(o.outputs[0].logprobs) for o in outputs] == [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3]


def test_arrays_and_tensors_are_prompts(llm):
    import numpy as np

    expected = tokens(llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False))
    for prompt in (
        np.array([5, 6, 7]),
        torch.tensor([5, 6, 7]),
        [np.int64(5), np.int32(6), 7],
        (5, 6, 7),
        [np.array([5, 6, 7])],
    ):
        assert tokens(llm.generate(prompt, GREEDY, use_tqdm=False)) == expected


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate(None),
        lambda llm: llm.generate(5),
        lambda llm: llm.generate([[1]], "greedy"),
        lambda llm: llm.generate([[1]], GREEDY, priority=3),
        lambda llm: llm.chat({"role": "user", "content": "hi"}),
        lambda llm: llm.chat(None),
        lambda llm: llm.engine.add_request("a", [1], {}),
        lambda llm: llm.engine.add_request("a", [1], SamplingParams(stop=["x"])),
    ],
)
def test_wrong_types_are_value_errors(llm, call):
    with pytest.raises(ValueError):
        call(llm)
    assert_idle(llm)
