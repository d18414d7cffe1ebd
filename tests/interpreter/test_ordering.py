"""Races between programs that atomics order, or do not."""

import pytest
import torch
import triton
import triton.language as tl

from llmlab.interpreter import Checks, Finding, run

UNORDERED = Checks(order_seed=None)


def kinds(findings: list[Finding]) -> list[str]:
    return sorted(finding.kind for finding in findings)


@triton.jit
def _add_under_lock(x, total, lock, LOCK: tl.constexpr, UNLOCK: tl.constexpr, BARRIER: tl.constexpr):
    i = tl.arange(0, 16)
    if LOCK:
        while tl.atomic_cas(lock, 0, 1) == 1:
            pass
    tl.store(total + i, tl.load(total + i) + tl.load(x + tl.program_id(0) * 16 + i))
    if BARRIER:
        tl.debug_barrier()
    if UNLOCK == "release":
        tl.atomic_xchg(lock, 0)
    elif UNLOCK == "relaxed":
        tl.atomic_xchg(lock, 0, sem="relaxed")


@pytest.mark.parametrize(
    ("lock", "unlock", "barrier", "expected"),
    [
        (True, "release", True, []),
        (False, "none", True, ["read-write-race", "write-write-race"]),
        (True, "relaxed", True, ["read-write-race", "write-write-race"]),
        # The thread that unlocks knows nothing of what the others of its program have stored.
        (True, "release", False, ["read-write-race", "write-write-race"]),
        (False, "release", True, ["read-write-race", "write-write-race"]),  # unlocking alone protects nothing
    ],
)
def test_a_lock_orders_what_stands_between(lock: bool, unlock: str, barrier: bool, expected: list[str]) -> None:
    x, total = torch.arange(64).reshape(4, 16), torch.zeros(16, dtype=torch.int64)
    checks = Checks() if lock and unlock == "release" else UNORDERED
    state = torch.zeros(1, dtype=torch.int32)
    findings = run(_add_under_lock, (4,), x, total, state, LOCK=lock, UNLOCK=unlock, BARRIER=barrier, checks=checks)
    assert kinds(findings) == expected
    assert torch.equal(total, x.sum(0))


@triton.jit
def _last_one_sums(x, parts, done, out, COUNT: tl.constexpr, SCALAR: tl.constexpr):
    """Each program leaves its part; whoever comes last adds them up."""
    p = tl.program_id(0)
    if SCALAR:
        tl.store(parts + p, tl.load(x + p))
    else:
        tl.store(parts + p + tl.zeros([2], tl.int32), tl.load(x + p) + tl.zeros([2], tl.int32))
        tl.debug_barrier()
    if tl.atomic_add(done, 1) == COUNT - 1:
        tl.store(out, tl.sum(tl.load(parts + tl.arange(0, COUNT)), 0))


@pytest.mark.parametrize("scalar", [True, False])
def test_a_counter_of_finished_programs(scalar: bool) -> None:
    x, out = torch.arange(1, 9), torch.zeros(1, dtype=torch.int64)
    findings = run(
        _last_one_sums, (8,), x, torch.zeros(8, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), out, COUNT=8,
        SCALAR=scalar, checks=Checks(),
    )  # fmt: skip
    # What the last program reads again of its own needs a barrier, whichever program that is.
    assert kinds(findings) == (["missing-barrier"] if scalar else []) and out.item() == 36


@triton.jit
def _optimistic(o, VOLATILE: tl.constexpr):
    tl.atomic_cas(o, tl.load(o, volatile=VOLATILE), 7)


def test_a_volatile_load_may_meet_atomics() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    assert run(_optimistic, (3,), out, VOLATILE=True, checks=UNORDERED) == []
    assert kinds(run(_optimistic, (3,), out, VOLATILE=False, checks=UNORDERED)) == ["atomic-race"]


@triton.jit
def _word_and_byte(o, OFFSET: tl.constexpr):
    if tl.program_id(0) == 0:
        tl.store(o, 1.0)
    else:
        tl.store(o.to(tl.pointer_type(tl.uint8), bitcast=True) + OFFSET, tl.full((), 3, tl.uint8))


def test_accesses_of_different_sizes_overlap() -> None:
    (finding,) = run(_word_and_byte, (2,), torch.zeros(2), OFFSET=2, checks=UNORDERED)
    assert finding.kind == "write-write-race" and "o[0] (1 bytes" in finding.message
    assert run(_word_and_byte, (2,), torch.zeros(2), OFFSET=4, checks=UNORDERED) == []


@triton.jit
def _last_writer(o, ticket):
    tl.store(o + tl.atomic_add(ticket, 1), tl.program_id(0))


def test_two_programs_are_run_in_both_orders() -> None:
    for seed in range(4):
        out, ticket = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        assert kinds(run(_last_writer, (2,), out, ticket, checks=Checks(order_seed=seed))) == ["order-dependence"]
        assert out.tolist() == [0, 1]


@triton.jit
def _flag(o, flag, x, ORDERED: tl.constexpr):
    p = tl.program_id(0)
    if p == 0:
        tl.store(o, tl.load(x))
        if ORDERED:
            tl.atomic_store(flag, 1)
        else:
            tl.atomic_store(flag, 1, sem="relaxed")
    elif tl.atomic_load(flag) == 1:
        tl.store(x + p, tl.load(o))


@pytest.mark.skipif(not hasattr(tl, "atomic_store"), reason="this Triton has no atomic loads and stores")
def test_a_flag_set_and_read_atomically() -> None:
    for ordered, expected in ((True, []), (False, ["read-write-race"])):
        x, flag = torch.arange(1.0, 5.0), torch.zeros(1, dtype=torch.int32)
        assert kinds(run(_flag, (4,), torch.zeros(1), flag, x, ORDERED=ordered, checks=UNORDERED)) == expected
        assert x.tolist() == [1.0] * 4
