"""The order in which waiting requests are admitted: first come first served, or by priority. No torch here.

Both queues look alike: ``add`` a request, ``put_back`` a preempted one, ``peek`` at and ``pop`` the next one, ``remove``
one by its id (an abort). Iterating yields the requests in the order of admission.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from llmlab.engine.request import Request


class FCFSRequestQueue:
    """First come, first served; a preempted request goes to the front, so it loses no place. Every operation is O(1)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def remove(self, request_id: str) -> None:
        del self._requests[request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


class PriorityRequestQueue:
    """Smallest (priority, arrival time, sequence number) first, for preempted requests too: priority is the promise.

    So a preempted request can be overtaken by a better one that arrived meanwhile, and by no other.
    """

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._heap: list[tuple[tuple[int, float, int], str]] = []  # entries of removed requests stay until they surface

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        heapq.heappush(self._heap, (request.queue_key, request.request_id))

    put_back = add

    def peek(self) -> Request:
        while True:
            key, request_id = self._heap[0]
            request = self._requests.get(request_id)
            if request is not None and request.queue_key == key:
                return request
            heapq.heappop(self._heap)

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        del self._requests[request.request_id]
        return request

    def remove(self, request_id: str) -> None:
        del self._requests[request_id]
        if not self._requests:
            self._heap.clear()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._requests.values(), key=lambda request: request.queue_key))
