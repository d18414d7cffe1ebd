"""Reads compiled kernels: SASS out of ``nvdisasm``, and AMD's assembler text, as one list of instructions with its loops."""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import triton

_SASS_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9_.x]*)(.*?)(?:;|$)")
_SASS_LABEL = re.compile(r"^\s*(\.L_?[\w$]+):")
_SASS_TARGET = re.compile(r"\(?(\.L_?[\w$]+)\)?")
_SASS_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
_AMD_LINE = re.compile(r"^\s+()([a-z][a-z0-9_]+)(.*)$")
_AMD_TARGET = re.compile(r"^\s*(\.?LBB\w+|\.L\w+)")
_AMD_LABEL = re.compile(r"^(\.?LBB\w+|\.L\w+):")
_AMD_FIELD = re.compile(
    r"^\s*-?\s*\.(vgpr_count|agpr_count|vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size):\s+(\d+)", re.M
)

# What an instruction is for: the first pattern that fits. Order matters.
_CLASSES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("wgmma", r"^[HIQ]GMMA"),
        ("tcgen05", r"^UTC\w*MMA"),
        ("mma", r"^[HIQD]MMA"),
        ("mfma", r"^v_s?mfmac?_"),
        ("async copy", r"^LDGSTS|^(global|buffer)_load_\w*lds"),
        ("bulk copy", r"^UTMALDG|^UBLKCP"),
        ("load", r"^LDG(?!DEPBAR)|^(global|buffer|flat)_load_"),
        ("store", r"^STG|^UTMASTG|^(global|buffer|flat)_store_"),
        ("spill", r"^LDL|^STL|^scratch_(load|store)"),
        ("shared", r"^LDS|^STS|^ds_"),
        ("tensor memory", r"^LDTM|^STTM"),
        ("special", r"^MUFU|^v_(exp|log|rcp|rsq|sqrt|sin|cos)_"),
        ("shuffle", r"^SHFL|^v_\w*dpp|^ds_(bpermute|swizzle)"),
        ("barrier", r"^BAR|^SYNCS|^WARPSYNC|^DEPBAR|^LDGDEPBAR|^UTCBAR|^s_barrier|^s_waitcnt"),
        (
            "float",
            r"^F(FMA|MUL|ADD|MNMX|SET|SEL|CHK)|^H(FMA2|MUL2|ADD2)|^v_(pk_)?(fma|mul|add|sub|max|min)\w*_f(16|32)",
        ),
        ("convert", r"^F2|^I2|^v_cvt"),
    )
)


@dataclass(frozen=True)
class Instruction:
    opcode: str
    operands: str

    @property
    def kind(self) -> str:
        return next((name for name, pattern in _CLASSES if pattern.match(self.opcode)), "integer and other")

    def load_bytes(self) -> int:
        """Bytes that one lane loads from global memory (0 for anything else than a load or an asynchronous copy)."""
        if self.kind not in ("load", "async copy"):
            return 0
        if self.opcode.startswith("LDG"):
            for width in (256, 128, 64):
                if f".{width}" in self.opcode:
                    return width // 8
            return 2 if re.search(r"\.[US]16", self.opcode) else 1 if re.search(r"\.[US]8", self.opcode) else 4
        words = re.search(r"dwordx(\d)", self.opcode)
        if words:
            return 4 * int(words.group(1))
        return 2 if "short" in self.opcode else 1 if "byte" in self.opcode else 4

    def mma_flops(self) -> int:
        """FLOPs of one tensor-core instruction (of a warp, or of four for wgmma); 0 where its text does not say."""
        shape = re.match(r"^[HIQ]GMMA\.(\d+)x(\d+)x(\d+)", self.opcode)
        if shape:
            m, n, k = map(int, shape.groups())
            return 2 * m * n * k
        fragment = re.match(r"^[HI]MMA\.(?:SP\.)?(16)(8)(\d+)", self.opcode)
        if fragment:
            m, n, k = map(int, fragment.groups())
            return 2 * m * n * k
        block = re.match(r"^v_mfma_\w+?_(\d+)x(\d+)x(\d+)", self.opcode)
        if block:
            m, n, k = map(int, block.groups())
            return 2 * m * n * k
        return 0


