"""Batch.build: the golden mixed batch, positions, and the rule that "decode" is never inferred from one token."""

from __future__ import annotations

from types import SimpleNamespace

from llmlab.engine.batch import Batch


def scheduled(**requests: tuple[int, int, int, list[int]]):
    """Requests as ``name=(computed, scheduled, num_tokens, table)``: what Batch.build reads of output and requests."""
    output = SimpleNamespace(
        num_scheduled_tokens={name: r[1] for name, r in requests.items()},
        num_computed_tokens={name: r[0] for name, r in requests.items()},
        block_ids={name: r[3] for name, r in requests.items()},
    )
    tokens = {
        name: SimpleNamespace(all_token_ids=list(range(100, 100 + r[2])), num_tokens=r[2], num_prompt_tokens=r[2])
        for name, r in requests.items()
    }
    return output, tokens


def test_golden_mixed_batch():
    output, requests = scheduled(
        A=(9, 1, 10, [7, 2, 5]),  # decode
        B=(8, 1, 9, [1, 3, 9]),  # decode, first token of a new block
        C=(4, 5, 12, [4, 8, 6]),  # second chunk of a prefill
        D=(4, 3, 7, [4, 10]),  # new, one hit block shared with C
    )
    batch = Batch.build(output, requests, block_size=4)
    assert batch.query_start_loc.tolist() == [0, 1, 2, 7, 10]
    assert batch.seq_lens.tolist() == [10, 9, 9, 7]
    assert batch.positions.tolist() == [9, 8, 4, 5, 6, 7, 8, 4, 5, 6]
    assert batch.slot_mapping.tolist() == [21, 36, 32, 33, 34, 35, 24, 40, 41, 42]
    assert batch.logits_indices.tolist() == [0, 1, 6, 9]
    assert batch.discard == (False, False, True, False)
    assert batch.input_ids.tolist() == [109, 108, 104, 105, 106, 107, 108, 104, 105, 106]
    assert batch.block_table.tolist() == [[7, 2, 5], [1, 3, 9], [4, 8, 6], [4, 10, 0]]


def test_known_slot():
    output, requests = scheduled(r=(25, 1, 26, [5, 8, 12]))
    assert Batch.build(output, requests, block_size=16).slot_mapping.tolist() == [137]


def test_last_chunk_of_one_token_is_kept():
    output, requests = scheduled(r=(8, 1, 9, [0, 1, 2]))
    batch = Batch.build(output, requests, block_size=4)
    assert batch.discard == (False,)
    assert batch.positions.tolist() == [8]


def test_empty_batch():
    output, requests = scheduled()
    batch = Batch.build(output, requests, block_size=4)
    assert batch.num_reqs == batch.num_sched_tokens == 0
    assert batch.query_start_loc.tolist() == [0]


def test_rope_lengths_follow_prompt_and_position():
    output, requests = scheduled(chunk=(2, 2, 6, [0, 1]), decode=(6, 1, 7, [2, 3]))
    requests["decode"].num_prompt_tokens = 3
    batch = Batch.build(output, requests, block_size=4, length_dependent_rope=True)
    assert batch.rope_lengths.tolist() == [6, 6, 7]
