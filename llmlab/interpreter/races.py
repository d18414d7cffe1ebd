"""Who touched what: the accesses of every program, and of the lanes within one, compared.

Within a program only ``tl.debug_barrier`` orders a store with a later load of the same address, whichever threads do them: the
compiler promises no more. A load followed by a store is reported only where the two are done by different lanes (the same lane
of the same block shape is the same thread) and no reduction or scan, which synchronises the threads, lies between.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from llmlab.interpreter.checks import Collector

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


@dataclass
class GridAccesses:
    """All accesses of all programs, by kind."""

    _parts: dict[str, list[tuple[np.ndarray, int, int]]] = field(
        default_factory=lambda: {"load": [], "store": [], "atomic": []}
    )
    _places: list[Place] = field(default_factory=list)
    _place_numbers: dict[Place, int] = field(default_factory=dict)

    def add(self, kind: str, addresses: np.ndarray, program: int, place: Place) -> None:
        number = self._place_numbers.setdefault(place, len(self._places))
        if number == len(self._places):
            self._places.append(place)
        self._parts[kind].append((np.unique(addresses), program, number))

    def report(self, collector: Collector, name_of: NameOf, program_of: ProgramOf) -> bool:
        """Report the races; True when programs share any address that one of them writes (by store or atomic)."""
        loads, stores, atomics = (self._table(kind) for kind in ("load", "store", "atomic"))
        shared = self._clash("write-write-race", "stores", "stores", stores, stores, collector, name_of, program_of)
        shared |= self._clash("read-write-race", "loads", "stores", loads, stores, collector, name_of, program_of)
        shared |= self._clash("atomic-race", "stores", "updates", stores, atomics, collector, name_of, program_of)
        shared |= self._clash("atomic-race", "loads", "updates", loads, atomics, collector, name_of, program_of)
        return shared or self._pair(atomics, atomics) is not None

    def _table(self, kind: str) -> "_Table":
        parts = self._parts[kind]
        if not parts:
            empty = np.empty(0, np.int64)
            return _Table(empty.astype(np.uint64), empty, empty)
        addresses = np.concatenate([part[0] for part in parts])
        sizes = [part[0].size for part in parts]
        programs = np.repeat([part[1] for part in parts], sizes)
        places = np.repeat([part[2] for part in parts], sizes)
        order = np.argsort(addresses, kind="stable")
        return _Table(addresses[order], programs[order], places[order])

    def _clash(
        self,
        kind: str,
        one_does: str,
        other_does: str,
        one: "_Table",
        other: "_Table",
        collector: Collector,
        name_of: NameOf,
        program_of: ProgramOf,
    ) -> bool:
        pair = self._pair(one, other)
        if pair is None:
            return False
        first, second, count = pair
        address = int(one.addresses[first])
        programs = program_of(int(one.programs[first])), program_of(int(other.programs[second]))
        collector.report(
            kind,
            f"program {programs[0]} {one_does} and program {programs[1]} {other_does} {name_of(address)} "
            f"({count} addresses in all)",
            place=self._places[int(one.places[first])],
            program=programs[0],
        )
        return True

    @staticmethod
    def _pair(one: "_Table", other: "_Table") -> tuple[int, int, int] | None:
        """(row of one, row of other, how many addresses) where different programs meet, or None."""
        if not one.addresses.size or not other.addresses.size:
            return None
        low = np.searchsorted(other.addresses, one.addresses, "left")
        high = np.searchsorted(other.addresses, one.addresses, "right")
        rows = np.flatnonzero(high > low)
        if not rows.size:
            return None
        owners = np.append(other.programs, 0)  # reduceat needs an element after the last slice
        slices = np.ravel(np.column_stack([low[rows], high[rows]]))
        smallest = np.minimum.reduceat(owners, slices)[::2]
        largest = np.maximum.reduceat(owners, slices)[::2]
        clash = (smallest != one.programs[rows]) | (largest != one.programs[rows])
        if not clash.any():
            return None
        row = int(rows[clash][0])
        partner = int(low[row] + np.flatnonzero(other.programs[low[row] : high[row]] != one.programs[row])[0])
        return row, partner, int(np.unique(one.addresses[rows[clash]]).size)


@dataclass(frozen=True)
class _Table:
    addresses: np.ndarray  # ascending
    programs: np.ndarray
    places: np.ndarray