Loop = tuple[int, ...]  # positions of a loop's instructions, ascending


@dataclass(frozen=True)
class Code:
    """A kernel's instructions, its natural loops, and what the assembler says it needs."""

    instructions: tuple[Instruction, ...]
    loops: tuple[Loop, ...]
    registers: int  # per thread
    stack: int  # bytes per thread
    spills: int  # spilling instructions (NVIDIA) or spilled vector registers (AMD)
    scalar_spills: int = 0  # AMD's scalar registers, spilled into vector registers: cheap, but worth knowing

    def mix(self, within: Loop | None = None) -> Counter[str]:
        return Counter(instruction.kind for instruction in self.part(within))

    def part(self, within: Loop | None = None) -> tuple[Instruction, ...]:
        return self.instructions if within is None else tuple(self.instructions[position] for position in within)

    def hot_loop(self) -> Loop | None:
        """The loop where the work is: the smallest one with at least 30 % of the matrix instructions of the richest loop.

        Without matrix instructions the same rule goes by the bytes loaded from global memory, without those by size. Waiting
        loops around a barrier are too small to count.
        """
        loops = [loop for loop in self.loops if len(loop) >= 9]
        if not loops:
            return None
        for weigh in (self._matrix_work, self._loaded):
            weights = {loop: weigh(loop) for loop in loops}
            most = max(weights.values())
            if most > 0:
                return min((loop for loop in loops if weights[loop] >= 0.3 * most), key=len)
        return max(loops, key=len)

    def _matrix_work(self, loop: Loop) -> int:
        mix = self.mix(loop)
        return mix["wgmma"] + mix["tcgen05"] + mix["mma"] + mix["mfma"]

    def _loaded(self, loop: Loop) -> int:
        return sum(instruction.load_bytes() for instruction in self.part(loop))

    def wide_load_share(self, within: Loop | None = None) -> float | None:
        """Of the bytes a lane loads from global memory, the share that 128-bit (or wider) loads bring; None without loads."""
        sizes = [instruction.load_bytes() for instruction in self.part(within)]
        total = sum(sizes)
        return sum(size for size in sizes if size >= 16) / total if total else None


