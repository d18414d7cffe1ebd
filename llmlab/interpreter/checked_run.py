"""One checked run of a kernel: shuffled programs, race analysis, and the second opinion in grid order."""

import random
from typing import Any

import numpy as np
from triton.runtime.jit import JITFunction

from llmlab.interpreter.checked import CheckedBuilder, CheckedRuntime, Written
from llmlab.interpreter.checks import Checks, Collector, Finding
from llmlab.interpreter.executor import KernelError, convert_arguments, execute
from llmlab.interpreter.memory import Region


def run_with_checks(
    kernel: JITFunction, grid: tuple[int, int, int], values: dict[str, Any], checks: Checks
) -> list[Finding]:
    """Run ``kernel`` on its bound ``values`` and return what was found. The tensors hold the grid order's result."""
    total = grid[0] * grid[1] * grid[2]
    shuffled = checks.order_seed is not None and total > 1
    order = None
    if shuffled:
        order = list(range(total))
        random.Random(checks.order_seed).shuffle(order)
        if order == sorted(order):  # two programs, half of the time: then the other way round
            order.reverse()
    collector = Collector(kernel.__name__, set())
    try:
        builder = _run(kernel, grid, values, checks, collector, order, keep_undo=shuffled)
    except KernelError as error:
        error.after(collector.findings())
        raise
    if not checks.races:
        return collector.findings()

    def program_of(number: int) -> tuple[int, int, int]:
        x, rest = divmod(number, grid[1] * grid[2])
        return (x, *divmod(rest, grid[2]))

    name_of = lambda address: _name(builder.regions, address)
    shared = builder.grid.report(collector, name_of, program_of, builder.synchronisation.met)
    if shared and shuffled:
        _compare_orders(kernel, grid, values, checks, collector, builder.undo)
    return collector.findings()


def _run(
    kernel: JITFunction,
    grid: tuple[int, int, int],
    values: dict[str, Any],
    checks: Checks,
    collector: Collector,
    order: list[int] | None,
    keep_undo: bool,
) -> CheckedBuilder:
    builder = CheckedBuilder(checks, collector)
    builder.keep_undo = keep_undo
    runtime = CheckedRuntime(builder)
    converted, builder.regions = convert_arguments(kernel, values, runtime)
    execute(kernel, grid, converted, runtime, builder.start_program, order)
    return builder


def _compare_orders(
    kernel: JITFunction,
    grid: tuple[int, int, int],
    values: dict[str, Any],
    checks: Checks,
    collector: Collector,
    written: list[Written],
) -> None:
    """Take the shuffled run back, run in grid order, and compare what the two left where either wrote."""
    after = [write.elements[write.index] for write in written]
    for write in reversed(written):
        write.elements[write.index] = write.before
    second = _run(kernel, grid, values, checks, Collector(kernel.__name__, set()), None, keep_undo=True)
    differing = {
        write.region.name
        for write, shuffled in zip(written, after, strict=True)
        if write.elements[write.index].tobytes() != shuffled.tobytes()
    }
    if _bytes_written(written) != _bytes_written(second.undo):
        differing.add("the addresses written")
    if differing:
        collector.report(
            "order-dependence",
            f"{', '.join(sorted(differing))}: not the same with seed {checks.order_seed} as in grid order",
            place=(kernel.fn.__code__.co_filename, kernel.fn.__code__.co_firstlineno),
        )


def _bytes_written(written: list[Written]) -> dict[tuple[int, int], bytes]:
    """The distinct indices written, by storage and element size."""
    indices: dict[tuple[int, int], list[np.ndarray]] = {}
    for write in written:
        indices.setdefault((write.region.base, write.elements.itemsize), []).append(write.index)
    return {key: np.unique(np.concatenate(parts)).tobytes() for key, parts in indices.items()}


def _name(regions: list[Region], address: int) -> str:
    for region in regions:
        if region.base <= address < region.base + region.raw.size:
            tensor = region.tensor
            element = (address - region.base) // tensor.element_size() - tensor.storage_offset()
            return f"{region.name}[{element}]"
    return f"address {address:#x}"
