"""Who touched what: the accesses of every program, and of the lanes within one, compared.

Within a program only ``tl.debug_barrier`` orders a store with a later load of the same address, whichever threads do them: the
compiler promises no more. A load followed by a store is reported only where the two are done by different lanes (the same lane
of the same block shape is the same thread) and no reduction or scan, which synchronises the threads, lies between.

Between programs nothing orders two accesses but atomics (``ordering``).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from llmlab.interpreter.checks import Collector
from llmlab.interpreter.ordering import Clock

Place = tuple[str, int]
NameOf = Callable[[int], str]  # an address as name[element]
ProgramOf = Callable[[int], tuple[int, int, int]]  # a flat program number as grid coordinates


@dataclass(eq=False)
class _Touch:
    """One executed load or store: distinct byte addresses in ascending order, with the lane that touched each."""

    addresses: np.ndarray
    lanes: np.ndarray
    block: int  # lanes in the whole block
    place: Place

    def shared(self, other: "_Touch", same_lane_is_safe: bool) -> int | None:
        """An address of both, or None. ``same_lane_is_safe``: not counting those that one thread touches in both."""
        if self.addresses[-1] < other.addresses[0] or other.addresses[-1] < self.addresses[0]:
            return None
        at = np.searchsorted(other.addresses, self.addresses)
        at[at == other.addresses.size] = 0
        both = other.addresses[at] == self.addresses
        if same_lane_is_safe and self.block == other.block:
            both &= other.lanes[at] != self.lanes
        return int(self.addresses[both][0]) if both.any() else None


@dataclass
class ProgramOrder:
    """The accesses of the program that is running, since its last barrier."""

    collector: Collector
    stores: list[_Touch] = field(default_factory=list)
    loads: list[_Touch] = field(default_factory=list)

    def barrier(self) -> None:
        self.stores.clear()
        self.loads.clear()

    def synchronised(self) -> None:
        """A reduction or scan: threads meet, so that what was read before has been read."""
        self.loads.clear()

    def load(self, addresses: np.ndarray, lanes: np.ndarray, block: int, name: str) -> None:
        touch = self._touch(addresses, lanes, block)
        if any(touch.shared(store, same_lane_is_safe=False) is not None for store in self.stores):
            self.collector.report(
                "missing-barrier", f"loads from {name!r} what this program stored, with no barrier between"
            )
        self.loads.append(touch)

    def store(self, addresses: np.ndarray, lanes: np.ndarray, block: int, name: str) -> None:
        touch = self._touch(addresses, lanes, block)
        if any(touch.shared(load, same_lane_is_safe=True) is not None for load in self.loads):
            self.collector.report(
                "missing-barrier", f"stores into {name!r} what other lanes loaded, with no barrier between"
            )
        elif any(touch.shared(store, same_lane_is_safe=True) is not None for store in self.stores):
            self.collector.report(
                "missing-barrier", f"stores into {name!r} what other lanes stored, with no barrier between"
            )
        self.stores.append(touch)

    def _touch(self, addresses: np.ndarray, lanes: np.ndarray, block: int) -> _Touch:
        distinct, first = np.unique(addresses, return_index=True)
        return _Touch(distinct, lanes[first], block, self.collector.place())


@dataclass(eq=False)
class _Event:
    """One executed load, store or atomic of the grid: distinct addresses in ascending order, all of ``size`` bytes."""

    number: int
    kind: str
    program: int
    place: Place
    addresses: np.ndarray
    size: int
    storage: int  # its address
    scalar: bool
    clock: Clock  # what is known to have happened before

    def comes_before(self, later: "_Event") -> bool:
        """Whether ``later``, of another program, is ordered behind it by atomics."""
        all_below, scalars_below = later.clock.get(self.program, (0, 0))
        return self.number < (scalars_below if self.scalar else all_below)


@dataclass
class GridAccesses:
    """All accesses of all programs, in the order of their execution."""

    events: list[_Event] = field(default_factory=list)

    def add(
        self,
        kind: str,
        addresses: np.ndarray,
        size: int,
        storage: int,
        program: int,
        place: Place,
        clock: Clock,
    ) -> None:
        distinct = np.unique(addresses)
        scalar = addresses.size == 1
        self.events.append(_Event(len(self.events), kind, program, place, distinct, size, storage, scalar, clock))

    def report(self, collector: Collector, name_of: NameOf, program_of: ProgramOf, ordered: bool) -> bool:
        """Report the races; True when programs share any address that one of them writes (by store or atomic).

        ``ordered``: whether atomics may have ordered some of the accesses.
        """
        sizes: dict[int, set[int]] = {}
        for event in self.events:
            sizes.setdefault(event.storage, set()).add(event.size)
        mixed = {storage for storage, known in sizes.items() if len(known) > 1}
        loads, stores, atomics = (self._table(kind, mixed) for kind in ("load", "store", "atomic"))
        shared = False
        for kind, one_does, other_does, one, other in (
            ("write-write-race", "stores", "stores", stores, stores),
            ("read-write-race", "loads", "stores", loads, stores),
            ("atomic-race", "stores", "updates", stores, atomics),
            ("atomic-race", "loads", "updates", loads, atomics),
        ):
            if not self._meet(one, other):
                continue
            shared = True
            found = self._clash(one, other, ordered)
            if found is not None:
                first, second, address, count = found
                programs = program_of(first.program), program_of(second.program)
                collector.report(
                    kind,
                    f"program {programs[0]} {one_does} and program {programs[1]} {other_does} {name_of(address)} "
                    f"({count} {'bytes' if mixed else 'addresses'} in all)",
                    place=first.place,
                    program=programs[0],
                )
        return shared or self._meet(atomics, atomics)

    def _table(self, kind: str, mixed: set[int]) -> "_Table":
        """All that did ``kind``, by address; byte by byte in ``mixed`` storages, which are accessed in several sizes."""
        events = [event for event in self.events if event.kind == kind]
        if not events:
            return _Table(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64))
        parts = [
            (event.addresses[:, None] + np.arange(event.size, dtype=np.uint64)).reshape(-1)
            if event.storage in mixed
            else event.addresses
            for event in events
        ]
        lengths = [part.size for part in parts]
        addresses = np.concatenate(parts)
        numbers = np.repeat([event.number for event in events], lengths)
        programs = np.repeat([event.program for event in events], lengths)
        order = np.argsort(addresses, kind="stable")
        return _Table(addresses[order], numbers[order], programs[order])

    @staticmethod
    def _meet(one: "_Table", other: "_Table") -> bool:
        """Whether different programs share an address."""
        if not one.addresses.size or not other.addresses.size:
            return False
        low = np.searchsorted(other.addresses, one.addresses, "left")
        high = np.searchsorted(other.addresses, one.addresses, "right")
        rows = np.flatnonzero(high > low)
        if not rows.size:
            return False
        owners = np.append(other.programs, 0)  # reduceat needs an element after the last slice
        slices = np.ravel(np.column_stack([low[rows], high[rows]]))
        smallest = np.minimum.reduceat(owners, slices)[::2]
        largest = np.maximum.reduceat(owners, slices)[::2]
        return bool(((smallest != one.programs[rows]) | (largest != one.programs[rows])).any())

    def _clash(self, one: "_Table", other: "_Table", ordered: bool) -> tuple[_Event, _Event, int, int] | None:
        """(event of one, event of other, an address, how many) where different programs meet and nothing orders them.

        Each access is compared with the last one before and the first one after it by another program; those further away
        are then ordered too, or clash with these.
        """
        first, last = self._bounds()
        count = len(self.events) + 1
        known = np.unique(np.concatenate([one.addresses, other.addresses]))
        rank = np.searchsorted(known, one.addresses) * count
        keys = np.searchsorted(known, other.addresses) * count + other.events
        before = np.searchsorted(keys, rank + first[one.events]) - 1
        after = np.searchsorted(keys, rank + last[one.events], "right")
        rows, partners = [], []
        for at in (before, after):
            valid = (at >= 0) & (at < keys.size)
            valid &= other.addresses[np.where(valid, at, 0)] == one.addresses
            rows.append(np.flatnonzero(valid))
            partners.append(at[valid])
        row, partner = np.concatenate(rows), np.concatenate(partners)
        pairs, which = np.unique(one.events[row] * count + other.events[partner], return_inverse=True)
        wrong = np.ones(pairs.size, bool)
        if ordered:
            for i, pair in enumerate(pairs):
                a, b = (self.events[number] for number in divmod(int(pair), count))
                earlier, later = (a, b) if a.number < b.number else (b, a)
                wrong[i] = not earlier.comes_before(later)
        clashing = np.flatnonzero(wrong[which])
        if not clashing.size:
            return None
        at = clashing[np.argmin(row[clashing])]
        addresses = np.unique(one.addresses[row[clashing]])
        a, b = self.events[int(one.events[row[at]])], self.events[int(other.events[partner[at]])]
        return a, b, int(one.addresses[row[at]]), int(addresses.size)

    def _bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """By event: the numbers of its program's first and last one. A program's events follow each other."""
        programs = np.array([event.program for event in self.events])
        starts = np.flatnonzero(np.append(True, programs[1:] != programs[:-1]))
        ends = np.append(starts[1:], programs.size) - 1
        lengths = ends - starts + 1
        return np.repeat(starts, lengths), np.repeat(ends, lengths)


@dataclass(frozen=True)
class _Table:
    addresses: np.ndarray  # ascending; those of one address in the order of execution
    events: np.ndarray
    programs: np.ndarray
