"""What the engine does to be fast must not show: token for token, in float32, on a random model.

Every variant is held to the same reference: each request alone in an engine of its own, its prompt in one piece, with no
prefix cache and no lack of memory.
"""

from __future__ import annotations

import gc
import random

import pytest

from llmlab import LLM, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:.*has no tokenizer")

SHARED = list(range(10, 23))
PROMPTS = [
    SHARED + [30],
    SHARED + [31, 32, 33, 34],
    [5, 6, 7],
    [3],
    [9] * 17,
    SHARED,
    SHARED[:8] + [60] * 9,
    [2, 4] * 11,
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=14, presence_penalty=0.5, frequency_penalty=0.4, min_tokens=9),
    SamplingParams(temperature=0.9, seed=7, max_tokens=14, repetition_penalty=1.3),
    SamplingParams(temperature=1.3, seed=8, top_p=0.9, top_k=20, max_tokens=16, presence_penalty=0.8, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=9, min_p=0.05, max_tokens=9, min_tokens=9, stop_token_ids=[1, 2, 3, 4, 5]),
    SamplingParams(temperature=0, max_tokens=14, bad_words=None, logit_bias={8: 2.0}, repetition_penalty=1.7),
    SamplingParams(temperature=0.7, seed=10, max_tokens=20, frequency_penalty=1.0, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=12, allowed_token_ids=[5, 17, 33, 61, 80], presence_penalty=1.1),
]


@pytest.fixture(scope="module")
def folder(random_hf_model):
    return random_hf_model(seed=11, eos_token_id=1)[1]


def make(folder, **kwargs) -> LLM:
    defaults = {"dtype": "float32", "device": "cpu", "block_size": 4, "num_kv_blocks": 128}
    return LLM(folder, **{**defaults, **kwargs})


def answers(llm: LLM, prompts=PROMPTS, params=PARAMS) -> list[tuple[list[int], str | None, int | str | None]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert_idle(llm)
    return [(o.outputs[0].token_ids, o.outputs[0].finish_reason, o.outputs[0].stop_reason) for o in outputs]


def assert_idle(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    manager = scheduler.kv_cache_manager
    assert not llm.engine.has_unfinished_requests() and not scheduler.has_unfinished_requests()
    assert manager.block_pool.num_free == manager.block_pool.num_blocks
    assert len(manager.free_host_blocks) == manager.num_host_blocks
    manager.block_pool.check()


def totals(llm: LLM):
    return llm.engine.scheduler.stats.totals


@pytest.fixture(scope="module")
def reference(folder) -> list[tuple[list[int], str | None, int | str | None]]:
    llm = make(folder, enable_prefix_caching=False)
    return [answers(llm, [prompt], [params])[0] for prompt, params in zip(PROMPTS, PARAMS)]


def test_the_reference_is_worth_comparing_with(reference):
    tokens = [t for t, _, _ in reference]
    assert len({tuple(t) for t in tokens}) == len(tokens) and sum(map(len, tokens)) > 60
    assert all(len(set(t)) > 2 for t in tokens)


def test_alone_is_in_a_crowd(folder, reference):
    assert answers(make(folder, enable_prefix_caching=False)) == reference


def test_order_and_company_do_not_matter(folder, reference):
    llm = make(folder)
    for seed in range(4):
        order = random.Random(seed).sample(range(len(PROMPTS)), len(PROMPTS) - seed)
        assert answers(llm, [PROMPTS[i] for i in order], [PARAMS[i] for i in order]) == [reference[i] for i in order]


def test_cached_is_cold(folder, reference):
    llm = make(folder)
    cold = answers(llm)
    hits = totals(llm).prefix_cache_hits
    assert cold == reference and answers(llm) == reference
    assert totals(llm).prefix_cache_hits > hits + 4 * len(PROMPTS)


def test_a_whole_prompt_in_the_cache_changes_nothing(folder, reference):
    llm = make(folder)
    prompt, params = SHARED[:8], PARAMS[3]
    first, second = answers(llm, [prompt], [params]), answers(llm, [prompt], [params])
    assert first == second and totals(llm).prefix_cache_hits == 4


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 13, 21, 64])
@pytest.mark.parametrize("caching", [True, False])
def test_chunked_is_whole(folder, reference, budget, caching):
    llm = make(folder, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    assert answers(llm) == reference
    assert all(r.num_scheduled_tokens <= budget for r in llm.engine.scheduler.stats.records)


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_any_block_size(folder, reference, block_size):
    assert answers(make(folder, block_size=block_size, max_num_batched_tokens=24)) == reference


@pytest.mark.parametrize(
    "kwargs",
    [
        {"enable_chunked_prefill": False},
        {"long_prefill_token_threshold": 3},
        {"max_num_seqs": 1},
        {"max_num_seqs": 3, "max_num_batched_tokens": 6},
        {"scheduling_policy": "priority", "max_num_batched_tokens": 6},
        {"reserve_full_prompt": True, "num_kv_blocks": 16, "max_num_batched_tokens": 6},
    ],
    ids=repr,
)
def test_other_ways_to_schedule(folder, reference, kwargs):
    assert answers(make(folder, **kwargs)) == reference


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [7, 64])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_is_undisturbed(folder, reference, mode, budget, caching, policy):
    llm = make(
        folder,
        num_kv_blocks=14,
        max_num_batched_tokens=budget,
        preemption_mode=mode,
        enable_prefix_caching=caching,
        scheduling_policy=policy,
    )
    priorities = [3, 0, 2, 1, 3, 0, 2, 1]
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False, priority=priorities)
    assert [
        (o.outputs[0].token_ids, o.outputs[0].finish_reason, o.outputs[0].stop_reason) for o in outputs
    ] == reference
    assert totals(llm).num_preemptions >= 3
    assert (totals(llm).num_swapped_blocks > 0) == (mode == "swap")
    assert sum(o.metrics.num_preemptions for o in outputs) == totals(llm).num_preemptions
    if mode == "recompute" and not caching:
        assert totals(llm).num_recomputed_tokens > 0
    assert_idle(llm)


