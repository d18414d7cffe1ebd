"""Each check on the smallest kernel that has the defect, and on its healthy twin."""

import pytest
import torch
import triton
import triton.language as tl

from llmlab.interpreter import KINDS, Checks, Finding, KernelError, KernelFindings, checked, run

ALL = Checks()


def kinds(findings: list[Finding]) -> list[str]:
    assert all(finding.kind in KINDS for finding in findings)
    return sorted({finding.kind for finding in findings})


@triton.jit
def _copy(x, o, n, B: tl.constexpr, MASK_LOAD: tl.constexpr, MASK_STORE: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    a = tl.load(x + i, mask=m, other=0.0) if MASK_LOAD else tl.load(x + i)
    if MASK_STORE:
        tl.store(o + i, a, mask=m)
    else:
        tl.store(o + i, a)


def test_out_of_bounds_by_view_with_line_program_and_place() -> None:
    x, out = torch.randn(40), torch.zeros(40)
    assert run(_copy, (3,), x, out, 40, B=16, MASK_LOAD=True, MASK_STORE=True, checks=ALL) == []
    assert torch.equal(x, out)
    (finding,) = run(_copy, (3,), x, out, 40, B=16, MASK_LOAD=False, MASK_STORE=True, checks=ALL)
    assert (finding.kind, finding.kernel, finding.program) == ("out-of-bounds-load", "_copy", (2, 0, 0))
    assert finding.file == __file__ and finding.line == _copy.starting_line_number + 4
    assert "8 of 16 lanes leave 'x'" in finding.message and "40 elements from its start" in finding.message
    assert "test_checks.py" in str(finding)
    (finding,) = run(_copy, (3,), x, out, 40, B=16, MASK_LOAD=True, MASK_STORE=False, checks=ALL)
    assert finding.kind == "out-of-bounds-store"


def test_a_neighbour_in_the_same_storage_is_out_of_bounds() -> None:
    qkv = torch.randn(10, 48)
    q, k = qkv[:, :16], qkv[:, 16:32]  # reading on past q lands in k: inside the storage, and wrong
    out = torch.zeros(16)
    assert kinds(run(_copy, (1,), q[0], out, 16, B=16, MASK_LOAD=True, MASK_STORE=True, checks=ALL)) == []
    assert kinds(run(_copy, (1,), q[0], torch.zeros(32), 17, B=32, MASK_LOAD=True, MASK_STORE=True, checks=ALL)) == [
        "out-of-bounds-load"
    ]
    column = qkv.T[3]  # stride 48
    assert kinds(run(_copy, (1,), column, out, 2, B=2, MASK_LOAD=True, MASK_STORE=True, checks=ALL)) == [
        "out-of-bounds-load"
    ]
    assert k.is_contiguous() is False


def test_huge_storages_cost_nothing() -> None:
    huge = torch.empty(2**33, dtype=torch.uint8)[2**32 :: 2**30]  # virtual: never touched but for a few pages
    out = torch.zeros(2)
    half = huge.view(torch.uint8)
    (finding,) = run(_copy, (1,), half, out, 2, B=2, MASK_LOAD=True, MASK_STORE=True, checks=ALL)
    assert finding.kind == "out-of-bounds-load"


@triton.jit
def _negative(x, o):
    tl.store(o, tl.load(x - 1))


def test_before_the_start() -> None:
    storage, out = torch.randn(8), torch.zeros(1)
    assert kinds(run(_negative, (1,), storage[4:], out, checks=ALL)) == ["out-of-bounds-load"]
    run(_negative, (1,), storage[4:], out)  # unchecked it reads its storage, as a GPU would
    assert out[0] == storage[3]
    with pytest.raises(KernelError, match="leaves its storage"):  # but never leaves it
        run(_negative, (1,), storage, out)


@triton.jit
def _chosen(q, k, o, n, shift, N: tl.constexpr):
    i = tl.arange(0, 2 * N)
    base = tl.where(i < N, q, k)  # one pointer block into two tensors
    out = tl.where(i % 2 == 0, o, o + 2 * N)
    tl.store(out + i // 2, tl.load(base + i % N + shift, mask=i % N < n, other=-1.0))


def test_pointers_into_several_tensors_are_told_apart() -> None:
    qk, out = torch.randn(2, 40), torch.zeros(48)
    q, k = qk[0, :8], qk[1, :8]
    findings = run(_chosen, (1,), q, k, out, 6, 0, N=8, checks=ALL)
    assert findings == []
    both = torch.cat([q[:6], torch.full((2,), -1.0), k[:6], torch.full((2,), -1.0)])
    assert torch.equal(out[:8], both[::2]) and torch.equal(out[16:24], both[1::2])
    unchecked = torch.zeros(48)
    run(_chosen, (1,), q, k, unchecked, 6, 0, N=8)
    assert torch.equal(unchecked, out)
    (finding,) = run(_chosen, (1,), q, k, out, 6, 4, N=8, checks=ALL)
    assert finding.kind == "out-of-bounds-load"


@triton.jit
def _descriptor(x, o, rows, B: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, 16], [16, 1], [B, 16])
    target = tl.make_tensor_descriptor(o, [rows, 16], [16, 1], [B, 16])
    target.store([0, 0], source.load([0, 0]))


def test_a_descriptor_that_declares_too_much() -> None:
    x, out = torch.randn(6, 16), torch.zeros(8, 16)
    assert (
        run(_descriptor, (1,), x, out, 6, B=8, checks=ALL) == []
    )  # past its own bounds it reads zeros and stores nothing
    assert torch.equal(out[:6], x) and not out[6:].any()
    assert kinds(run(_descriptor, (1,), x, out, 7, B=8, checks=ALL)) == ["out-of-bounds-load"]
    assert kinds(run(_descriptor, (1,), x, out[:6], 8, B=8, checks=ALL)) == [
        "out-of-bounds-load",
        "out-of-bounds-store",
    ]
    with pytest.raises(KernelError, match="16-byte"):
        run(_descriptor, (1,), x.flatten()[1:81], out, 5, B=8)


@triton.jit
def _no_other(x, index, o, n, N: tl.constexpr, OTHER: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i, mask=i < n, other=0.0) if OTHER else tl.load(x + i, mask=i < n)
    at = tl.load(index + i, mask=i < n, other=0) if OTHER else tl.load(index + i, mask=i < n)
    tl.store(o + at, tl.sum(a, 0) + i * 0, mask=i < 1)


def test_masked_lanes_without_other_are_poison() -> None:
    x, index, out = torch.ones(3), torch.zeros(3, dtype=torch.int32), torch.zeros(1)
    run(_no_other, (1,), x, index, out, 3, N=4, OTHER=True, checks=ALL)
    assert out.item() == 3
    run(_no_other, (1,), x, index, out, 3, N=4, OTHER=False, checks=ALL)
    assert out.isnan().all()
    run(_no_other, (1,), x, index, out, 3, N=4, OTHER=False, checks=Checks(poison=False))
    assert out.item() == 3


@triton.jit
def _integer(x, o, by, OP: tl.constexpr):
    a = tl.load(x + tl.arange(0, 2))
    if OP == "mul":
        tl.store(o + tl.arange(0, 2), (a * by).to(tl.int64))
    elif OP == "wide":
        tl.store(o + tl.arange(0, 2), a.to(tl.int64) * by)
    elif OP == "sum":
        tl.store(o, tl.sum(a, 0).to(tl.int64))
    elif OP == "narrow":
        tl.store(o + tl.arange(0, 2), (a.to(tl.int64) * by).to(tl.int32).to(tl.int64))
    elif OP == "unsigned":
        tl.store(o + tl.arange(0, 2), (a.to(tl.uint32) * 0xFFFFFFF).to(tl.int64))
    else:
        tl.store(o + tl.arange(0, 2), (a // (a - a)).to(tl.int64))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("mul", ["int-overflow"]),
        ("wide", []),
        ("sum", ["int-overflow"]),
        ("narrow", ["int-overflow"]),
        ("unsigned", []),  # wraps around by definition
        ("div", ["int-division-by-zero"]),
    ],
)
def test_integers_stay_in_range(op: str, expected: list[str]) -> None:
    x = torch.tensor([2**30, 2**30], dtype=torch.int32)
    assert kinds(run(_integer, (1,), x, torch.zeros(2, dtype=torch.int64), 3, OP=op, checks=ALL)) == expected
    small = torch.tensor([3, 4], dtype=torch.int32)
    if op != "div":
        assert run(_integer, (1,), small, torch.zeros(2, dtype=torch.int64), 3, OP=op, checks=ALL) == []


@triton.jit
def _half(x, o, CAST: tl.constexpr):
    a = tl.load(x)
    if CAST:
        tl.store(o, a.to(tl.float16).to(tl.float32))
    else:
        h = a.to(tl.float16)
        tl.store(o, (h * h).to(tl.float32))


def test_float16_overflow() -> None:
    out = torch.zeros(1)
    assert kinds(run(_half, (1,), torch.tensor([70000.0]), out, CAST=True, checks=ALL)) == ["fp16-overflow"]
    assert kinds(run(_half, (1,), torch.tensor([300.0]), out, CAST=False, checks=ALL)) == ["fp16-overflow"]
    assert run(_half, (1,), torch.tensor([float("inf")]), out, CAST=False, checks=ALL) == []  # infinite from the start
    assert run(_half, (1,), torch.tensor([30.0]), out, CAST=False, checks=ALL) == []


@triton.jit
def _everyone(x, o, KIND: tl.constexpr):
    p = tl.program_id(0)
    if KIND == "store":
        tl.store(o + p // 2, p)
    elif KIND == "read":
        tl.store(o + p, tl.load(o + (p + 1) % tl.num_programs(0)) + 1)
    elif KIND == "atomic":
        tl.atomic_add(o, p)
    elif KIND == "mixed":
        if p == 0:
            tl.store(o, 7)
        else:
            tl.atomic_add(o, p)
    else:
        tl.store(o + p, tl.load(x) + p)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("store", ["order-dependence", "write-write-race"]),
        ("read", ["order-dependence", "read-write-race"]),
        ("atomic", []),  # integers: any order gives the same
        ("mixed", ["atomic-race", "order-dependence"]),
        ("own", []),
    ],
)
def test_races_between_programs(kind: str, expected: list[str]) -> None:
    x, out = torch.ones(1, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    findings = run(_everyone, (8,), x, out, KIND=kind, checks=ALL)
    assert kinds(findings) == expected
    again = torch.zeros(8, dtype=torch.int32)
    run(_everyone, (8,), x, again, KIND=kind)
    assert torch.equal(out, again), "what stays in memory is the grid order's result"


@triton.jit
def _float_atomic(x, o):
    tl.atomic_add(o, tl.load(x + tl.program_id(0)))


def test_float_atomics_depend_on_the_order() -> None:
    x = torch.tensor([1e8, 1.0, -1e8, 1.0])
    found = {
        kind
        for seed in range(4)
        for kind in kinds(run(_float_atomic, (4,), x, torch.zeros(1), checks=Checks(order_seed=seed)))
    }
    assert found == {"order-dependence"}
    assert run(_float_atomic, (4,), x, torch.zeros(1), checks=Checks(order_seed=None)) == []


@triton.jit
def _within(o, KIND: tl.constexpr):
    i = tl.arange(0, 16)
    if KIND == "store-load" or KIND == "store-barrier-load":
        tl.store(o + i, i * 1.0)
        if KIND == "store-barrier-load":
            tl.debug_barrier()
        tl.store(o + 16 + i, tl.load(o + 15 - i))
    elif KIND == "shift":
        tl.store(o + i + 1, tl.load(o + i))
    elif KIND == "in-place":
        tl.store(o + i, tl.load(o + i) * 2)
    elif KIND == "reduce-between":
        total = tl.sum(tl.load(o + i), 0)
        tl.store(o + 15 - i, total + i * 0)
    elif KIND == "twice":
        tl.store(o + i, i * 1.0)
        tl.store(o + 15 - i, i * 2.0)
    elif KIND == "same-lane-twice":
        tl.store(o + i, i * 1.0)
        tl.store(o + i, i * 2.0)
    elif KIND == "duplicate":
        tl.store(o + i // 2, i * 1.0)
    else:
        tl.store(o + i // 2, (i // 2) * 1.0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("store-load", ["missing-barrier"]),
        ("store-barrier-load", []),
        ("shift", ["missing-barrier"]),
        ("in-place", []),
        ("reduce-between", []),
        ("twice", ["missing-barrier"]),
        ("same-lane-twice", []),
        ("duplicate", ["duplicate-store"]),
        ("same-values", []),
    ],
)
def test_order_within_a_program(kind: str, expected: list[str]) -> None:
    assert kinds(run(_within, (1,), torch.zeros(64), KIND=kind, checks=ALL)) == expected
    assert run(_within, (1,), torch.zeros(64), KIND=kind, checks=Checks(barriers=False)) == []


@triton.jit
def _hints(x, o, start, N: tl.constexpr, KIND: tl.constexpr, LENGTH: tl.constexpr):
    i = tl.arange(0, N)
    if KIND == "multiple":
        i = tl.multiple_of(start + i, 8) - start
    elif KIND == "contiguous":
        i = tl.max_contiguous(i % start, N)
    else:
        i = tl.max_constancy(i // 2 * 2, LENGTH) + i % 2
    tl.store(o + i, tl.load(x + i))


@pytest.mark.parametrize("kind", ["multiple", "contiguous", "constancy"])
def test_hints_are_true(kind: str) -> None:
    x, out = torch.randn(16), torch.zeros(16)
    good, bad = {"multiple": (16, 12), "contiguous": (16, 12), "constancy": (2, 4)}[kind]
    assert run(_hints, (1,), x, out, good, N=16, KIND=kind, LENGTH=good, checks=Checks(barriers=False)) == []
    findings = run(_hints, (1,), x, out, bad, N=16, KIND=kind, LENGTH=bad, checks=Checks(barriers=False))
    assert kinds(findings) == ["wrong-hint"]


@triton.jit
def _asserts(o, n):
    tl.assume(n > 3)
    tl.device_assert(n < 9, "n is small")
    tl.store(o, n)


def test_asserts_hold_or_raise() -> None:
    out = torch.zeros(1)
    run(_asserts, (1,), out, 5)
    with pytest.raises(KernelError, match="tl.assume"):
        run(_asserts, (1,), out, 2)
    with pytest.raises(KernelError, match="n is small"):
        run(_asserts, (1,), out, 12)


def test_checked_blocks_collect_nest_and_raise() -> None:
    x, out = torch.randn(40), torch.zeros(40)
    bad = {"B": 16, "MASK_LOAD": False, "MASK_STORE": True}
    with checked() as outer:
        run(_copy, (3,), x, out, 40, **bad)
        with checked(Checks(bounds=False)) as inner:
            run(_copy, (1,), x[:16], out, 10, **bad)
        assert run(_copy, (1,), x, out, 16, **bad) == []
    assert kinds(outer) == ["out-of-bounds-load"] and inner == []
    with pytest.raises(KernelFindings, match="out-of-bounds-load") as caught, checked(raise_on_findings=True):
        run(_copy, (3,), x, out, 40, **bad)
    assert len(caught.value.findings) == 1
    with pytest.raises(
        KernelError
    ):  # nothing is on outside: the address leaves the storage, and that is all that is seen
        run(_copy, (3,), x, out, 40, **bad)


def test_findings_are_counted_by_line() -> None:
    x, out = torch.randn(16), torch.zeros(64)
    (finding,) = run(_copy, (4,), x, out, 64, B=16, MASK_LOAD=True, MASK_STORE=True, checks=ALL)
    assert finding.count == 3
    assert "(3 times)" in str(finding)


def test_bad_checks_are_refused() -> None:
    with pytest.raises(ValueError, match="max_trips"):
        Checks(max_trips=0)


@triton.jit
def _store_then_fail(o, n):
    tl.store(o + 100, 1.0)
    tl.device_assert(n < 3, "too many")


def test_what_was_found_before_a_failure_is_kept() -> None:
    with checked() as findings, pytest.raises(KernelError, match="too many") as caught:
        run(_store_then_fail, (1,), torch.zeros(1), 5)
    assert kinds(findings) == kinds(list(caught.value.findings)) == ["out-of-bounds-store"]
    assert "found before: out-of-bounds-store" in caught.value.__notes__[0]


@triton.jit
def _scan(x, o, N: tl.constexpr, REVERSE: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.cumsum(tl.load(x + i), 0, reverse=REVERSE))


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_stays_in_range(reverse: bool) -> None:
    out = torch.zeros(4, dtype=torch.int32)
    for value, expected in ((2**29 - 1, []), (2**30, ["int-overflow"])):
        x = torch.full((4,), value, dtype=torch.int32)
        assert kinds(run(_scan, (1,), x, out, N=4, REVERSE=reverse, checks=ALL)) == expected


@triton.jit
def _indirect(index, x, o, n, stride, OTHER: tl.constexpr):
    i = tl.arange(0, 4)
    if OTHER:
        block = tl.load(index + i, mask=i < n, other=0)
    else:
        block = tl.load(index + i, mask=i < n)
    tl.store(o + i, tl.load(x + (block * 16 + 3) * stride, mask=i < n, other=0.0), mask=i < n)


def test_an_overflow_of_poison_says_so() -> None:
    index, x, out = torch.arange(3, dtype=torch.int32), torch.randn(3000), torch.zeros(3)
    (finding,) = run(_indirect, (1,), index, x, out, 3, 64, OTHER=False, checks=ALL)
    assert finding.kind == "int-overflow" and "masked lane" in finding.message
    assert run(_indirect, (1,), index, x, out, 3, 64, OTHER=True, checks=ALL) == []


@triton.jit
def _through_addresses(addresses, x, o):
    pointer = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    tl.store(o + tl.program_id(0), tl.load(pointer))


def test_addresses_in_memory_are_followed_into_arguments() -> None:
    x, out = torch.randn(4), torch.zeros(2)
    addresses = torch.tensor([x.data_ptr(), x.data_ptr() + 8])
    assert run(_through_addresses, (2,), addresses, x, out, checks=ALL) == []
    assert torch.equal(out, x[::2])
    (finding,) = run(_through_addresses, (1,), addresses, out, out, checks=ALL)
    assert finding.kind == "out-of-bounds-load" and "hand it those tensors" in finding.message
