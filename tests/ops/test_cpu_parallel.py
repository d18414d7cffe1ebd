"""How CPU kernels are run: all work done once, statuses handed back, steps recorded and played, memory that stays."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.ops.cpu import memory, parallel, simd
from llmlab.ops.cpu.graph import Graph, NotRecordable
from llmlab.ops.cpu.parallel import arg, kernel, piece, report, take


@kernel("qqq")
def count_up():
    """Adds 1 to each of so many int64; the negative ones are reported."""

    def body(p: int) -> None:
        x, count, step = arg(p, 0), arg(p, 1), arg(p, 2)
        while True:
            first = take(p, step)
            if first >= count:
                break
            for i in range(first, min(first + step, count)):
                value = simd.load_int64(x + 8 * i)
                if value < 0:
                    report(p, i + 1)
                simd.store_int64(x + 8 * i, value + 1)

    return body


@kernel("qqq")
def double():
    def body(p: int) -> None:
        source, target, count = arg(p, 0), arg(p, 1), arg(p, 2)
        for i in range(count):
            simd.store_int64(target + 8 * i, 2 * simd.load_int64(source + 8 * i))

    return body


def doubled(x: torch.Tensor, in_parallel: bool = False) -> torch.Tensor:
    out = memory.empty(x.shape, x.dtype)
    (double().parallel if in_parallel else double().serial)(x.data_ptr(), out.data_ptr(), x.numel())
    return out


@given(count=st.integers(0, 3000), threads=st.integers(1, 70))
@settings(max_examples=200, deadline=None)
def test_pieces_are_all_the_work_once(count, threads):
    covered, index = 0, 0
    while True:
        first, last = piece.py_func(index, count, threads)
        if first >= last:
            break
        assert first == covered
        covered, index = last, index + 1
    assert covered == count
    assert all(piece.py_func(i, count, threads)[0] >= count for i in range(index, index + threads))


@pytest.mark.parametrize("how", ["serial", "parallel", "numba"])
def test_every_unit_is_done_once_and_the_status_comes_back(how, monkeypatch):
    one = count_up()
    if how == "numba":  # where there is no pool
        monkeypatch.setattr(parallel, "pool", lambda: None)
    run = one.serial if how == "serial" else one.parallel
    x = torch.zeros(10_001, dtype=torch.int64)
    for _ in range(20):
        assert run(x.data_ptr(), len(x), 7) == 0
    assert torch.equal(x, torch.full_like(x, 20))
    x[1234] = -5
    assert run(x.data_ptr(), len(x), 7) == 1235


@pytest.fixture
def many_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    yield
    torch.set_num_threads(before)


def count_to(total: int, launches: int, pause: float = 0.0) -> torch.Tensor:
    x = torch.zeros(total, dtype=torch.int64)
    for _ in range(launches):
        count_up().parallel(x.data_ptr(), total, 3)
        if pause:
            time.sleep(pause)
    return x


def test_threads_that_come_late_or_have_fallen_asleep(many_threads):
    """More threads than cores: a launch goes on without those that have not come, and wakes those that sleep."""
    assert torch.equal(count_to(50, 3000), torch.full((50,), 3000))
    assert torch.equal(count_to(50, 40, pause=0.003), torch.full((50,), 40))
    torch.set_num_threads(2)
    assert torch.equal(count_to(50, 300), torch.full((50,), 300))


def test_launches_from_several_python_threads(many_threads):
    results: list[torch.Tensor] = []
    callers = [threading.Thread(target=lambda: results.append(count_to(200, 300))) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 3 and all(torch.equal(x, torch.full_like(x, 300)) for x in results)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_forked_process_has_threads_of_its_own(many_threads):
    count_to(10, 1)
    child = os.fork()
    if child == 0:
        done = bool((count_to(50, 300) == 300).all()) and len(os.listdir("/proc/self/task")) >= 5
        os._exit(0 if done else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_kernel_is_compiled_once():
    assert count_up() is count_up()
    assert count_up().name == "count_up"


def test_a_played_step_computes_again_with_new_data():
    x = torch.arange(5)
    with memory.allocate_in(memory.Arena()):
        expected = doubled(doubled(x))
    graph = Graph(lambda: doubled(doubled(x, in_parallel=True)), memory.Arena())
    assert torch.equal(graph.result, expected)
    for _ in range(3):
        x += 10
        assert torch.equal(graph.play(), 4 * x)
    assert [name for name, _ in graph.times()] == ["double", "double"]


def test_playing_without_a_pool(monkeypatch):
    x = torch.arange(5)
    graph = Graph(lambda: doubled(x), memory.Arena())
    monkeypatch.setattr("llmlab.ops.cpu.graph.pool", lambda: None)
    x += 1
    assert torch.equal(graph.play(), 2 * x)


def test_graphs_that_share_an_arena_keep_their_results():
    arena, x = memory.Arena(), torch.arange(6)
    graphs = [Graph(lambda n=n: doubled(doubled(x[:n])), arena) for n in (2, 4, 6)]
    results = [graph.play().clone() for graph in graphs]
    assert [r.tolist() for r in results] == [[4 * i for i in range(n)] for n in (2, 4, 6)]
    assert [graph.result.tolist() for graph in graphs] == [r.tolist() for r in results]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1,
        lambda x: doubled(x.clone()),
        lambda x: torch.empty(3),
        lambda x: doubled(x.view(2, 3).T.reshape(6)),
    ],
)
def test_work_that_would_not_be_played_is_refused(function):
    x = torch.arange(6)
    with pytest.raises(NotRecordable, match="outside the kernels"):
        Graph(lambda: function(x), memory.Arena())
    assert doubled(x).tolist() == [0, 2, 4, 6, 8, 10]  # and nothing is being recorded any more


def test_views_are_no_work():
    x = torch.arange(6)
    graph = Graph(lambda: doubled(x.view(2, 3)[1]).view(3, 1), memory.Arena())
    assert graph.play().tolist() == [[6], [8], [10]]


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 9)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_arena_tensors_never_overlap_while_they_live(requests):
    arena, alive = memory.Arena(), []
    for size, victim in requests:
        tensor = arena.empty((size,), torch.uint8)
        assert tensor.shape == (size,) and (size == 0 or tensor.data_ptr() % 64 == 0)
        alive.append((tensor, len(alive) % 251))
        tensor.fill_(alive[-1][1])
        if victim < len(alive):
            alive.pop(victim)
        assert all((t == value).all() for t, value in alive)


def test_an_arena_uses_memory_again_and_views_keep_it():
    arena = memory.Arena()
    first = arena.empty((100,), torch.float32)
    address, view = first.data_ptr(), first[10:]
    del first
    gc.collect()
    other = arena.empty((100,), torch.float32)
    assert other.data_ptr() != address  # the view still stands there
    del view
    gc.collect()
    assert arena.empty((90,), torch.float32).data_ptr() == address


def test_own_pages_go_back_with_their_tensor():
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc on this system")

    def is_mapped(address: int) -> bool:
        ranges = (line.split()[0].split("-") for line in maps.read_text().splitlines())
        return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)

    tensor = memory.own_pages((3, 5 << 20), torch.float32)
    assert tensor.shape == (3, 5 << 20) and not tensor.any()
    address = tensor.data_ptr()
    assert is_mapped(address)
    del tensor
    gc.collect()
    assert not is_mapped(address)


def test_large_pages_are_zero_and_aligned():
    area = memory.large_pages(5 << 20)
    assert area.shape == (5 << 20,) and area.data_ptr() % (2 << 20) == 0
    assert not area.any()
    area.fill_(1)


def test_zeros_are_one_memory_however_often_they_are_asked_for():
    arena = memory.Arena()
    places = {arena.zeros((n,), torch.int64).data_ptr() for n in (4, 1, 7, 8, 2) for _ in range(50)}
    assert len(places) == 1  # twice as much as the first asked for
    larger = arena.zeros((1000,), torch.int64)
    assert larger.data_ptr() not in places and not larger.any()
