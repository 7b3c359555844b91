"""Machine code of the streamed products: is a place given back while reads of it are under way?

    python bench/native_sass.py [--nvrtc LIBNVRTC]

Compiles every measured plan with bulk copies for sm_90 (no GPU needed: NVRTC, and the nvdisasm of
triton) and says of each its registers, its size, and how many arrivals at a barrier are issued
while a load from shared memory has not come: such a place could be overwritten first. Exit code 1
where there is one. (Without bulk copies a thread overwrites only what it has read itself.)

A load names one of six scoreboards in its control bits; an instruction waits for those of its mask.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from deepdraft.kernels.native import build, stream  # noqa: E402
from deepdraft.kernels.native.fragments import StreamPlan  # noqa: E402
from deepdraft.kernels.native.plans import MEASURED  # noqa: E402

GROUPED = (8192, 4096, 2048, 1024)
"""Rows of maps with 4,096 columns: they read bf16 rows and give FP8."""
_LINE = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);?\s+/\* 0x([0-9a-f]{16}) \*/")
_SECOND = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")


@dataclass(slots=True)
class Instruction:
    """One of 16 bytes; `scoreboard`: the one that its result lifts, 7: none; `waits`: a mask."""

    at: int
    text: str
    high: int = 0

    @property
    def _control(self) -> int:
        return self.high >> 41 & 0x1FFFFF

    @property
    def scoreboard(self) -> int:
        return self._control >> 5 & 7

    @property
    def waits(self) -> int:
        return self._control >> 11 & 63


def parse(listing: str) -> list[Instruction]:
    """What `nvdisasm -hex` prints: two words an instruction, control bits in the second."""
    found: list[Instruction] = []
    for line in listing.splitlines():
        if first := _LINE.search(line):
            found.append(Instruction(int(first[1], 16), first[2].strip()))
        elif (second := _SECOND.match(line)) and found:
            found[-1].high = int(second[1], 16)
    return found


def early_arrivals(code: list[Instruction]) -> list[str]:
    """Arrivals that wait neither for loads issued before them nor behind a fence that does, in the
    order of the code."""
    open_loads: list[Instruction] = []
    found = []
    for one in code:
        open_loads = [load for load in open_loads if not one.waits >> load.scoreboard & 1]
        if one.text.startswith("FENCE.VIEW.ASYNC"):
            open_loads = []
        if "SYNCS.ARRIVE.TRANS64.A1T0" in one.text and open_loads:
            loads = ", ".join(load.text for load in open_loads)
            found.append(f"{one.at:#x} {one.text} before {loads}")
        if re.match(r"LDS(\.\d+)? R\d", one.text) and one.scoreboard != 7:
            open_loads.append(one)
        if one.text == "EXIT":
            open_loads = []
    return found


def variants() -> list[tuple[str, dict[str, int]]]:
    """Every measured plan with bulk copies, as the step launches it."""
    found = []
    for (kind, rows, cols), fields in MEASURED.items():
        plan = StreamPlan(*fields) if fields else None
        if plan is None or not plan.bulk:
            continue
        if kind == "dense":
            grouped = cols == 4096 and rows in GROUPED
            wanted = (stream.BF16_ROWS, 2) if grouped else (stream.FP8_ROWS, 0)
        else:
            wanted = (stream.UP if cols == 5120 else stream.DOWN, 0)
        found.append((f"{kind} {rows}x{cols}", stream.macros(wanted[0], plan, wanted[1])))
    return found


def disassembled(code: bytes) -> tuple[list[Instruction], int]:
    """Instructions and registers of a compiled kernel."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        listing, usage = (
            subprocess.run([tools / tool, *flags, file.name], capture_output=True, text=True).stdout
            for tool, *flags in (("nvdisasm", "-hex", "-c"), ("cuobjdump", "-res-usage"))
        )
    registers = re.search(r"REG:(\d+)", usage)
    return parse(listing), int(registers[1]) if registers else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvrtc", type=Path, help="the library, where torch has none")
    args = parser.parse_args()
    if args.nvrtc:
        for part in args.nvrtc.parent.glob("libnvrtc-builtins.so*"):
            ctypes.CDLL(str(part))
        library = ctypes.CDLL(str(args.nvrtc))
        build._nvrtc = lambda: library
    early = 0
    wanted = variants()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        codes = pool.map(lambda v: build.cubin("stream.cu", v[1], "sm_90a"), wanted)
        for (name, _), code in zip(wanted, codes, strict=True):
            instructions, registers = disassembled(code)
            found = early_arrivals(instructions)
            early += len(found)
            print(
                f"{name:20} {registers:3} registers, {len(instructions):5} instructions, "
                f"early arrivals: {len(found)}",
                flush=True,
            )
            for text in found:
                print("   ", text)
    return int(early > 0)


if __name__ == "__main__":
    sys.exit(main())
