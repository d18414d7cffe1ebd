from __future__ import annotations

import pytest

from llmlab.engine.request import Request
from llmlab.engine.request_queue import FCFSRequestQueue, PriorityRequestQueue
from llmlab.sampling.params import SamplingParams


def request(request_id: str, priority: int = 0, arrival_time: float = 0.0, number: int = 0) -> Request:
    made = Request(request_id, [1], SamplingParams(), priority=priority, arrival_time=arrival_time)
    made.queue_key = (priority, arrival_time, number)
    return made


def drain(queue) -> str:
    return "".join(queue.pop().request_id for _ in range(len(queue)))


def test_fcfs_keeps_arrival_order_and_puts_preempted_first():
    queue = FCFSRequestQueue()
    for name in "cde":
        queue.add(request(name))
    queue.put_back(request("b"))
    queue.put_back(request("a"))
    assert [r.request_id for r in queue] == list("abcde")
    assert queue.peek().request_id == "a" and len(queue) == 5
    assert drain(queue) == "abcde" and not queue


def test_priority_orders_by_priority_then_arrival_then_number():
    queue = PriorityRequestQueue()
    queue.add(request("d", priority=1, arrival_time=0.0))
    queue.add(request("b", arrival_time=1.0, number=1))
    queue.add(request("c", arrival_time=1.0, number=2))
    queue.put_back(request("a", arrival_time=0.5, number=3))
    queue.add(request("_", priority=-1, arrival_time=9.0))
    assert [r.request_id for r in queue] == list("_abcd")
    assert drain(queue) == "_abcd"


@pytest.mark.parametrize("queue_class", [FCFSRequestQueue, PriorityRequestQueue])
def test_removal_from_anywhere(queue_class):
    queue = queue_class()
    for i, name in enumerate("abcde"):
        queue.add(request(name, arrival_time=float(i), number=i))
    for name in "ace":
        queue.remove(name)
    with pytest.raises(KeyError):
        queue.remove("a")
    assert [r.request_id for r in queue] == ["b", "d"]
    assert drain(queue) == "bd"


def test_an_id_used_again_is_a_new_request():
    queue = PriorityRequestQueue()
    queue.add(request("x", priority=0, number=0))
    queue.add(request("y", priority=1, number=1))
    queue.remove("x")
    queue.add(request("x", priority=2, number=2))
    assert drain(queue) == "yx"
