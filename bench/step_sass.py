"""Compile every launch of the decode step for sm_90, without a GPU.

    python bench/step_sass.py [--model golden|demo|published] [--layers N]

The step runs with tensors that are not computed on, so what compiles here is what a GPU host will
compile: kernels that do not, and kernels that spill, are listed. Needs torch, triton.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import kernels_sass
import torch
from triton.runtime.jit import JITFunction

from deepdraft.kernels import runtime

ROOT = Path(__file__).resolve().parents[1]


def report(compiled: list) -> None:
    """How many kernels there are of each name, and which spill."""
    names: dict[str, set] = {}
    spills = set()
    for name, kernel, _ in compiled:
        if kernel.hash not in names.setdefault(name, set()):
            names[name].add(kernel.hash)
            if kernels_sass.inspect(kernel)["spills"]:
                spills.add(name)
    print(f"  {len(compiled)} launches; kernels:", {n: len(h) for n, h in sorted(names.items())})
    if spills:
        print("  spills:", sorted(spills))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="golden", choices=("golden", "demo", "published"))
    parser.add_argument("--layers", type=int, default=26)
    args = parser.parse_args()
    runtime.check = lambda *tensors: tensors[0].device
    compiled: list = []
    kernels_sass.capture(compiled)
    run, broken = JITFunction.run, {}
    begin = time.perf_counter()

    def keep_going(self, *arguments, **options):
        try:
            return run(self, *arguments, **options)
        except Exception as error:
            shown = {k: v for k, v in options.items() if isinstance(v, int | str)}
            broken.setdefault(f"{self.fn.__name__} {shown}", str(error)[:600])

    JITFunction.run = keep_going
    # After the patches: kernel modules take what they launch with at import.
    from deepdraft.checkpoint.config import parse_args
    from deepdraft.engine.dummy import DummyTensor, DummyWeights, dummy_args
    from deepdraft.kernels import layout
    from deepdraft.kernels.accept import Reports
    from deepdraft.models.v41_buffers import DeviceCaches
    from deepdraft.models.v41_draft import DeviceDrafter
    from deepdraft.models.v41_loop import DeviceLoop, DeviceSettings
    from deepdraft.models.v41_step import DeviceStep
    from deepdraft.models.v41_weights import load_weights

    class Shapes(DummyWeights):
        """Tensors without storage."""

        def packed(self, name: str) -> DummyTensor:
            entry = self.table[name]
            if entry.scale_name is None:
                return DummyTensor(self.tensor(name, torch.bfloat16), None)
            shape = self.table[entry.scale_name].shape
            values, scales = (
                torch.empty(s, dtype=torch.uint8, device="meta") for s in (entry.shape, shape)
            )
            return DummyTensor(values, scales)

        def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(self.table[name].shape, dtype=dtype, device="meta")

    layout._checked_scales = lambda scales: scales
    places = {
        "golden": ROOT / "tests/golden/v41-a/checkpoint/config.json",
        "demo": ROOT / "deepdraft/demo/checkpoint/config.json",
        "published": ROOT / "tests/checkpoint/data/v41-config.json",
    }
    shape = parse_args(json.loads(places[args.model].read_text()))
    if args.model == "published":
        shape = dummy_args(shape, layers=args.layers, expert_pool=96, engram_rows=1000)
    weights = load_weights(
        shape, Shapes(shape, device="cpu"), range(shape.vocab_size), device="meta"
    )
    caches = DeviceCaches(
        shape,
        num_sequences=1 if args.model == "published" else 6,
        max_tokens=36864 if args.model == "published" else 1024,
        spare=16,
        device="meta",
    )
    for width in (6, 1):
        loop = DeviceLoop(
            DeviceStep(weights, caches),
            DeviceSettings(1, "meta"),
            sequences=1,
            width=width,
            drafter=DeviceDrafter(weights, caches) if width > 1 else None,
        )
        ring, counter = loop.reports.ring, loop.reports.step
        loop.reports = Reports(ring.to("meta"), counter.to("meta"), counter)
        compiled.clear()
        loop.run()
        print(f"{args.model} width {width}, {time.perf_counter() - begin:.0f} s")
        report(compiled)
    for name, error in broken.items():
        print("BROKEN", name, error)
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