def test_a_small_host_mixes_swap_and_recompute(folder, reference):
    llm = make(folder, num_kv_blocks=14, preemption_mode="swap", num_host_blocks=4, enable_prefix_caching=False)
    assert answers(llm) == reference
    assert totals(llm).num_swapped_blocks > 0 and totals(llm).num_recomputed_tokens > 0


@pytest.mark.parametrize("kwargs", [{}, {"max_num_batched_tokens": 5}, {"num_kv_blocks": 13}], ids=repr)
def test_logprobs_and_prompt_logprobs_survive(folder, kwargs):
    """Every position once, in order, whatever was cached, chunked or preempted."""
    params = [SamplingParams(temperature=0, max_tokens=14, logprobs=2, prompt_logprobs=1, ignore_eos=True)] * len(
        PROMPTS
    )

    def values(llm: LLM, prompts) -> list[list[tuple[int, float]]]:
        found = []
        for output in llm.generate(prompts, params[: len(prompts)], use_tqdm=False):
            assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
            given = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])
            sampled = zip(output.outputs[0].token_ids, output.outputs[0].logprobs)
            found.append([(token, entry[token].logprob) for token, entry in [*given, *sampled]])
        return found

    alone = make(folder, enable_prefix_caching=False)
    expected = [values(alone, [prompt])[0] for prompt in PROMPTS]
    llm = make(folder, **kwargs)
    for _ in range(2):
        for got, want in zip(values(llm, PROMPTS), expected, strict=True):
            assert [token for token, _ in got] == [token for token, _ in want]
            assert [value for _, value in got] == pytest.approx([value for _, value in want], abs=2e-4)
    assert ("num_kv_blocks" in kwargs) == (totals(llm).num_preemptions > 0)


def test_n_outputs_share_the_blocks_of_their_prompt(folder):
    llm = make(folder)
    prompt = list(range(20, 53))  # eight full blocks and one token
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    llm.engine.add_request("a", prompt, params)
    llm.engine.step()
    tables = [request.block_ids for request in llm.engine.scheduler.running]
    assert len(tables) == 4 and len({tuple(table[:8]) for table in tables}) == 1
    assert len({block for table in tables for block in table}) == 8 + 4
    assert totals(llm).num_scheduled_tokens == 33 + 3
    while llm.engine.has_unfinished_requests():
        (output,) = llm.engine.step()
    assert len({tuple(o.token_ids) for o in output.outputs}) == 4
    crowded = make(folder, num_kv_blocks=12, max_num_batched_tokens=9)
    (again,) = crowded.generate([prompt], params, use_tqdm=False)
    assert [o.token_ids for o in again.outputs] == [o.token_ids for o in output.outputs]