def read_cubin(cubin: bytes) -> Code:
    """Disassemble with the tools in Triton's wheel. Raises RuntimeError with their message when they fail."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _tool([str(tools / "nvdisasm"), "-c", file.name])
        usage = _tool([str(tools / "cuobjdump"), "-res-usage", file.name])
    return parse_sass(text, usage)


def _tool(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {done.stderr.strip()}")
    return done.stdout


def parse_sass(text: str, usage: str) -> Code:
    """``nvdisasm -c`` output, and the ``-res-usage`` lines of ``cuobjdump``."""
    instructions, flow = _scan(text.splitlines(), _SASS_LINE, _SASS_LABEL, _sass_flow)
    resources = _SASS_RESOURCES.search(usage)
    if resources is None or not instructions:
        raise RuntimeError("no kernel in the disassembler's output")
    spills = sum(instruction.kind == "spill" for instruction in instructions)
    return Code(instructions, natural_loops(flow), int(resources.group(1)), int(resources.group(2)), spills)


def parse_amdgcn(text: str) -> Code:
    """AMD assembler text with its metadata."""
    fields = {name: int(value) for name, value in _AMD_FIELD.findall(text)}
    lines = text[: text.find(".amdgpu_metadata")].splitlines()
    instructions, flow = _scan(lines, _AMD_LINE, _AMD_LABEL, _amd_flow)
    if not instructions or "vgpr_count" not in fields:
        raise RuntimeError("no kernel in the assembler text")
    return Code(
        instructions,
        natural_loops(flow),
        registers=fields["vgpr_count"],  # with the accumulation registers: they share one file
        stack=fields.get("private_segment_fixed_size", 0),
        spills=fields.get("vgpr_spill_count", 0),
        scalar_spills=fields.get("sgpr_spill_count", 0),
    )


# Where control goes after an instruction: (the label it may jump to, whether it may also go on to the next instruction).
Flow = tuple[str | None, bool]


def _sass_flow(predicate: str, instruction: Instruction) -> Flow:
    opcode, operands = instruction.opcode.split(".")[0], instruction.operands
    if opcode in ("EXIT", "RET"):
        return None, bool(predicate)
    if opcode != "BRA":
        return None, True
    label = _SASS_TARGET.search(operands)
    conditional = bool(predicate) or re.search(r"\bU?P[0-9]", operands.split("`")[0]) is not None
    return (label.group(1) if label else None), conditional


def _amd_flow(_: str, instruction: Instruction) -> Flow:
    if instruction.opcode == "s_endpgm":
        return None, False
    if not instruction.opcode.startswith(("s_branch", "s_cbranch")):
        return None, True
    label = _AMD_TARGET.search(instruction.operands)
    return (label.group(1) if label else None), instruction.opcode.startswith("s_cbranch")


def _scan(
    lines: Iterable[str], line: re.Pattern[str], label: re.Pattern[str], flow_of: Callable[[str, Instruction], Flow]
) -> tuple[tuple[Instruction, ...], list[list[int]]]:
    """(instructions, the positions that each may be followed by)."""
    instructions: list[Instruction] = []
    flows: list[Flow] = []
    labels: dict[str, int] = {}
    for text in lines:
        named = label.match(text)
        if named:
            labels[named.group(1)] = len(instructions)
            continue
        found = line.match(text)
        if found:
            instruction = Instruction(found.group(2), found.group(3))
            instructions.append(instruction)
            flows.append(flow_of(found.group(1) or "", instruction))
    successors = []
    for position, (target, goes_on) in enumerate(flows):
        following = [position + 1] if goes_on else []
        if target is not None and target in labels:
            following.append(labels[target])
        successors.append([to for to in following if to < len(instructions)])
    return tuple(instructions), successors


def natural_loops(successors: list[list[int]]) -> tuple[Loop, ...]:
    """The natural loops of a control-flow graph over instruction positions, by the header's position.

    A loop is a back edge to an instruction that dominates its source, with all that reaches the source without passing the
    header (Aho, Lam, Sethi, Ullman, Compilers, section 9.6). Waiting code that the compiler moved out of line jumps backwards
    too, but to places that do not dominate it, so it makes no loop.
    """
    count = len(successors)
    starts = {0} | {
        to for position, following in enumerate(successors) for to in following if following != [position + 1]
    }
    starts |= {position + 1 for position, following in enumerate(successors) if following != [position + 1]}
    leaders = sorted(start for start in starts if start < count)
    block_of = [0] * count
    bounds = list(zip(leaders, [*leaders[1:], count]))
    for block, (first, last) in enumerate(bounds):
        block_of[first:last] = [block] * (last - first)
    edges = [[block_of[to] for to in successors[last - 1]] for _, last in bounds]
    predecessors: list[list[int]] = [[] for _ in bounds]
    for block, following in enumerate(edges):
        for to in following:
            predecessors[to].append(block)
    everything = (1 << len(bounds)) - 1
    dominators = [everything] * len(bounds)  # bit sets
    dominators[0] = 1
    changed = True
    while changed:
        changed = False
        for block in range(1, len(bounds)):
            common = everything
            for before in predecessors[block]:
                common &= dominators[before]
            new = common | (1 << block) if predecessors[block] else everything
            if new != dominators[block]:
                dominators[block], changed = new, True
    loops: dict[int, set[int]] = {}
    for source, following in enumerate(edges):
        for header in following:
            if dominators[source] != everything and dominators[source] >> header & 1:
                body, pending = loops.setdefault(header, {header}), [source]
                while pending:
                    block = pending.pop()
                    if block not in body:
                        body.add(block)
                        pending.extend(predecessors[block])
    return tuple(
        tuple(position for block in sorted(body) for position in range(*bounds[block]))
        for _, body in sorted(loops.items())
    )
