"""Compile the kernels for sm_90 without a GPU and report what the compiler made of them.

    python bench/kernels_sass.py [--json FILE] [--only NAME]
    python -O bench/kernels_sass.py --tests [--only MODULE]

Every case calls the real launch function with tensors that have a shape but no storage (device
meta), so what is compiled is what would run. Per kernel: registers, spill bytes, shared memory,
machine instructions of the main loop, and for the weight products lane instructions per weight
(budgets of an H200 at 4.3 TB/s: 4.1 for MXFP4, 7.8 for FP8). Needs torch, triton, nothing else.

--tests compiles every launch of tests/kernels instead (small and odd shapes; nothing is computed,
so -O leaves out their asserts) and reports what does not compile.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class NoDevice:
    """Stands in for a GPU's driver: enough to compile."""

    def get_current_target(self):
        return TARGET

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return "meta"


def capture(compiled: list) -> None:
    """Make every launch compile only, and keep what was compiled."""
    driver.set_active(NoDevice())
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self.fn.__name__, kernel, kwargs))
        return kernel

    JITFunction.run = compile_only
    assert CUDABackend.supports_target(TARGET)


def compile_tests(only: str) -> int:
    """Every launch of the kernel tests; the number of those that do not compile."""
    import types

    import kernels_gpu
    import mini_pytest
    import torch

    from deepdraft.kernels import runtime

    assert not __debug__, "run with python -O: asserts about values that are not computed"
    mini_pytest.install()
    stub = types.ModuleType("tests.kernels.interpreter")
    stub.DEVICE = "cpu"
    sys.modules["tests.kernels.interpreter"] = stub
    runtime.check = lambda *tensors: tensors[0].device
    torch.testing.assert_close = lambda *args, **kwargs: None
    compiled: list = []
    capture(compiled)
    run, broken = JITFunction.run, []

    def keep_going(self, *args, **kwargs):
        try:
            return run(self, *args, **kwargs)
        except Exception as e:
            shown = {k: v for k, v in kwargs.items() if isinstance(v, int | str)}
            broken.append(f"{self.fn.__name__} {shown}: {str(e)[:200]}")

    JITFunction.run = keep_going
    for name in kernels_gpu.MODULES:
        if only in name:
            before = len(compiled)
            with open("/dev/null", "w") as nowhere, contextlib.redirect_stdout(nowhere):
                result = mini_pytest.run(importlib.import_module(f"tests.kernels.{name}"))
            print(
                f"{name:18} {len(compiled) - before} launches compiled in {result['seconds']} s; "
                f"tests that stopped early: {result['failed']}",
                flush=True,
            )
    spilling = set()
    for name, kernel, _ in compiled:
        if kernel.hash not in spilling and inspect(kernel)["spills"]:
            spilling.add(kernel.hash)
            print(f"spills: {name}")
    for line in sorted(set(broken)):
        print(f"BROKEN {line}")
    return len(broken)


def inspect(kernel) -> dict:
    """Registers, spills and the main loop's instructions of one compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        sass, usage = (
            subprocess.run([CUOBJDUMP, flag, file.name], capture_output=True, text=True).stdout
            for flag in ("--dump-sass", "--dump-resource-usage")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, _, local = map(int, found.groups())
    lines = [(int(a, 16), t) for a, t in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass)]
    loops = [
        (int(m.group(1), 16), at)
        for at, text in lines
        if (m := re.search(r"BRA.*0x([0-9a-f]+)", text)) and int(m.group(1), 16) < at
    ]
    start, end = max(loops, key=lambda p: p[1] - p[0], default=(0, -1))
    names = [re.sub(r"^@!?U?P\d+\s+", "", text).split()[0] for _, text in lines]
    loop = [n for n, (at, _) in zip(names, lines, strict=True) if start <= at <= end]
    return {
        "registers": registers,
        "stack_bytes": max(stack, local),
        "spills": sum(n.startswith(("LDL", "STL")) for n in names),
        "shared_bytes": kernel.metadata.shared,
        "instructions": len(lines),
        "loop_instructions": len(loop),
        "mma": sorted(set(re.findall(r"(?:mma\.sync|wgmma\.mma_async)\S*", kernel.asm["ptx"]))),
        "loop_ops": dict(Counter(n.split(".")[0] for n in loop).most_common(14)),
        "global_loads": dict(Counter(n for n in names if re.match(r"LDG|LDGSTS", n))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--tests", action="store_true", help="compile the launches of the tests")
    args = parser.parse_args()
    if args.tests:
        sys.exit(bool(compile_tests(args.only)))
    from kernel_cases import sass_cases

    compiled: list = []
    capture(compiled)
    results = []
    for case in sass_cases():
        if args.only not in case.name:
            continue
        compiled.clear()
        case.launch()
        for name, kernel, options in compiled:
            report = {"case": case.name, "kernel": name, **inspect(kernel)}
            if weights := case.weights_per_loop.get(name):
                lanes = options["num_warps"] * 32
                per_weight = report["loop_instructions"] * lanes / weights
                report["lane_instructions_per_weight"] = round(per_weight, 2)
            results.append(report)
            print(
                f"{case.name:28} {name:24} {report['registers']:4} regs {report['spills']:3} spills"
                f" {report['shared_bytes']:6} B shared loop {report['loop_instructions']:4}"
                f"  {report.get('lane_instructions_per_weight', '')}  {' '.join(report['mma'])}",
                flush=True,
            )
            if args.only:
                print("   ", report["loop_ops"], report["global_loads"])
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