def test_a_cache_that_was_reset_is_cold(folder, reference):
    llm = make(folder)
    answers(llm)
    assert llm.reset_prefix_cache()
    before = totals(llm).prefix_cache_hits
    assert answers(llm, PROMPTS[:1], PARAMS[:1]) == reference[:1]
    assert totals(llm).prefix_cache_hits == before


@pytest.mark.parametrize("kwargs", [{}, {"preemption_mode": "swap"}, {"max_num_batched_tokens": 5}], ids=repr)
def test_unwritten_slots_may_hold_nan(folder, reference, kwargs):
    llm = make(folder, num_kv_blocks=14, **kwargs)
    runner = llm.engine.runner
    for cache in (runner.kv_cache, runner.host_cache):
        if cache is not None:
            cache.fill_(float("nan"))
    assert answers(llm) == reference


def test_aborting_one_request_ends_all_its_outputs(folder, reference):
    llm = make(folder, num_kv_blocks=20, max_num_batched_tokens=9)
    several = SamplingParams(n=5, temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
    for num_steps in range(8):  # from before the first step to the middle of the output
        llm.engine.add_request("several", PROMPTS[1], several)
        llm.engine.add_request("other", PROMPTS[0], PARAMS[0])
        for _ in range(num_steps):
            llm.engine.step()
        llm.engine.abort_request("several")
        outputs = {}
        while llm.engine.has_unfinished_requests():
            outputs |= {o.request_id: o for o in llm.engine.step()}
        assert [o.finish_reason for o in outputs["several"].outputs] == ["abort"] * 5
        assert outputs["other"].outputs[0].token_ids == reference[0][0]
        assert_idle(llm)


@pytest.mark.slow
def test_two_thousand_requests_with_aborts_through_a_pool_for_eight(folder, reference):
    """No leak, no stall, no wrong token, and no memory that grows."""
    llm = make(folder, num_kv_blocks=8 * 5, max_num_batched_tokens=48, preemption_mode="swap", num_host_blocks=16)
    engine, random_ = llm.engine, random.Random(4)
    kinds: dict[str, int] = {}
    finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0}
    added, steps, objects = 0, 0, []
    while added < 2_000 or engine.has_unfinished_requests():
        while added < 2_000 and engine.get_num_unfinished_requests() < 24:
            kinds[str(added)] = random_.randrange(len(PROMPTS))
            engine.add_request(str(added), PROMPTS[kinds[str(added)]], PARAMS[kinds[str(added)]])
            added += 1
        if random_.random() < 0.1:
            engine.abort_request(random_.choice(sorted(kinds)))
        before = totals(llm).num_scheduled_tokens
        outputs = engine.step()
        assert totals(llm).num_scheduled_tokens > before or outputs, "a step that did nothing"
        for output in outputs:
            if not output.finished:
                continue
            tokens, reason, stop = reference[kinds.pop(output.request_id)]
            (completion,) = output.outputs
            finished[completion.finish_reason] += 1
            if completion.finish_reason == "abort":
                assert completion.token_ids == tokens[: len(completion.token_ids)]
            else:
                assert (completion.token_ids, completion.finish_reason, completion.stop_reason) == (
                    tokens,
                    reason,
                    stop,
                )
        steps += 1
        if added in (800, 2_000) and len(objects) < (1 if added == 800 else 2):
            engine.scheduler.stats.records.clear()
            gc.collect()
            objects.append(len(gc.get_objects()))
    assert_idle(llm)
    assert not kinds and sum(finished.values()) == 2_000 and finished["abort"] > 50
    assert totals(llm).num_preemptions > 20 and totals(llm).prefix_cache_hits > 1_000
    assert totals(llm).num_swapped_blocks > 0 and totals(llm).num_recomputed_tokens > 0
    assert objects[1] < objects[0] + 2_000
