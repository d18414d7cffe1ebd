"""One checked run of a kernel: shuffled programs, race analysis, and the second opinion in grid order."""

import random
from typing import Any

import numpy as np
from triton.runtime.jit import JITFunction

from llmlab.interpreter.checked import CheckedBuilder, CheckedRuntime
from llmlab.interpreter.checks import Checks, Collector, Finding
from llmlab.interpreter.executor import convert_arguments, execute
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
    collector = Collector(kernel.__name__, set())
    builder, regions, before = _run(kernel, grid, values, checks, collector, order, keep=shuffled)
    if not checks.races:
        return collector.findings()

    def program_of(number: int) -> tuple[int, int, int]:
        x, rest = divmod(number, grid[1] * grid[2])
        return (x, *divmod(rest, grid[2]))

    shared = builder.grid.report(collector, lambda address: _name(regions, address), program_of)
    if shared and shuffled:
        _compare_orders(kernel, grid, values, checks, collector, regions, before)
    return collector.findings()


def _run(
    kernel: JITFunction,
    grid: tuple[int, int, int],
    values: dict[str, Any],
    checks: Checks,
    collector: Collector,
    order: list[int] | None,
    keep: bool,
) -> tuple[CheckedBuilder, list[Region], dict[int, np.ndarray]]:
    builder = CheckedBuilder(checks, collector)
    runtime = CheckedRuntime(builder)
    converted, regions = convert_arguments(kernel, values, runtime)
    builder.regions = regions
    before = {region.base: region.raw.copy() for region in regions} if keep else {}
    execute(kernel, grid, converted, runtime, builder.start_program, order)
    return builder, regions, before


def _compare_orders(
    kernel: JITFunction,
    grid: tuple[int, int, int],
    values: dict[str, Any],
    checks: Checks,
    collector: Collector,
    regions: list[Region],
    before: dict[int, np.ndarray],
) -> None:
    storages = {region.base: region for region in regions}
    after = {base: region.raw.copy() for base, region in storages.items()}
    for base, region in storages.items():
        region.raw[:] = before[base]
    _run(kernel, grid, values, checks, Collector(kernel.__name__, set()), None, keep=False)
    differing = sorted(region.name for base, region in storages.items() if (region.raw != after[base]).any())
    if differing:
        collector.report(
            "order-dependence",
            f"{', '.join(differing)} depend on the order in which programs run (seed {checks.order_seed} against grid order)",
            place=(kernel.fn.__code__.co_filename, kernel.fn.__code__.co_firstlineno),
        )


def _name(regions: list[Region], address: int) -> str:
    for region in regions:
        if region.base <= address < region.base + region.raw.size:
            tensor = region.tensor
            element = (address - region.base) // tensor.element_size() - tensor.storage_offset()
            return f"{region.name}[{element}]"
    return f"address {address:#x}"
