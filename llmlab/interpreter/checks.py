"""What a checked run looks for, and what it says when it finds something."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Checks:
    """Which checks are on; all of them by default.

    ``bounds``: every address lies in the view that its pointer came from. ``poison``: a masked lane read without ``other``
    holds NaN (floats) or a huge number (integers) instead of a tame 0. ``overflow``: signed integers and float16 stay in range,
    no integer is divided by 0. ``races``: no two programs touch one address, unless both read, both use atomics (a volatile load
    counts as one), or atomics order them, as a lock does.
    ``barriers``: a program that reads what it stored, or stores what other lanes of it read, has a ``tl.debug_barrier``
    between; one store gives one address one value. ``sums``: no ``tl.sum`` accumulates in 16 bits. ``hints``: ``multiple_of``,
    ``max_contiguous`` and ``max_constancy`` tell the truth. ``tf32``: ``tl.dot`` rounds float32 operands to TF32 where the
    kernel allows it, as the hardware does. ``order_seed``: programs run in an order shuffled by it (None: in grid order), and
    where programs share memory the result is compared with that of the grid order. ``max_trips``: loop trips in one program
    before a loop counts as endless (None: no limit).
    """

    bounds: bool = True
    poison: bool = True
    overflow: bool = True
    races: bool = True
    barriers: bool = True
    sums: bool = True
    hints: bool = True
    tf32: bool = True
    order_seed: int | None = 0
    max_trips: int | None = 1_000_000

    def __post_init__(self) -> None:
        if self.max_trips is not None and self.max_trips < 1:
            raise ValueError(f"max_trips must be at least 1 or None, not {self.max_trips}")


KINDS = {
    "out-of-bounds-load": "a lane that is on reads outside the tensor view its pointer came from",
    "out-of-bounds-store": "a lane that is on writes outside the tensor view its pointer came from",
    "out-of-bounds-atomic": "an atomic outside the tensor view its pointer came from",
    "int-overflow": "a signed sum, difference, product, scan or cast leaves the range of its type (a shift may)",
    "int-division-by-zero": "an integer is divided by zero",
    "fp16-overflow": "a float16 operation, or a cast to float16, makes an infinity of finite numbers",
    "write-write-race": "two programs store to one address",
    "read-write-race": "a program reads an address that another one stores to",
    "atomic-race": "one program uses an address by atomics, another one by plain loads or stores",
    "missing-barrier": "a program's accesses to one address are ordered by nothing: its threads may run in any order",
    "duplicate-store": "one store writes different values to one address",
    "narrow-sum": "tl.sum of a 16-bit float block accumulates in 16 bits",
    "wrong-hint": "a hint to the compiler is untrue",
    "order-dependence": "the result changes with the order in which programs run",
}


@dataclass(frozen=True)
class Finding:
    """One defect: what (``kind``, a key of ``KINDS``), where in the kernel's source, and in which program it was first seen.

    ``program`` is None for what only the whole grid shows; ``count``: how often this line did it.
    """

    kind: str
    message: str
    kernel: str
    file: str
    line: int
    program: tuple[int, int, int] | None
    count: int = 1

    def __str__(self) -> str:
        where = "" if self.program is None else f", program {self.program}"
        times = "" if self.count == 1 else f" ({self.count} times)"
        return f"{self.kind}: {self.message} [{self.kernel} at {self.file}:{self.line}{where}]{times}"


class KernelFindings(RuntimeError):
    """Raised by ``checked(raise_on_findings=True)`` at the end of a run that found something; ``findings`` holds all of it."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n".join(map(str, self.findings)))


class Collector:
    """Gathers findings, one for each kind and source line."""

    def __init__(self, kernel: str, files: set[str]) -> None:
        self.kernel = kernel
        self.files = files  # the source files of the kernels that run; shared with the runtime, which fills it
        self.program: tuple[int, int, int] | None = None
        self._found: dict[tuple[str, str, int], Finding] = {}

    def place(self) -> tuple[str, int]:
        """(file, line) of the kernel's statement that is being executed."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename in self.files:
                return frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back
        return "", 0

    def report(
        self, kind: str, message: str, place: tuple[str, int] | None = None, program: tuple[int, int, int] | None = None
    ) -> None:
        """``place`` and ``program`` default to where the run is now."""
        file, line = self.place() if place is None else place
        key = (kind, file, line)
        known = self._found.get(key)
        if known is not None:
            self._found[key] = replace(known, count=known.count + 1)
            return
        program = program if place is not None else self.program
        self._found[key] = Finding(kind, message, self.kernel, file, line, program)

    def findings(self) -> list[Finding]:
        return list(self._found.values())
