"""Run an unmodified ``@triton.jit`` kernel on CPU tensors, and prove it there.

Triton's own interpreter wants ``TRITON_INTERPRET=1`` for the whole process (which then cannot compile), computes bfloat16 wrongly
and sees no access out of bounds and no race. This one needs no environment variable and patches nothing, so that one process can
interpret a kernel, compile it ahead of time and interpret it again; it is exact in bfloat16; and it checks what it runs::

    from llmlab.interpreter import Checks, checked, run

    run(kernel, (4,), x, y, out, 100, BLOCK=32)                   # fast, nothing checked
    findings = run(kernel, (4,), x, y, out, 100, BLOCK=32, checks=Checks())

    with checked() as findings:                                   # every kernel that a launcher runs on CPU tensors
        out = rms_norm(x, weight, 1e-6)
    assert not findings, "\\n".join(map(str, findings))

    with checked(raise_on_findings=True):                         # KernelFindings at the end of the first bad run
        ...

A ``Finding`` names its kind (``KINDS`` lists them), the line of the kernel's source, the program and what happened.

How it works: the kernel's syntax tree is rewritten so that every operation calls a run-time object (``translate``, ``runtime``);
types follow the installed Triton's own front end, whose decisions are remembered (``semantic``, ``trace``); values are numpy
arrays (``builder``); pointers know the tensor they came from (``memory``). Programs run one after the other.

What it does not see: the compiler. Its shared-memory pipelines and barriers, its approximate instructions (``ex2.approx``, the
contraction of a*b+c) and its order of summation are its own; compile every kernel too (``llmlab.measure.static_report``) and give
comparisons a tolerance. A program that waits for a later one never ends (``Checks.max_trips`` stops it). Pointers read from
memory are followed only into tensors that are arguments too. Inline assembly, ``libdevice`` and other ``extern`` calls,
``dot_scaled``, ``atomic_poll``, block pointers and ``map_elementwise`` are refused.

Threads: a run keeps its state to itself, so that several may go on at once, also one inside another; ``checked`` holds for the
thread (or asyncio task) that opened it. Versions: see ``versions.SUPPORTED_TRITON``; another one raises UnsupportedTritonError.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from llmlab.interpreter.checked_run import run_with_checks
from llmlab.interpreter.checks import KINDS, Checks, Finding, KernelFindings
from llmlab.interpreter.executor import KernelError, bind, normalise_grid, run_unchecked, unwrap_kernel
from llmlab.interpreter.memory import MemoryAccessError
from llmlab.interpreter.runtime import UnboundedLoopError
from llmlab.interpreter.translate import UntranslatableError
from llmlab.interpreter.versions import SUPPORTED_TRITON, UnsupportedTritonError, require_supported_triton


@dataclass(frozen=True)
class _Checking:
    checks: Checks
    findings: list[Finding]
    raise_on_findings: bool


_checking: ContextVar[_Checking | None] = ContextVar("llmlab_interpreter_checking", default=None)


@contextmanager
def checked(checks: Checks | None = None, *, raise_on_findings: bool = False) -> Iterator[list[Finding]]:
    """Inside the block every kernel that this thread runs in the interpreter is checked (all checks by default).

    Yields the list that findings are appended to. With ``raise_on_findings`` a run that finds something raises KernelFindings
    when it ends. Blocks may be nested: the inner one holds.
    """
    checking = _Checking(Checks() if checks is None else checks, [], raise_on_findings)
    token = _checking.set(checking)
    try:
        yield checking.findings
    finally:
        _checking.reset(token)


def run(kernel: Any, grid: Any, *args: Any, checks: Checks | None = None, **kwargs: Any) -> list[Finding]:
    """Run ``kernel`` over ``grid`` (a tuple, or a function of the arguments) on CPU tensors; they are changed in place.

    ``args`` and ``kwargs`` are those of ``kernel[grid](...)``; compile options among them (``num_warps``, ...) are accepted and
    mean nothing here. ``checks`` defaults to those of the enclosing ``checked()``, and to none outside it. Returns the findings.

    Raises ValueError for arguments that do not fit the kernel or lie on another device, KernelError (with the cause) when the
    kernel itself fails (what was found by then is noted on it), UntranslatableError for Python that is not in Triton's language,
    KernelFindings where ``checked(raise_on_findings=True)`` asks for it.
    """
    checking = _checking.get()
    if checks is None:
        checks = checking.checks if checking is not None else None
    if checks is None:
        run_unchecked(kernel, grid, args, kwargs)
        return []
    require_supported_triton()
    plain, kwargs = unwrap_kernel(kernel, args, kwargs)
    values = bind(plain, args, kwargs)
    try:
        findings = run_with_checks(plain, normalise_grid(grid, values), values, checks)
    except KernelError as error:
        if checking is not None:
            checking.findings.extend(error.findings)
        raise
    if checking is not None:
        checking.findings.extend(findings)
        if checking.raise_on_findings and findings:
            raise KernelFindings(findings)
    return findings


__all__ = [
    "KINDS",
    "SUPPORTED_TRITON",
    "Checks",
    "Finding",
    "KernelError",
    "KernelFindings",
    "MemoryAccessError",
    "UnboundedLoopError",
    "UntranslatableError",
    "UnsupportedTritonError",
    "checked",
    "run",
]
