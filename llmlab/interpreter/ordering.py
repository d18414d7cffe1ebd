"""What happens before what across programs: atomics with acquire and release semantics as vector clocks.

An atomic that releases publishes what its program did before; one that acquires, later, at the same address, comes after all of
that (Lamport, 1978; Mattern, 1988). That is what makes a lock a lock, and a counter of finished programs safe to read behind.
The atomic is one thread's work: of the other threads' accesses it publishes those before the program's last
``tl.debug_barrier``; a scalar access is that one thread's own. Only scalar atomics count: nobody locks with a block.

Programs run one after the other, so the order that is seen is one of the possible ones: where a kernel leaves the order of two
accesses to luck and both programs happen to pass the same atomic in between, no race is seen.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

# Of each program: the numbers of events below which all of them, and below which its scalar ones, are known to have happened.
Clock = Mapping[int, tuple[int, int]]


@dataclass
class Synchronisation:
    """The clock of the program that is running, and what every address has been given."""

    clock: Clock = field(default_factory=dict)
    met: bool = False  # whether any program ever acquired what another one released
    _since: int = 0  # the number of the first event after the last barrier
    _released: dict[int, Clock] = field(default_factory=dict)

    def start_program(self, now: int) -> None:
        """``now``: how many events there have been."""
        self.clock, self._since = {}, now

    def barrier(self, now: int) -> None:
        self._since = now

    def acquire(self, address: int) -> None:
        given = self._released.get(address)
        if given:
            self.clock, self.met = _later(self.clock, given), True

    def release(self, address: int, program: int, now: int) -> None:
        own = {**self.clock, program: (self._since, now)}
        self._released[address] = _later(self._released.get(address, {}), own)


def _later(one: Clock, other: Clock) -> Clock:
    merged = dict(one)
    for program, (all_below, scalars_below) in other.items():
        known = merged.get(program, (0, 0))
        merged[program] = (max(known[0], all_below), max(known[1], scalars_below))
    return merged
