"""The registry and the ledger: faces, dispatch, recording, and contracts that are really held."""

from __future__ import annotations

import pytest
import torch

from llmlab import ops


def test_every_op_names_its_shapes():
    from llmlab.ops.ledger import _array_hint, _hints

    for op in ops.ALL.values():
        hints = _hints(op.reference)
        tensors = [name for name in op.signature.parameters if _array_hint(hints[name]) is not None]
        assert tensors, op.name
        assert op.__doc__, op.name


def test_unknown_backend_and_unknown_op():
    with pytest.raises(ValueError, match="backend must be one of torch, triton, reference, got 'jax'"):
        ops.bind("jax", "cpu")
    with pytest.raises(AttributeError, match="no op is called 'softmaxx'"):
        _ = ops.bind("reference", "cpu").softmaxx


def test_call_dispatches_to_the_reference_on_a_cpu():
    x, weight = torch.randn(3, 8), torch.rand(8)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), ops.rms_norm.reference(x, weight, 1e-5))


def test_costs_need_shapes_only():
    x, w = (
        torch.empty(5, 4096, device="meta", dtype=torch.bfloat16),
        torch.empty(1024, 4096, device="meta", dtype=torch.bfloat16),
    )
    cost = ops.linear.cost(x, w)
    assert cost == (2 * 5 * 4096 * 1024, 2 * (4096 * 1024 + 5 * (4096 + 1024)))
    assert cost.intensity == cost.flops / cost.bytes
    assert cost + cost == (2 * cost.flops, 2 * cost.bytes)


def test_ledger_records_in_order_with_symbols_and_sizes():
    bound = ops.bind("reference", "cpu")
    x = torch.randn(3, 8)
    with ops.record_ops() as ledger:
        bound.silu_and_mul(x)
        bound.gather_last_tokens(x, torch.tensor([0, 2, 3]))
    bound.silu_and_mul(x)  # outside: not recorded
    table = ledger.table()
    assert table["op"].tolist() == ["silu_and_mul"] * 2 + ["gather_last_tokens"] * 3
    assert table["symbolic"].tolist()[:2] == [
        "[num_sched_tokens, 2*intermediate_size]",
        "[num_sched_tokens, intermediate_size]",
    ]
    assert table["shape"].tolist() == [(3, 8), (3, 4), (3, 8), (3,), (2, 8)]
    assert table["bytes"].tolist() == [96, 48, 96, 24, 64]
    assert len(ledger.costs()) == 2


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        (
            "rms_norm",
            (torch.ones(3, 8), torch.ones(7), 1e-5),
            r"rms_norm: weight\[hidden_size\] has shape \(7,\): hidden_size is 7",
        ),
        ("linear", (torch.ones(3, 8, 1), torch.ones(4, 8)), "3 dimensions instead of 2"),
        ("embedding", (torch.ones(3), torch.ones(4, 8)), r"token_ids.* has dtype float32"),
        ("silu_and_mul", (torch.ones(2, 5),), "5 is not a multiple of 2"),
    ],
)
def test_a_breach_of_contract_is_named(name, args, message):
    op = ops.ALL[name]
    with ops.record_ops() as ledger, pytest.raises(ValueError, match=message):
        ledger.run(op, lambda *a: torch.zeros(2, 2), args, {})


def test_recording_ends_with_the_block_even_after_an_error():
    with pytest.raises(RuntimeError), ops.record_ops() as ledger:
        raise RuntimeError
    ops.silu_and_mul(torch.ones(1, 2))
    assert not ledger.records
