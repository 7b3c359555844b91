"""What the compiler makes of the published shapes on sm_90, without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LANE_INSTRUCTIONS = {
    # kernels.md 3.3: an H200 has 4.1 lane instructions a weight to spend on MXFP4, 7.8 on FP8.
    # Low tiles, which small slices need, have more around each weight than high ones (2.9).
    "experts up": 3.7,
    "experts down": 3.8,
    "fp8 ": 3.6,
    "fp8xbf16": 4.5,
    "bf16 head": 1.3,
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    out = tmp_path_factory.mktemp("sass") / "kernels.json"
    script = ROOT / "bench" / "kernels_sass.py"
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(out.parent)}
    subprocess.run(
        [sys.executable, script, "--json", out], check=True, env=environment, capture_output=True
    )
    return json.loads(out.read_text())


@pytest.mark.full
def test_nothing_spills(compiled):
    assert [r["case"] for r in compiled if r["spills"]] == []
    assert len({r["kernel"] for r in compiled}) >= 20


@pytest.mark.full
@pytest.mark.parametrize("name", LANE_INSTRUCTIONS)
def test_instructions_for_each_weight(compiled, name):
    found = [
        r["lane_instructions_per_weight"]
        for r in compiled
        if r["case"].startswith(name) and "lane_instructions_per_weight" in r
    ]
    assert found and max(found) <= LANE_INSTRUCTIONS[name], found


@pytest.mark.full
def test_weights_are_read_sixteen_bytes_at_a_time(compiled):
    for report in compiled:
        if "lane_instructions_per_weight" in report:
            loads = report["global_loads"]
            wide = sum(
                n for name, n in loads.items() if name.startswith("LDGSTS") and "128" in name
            )
            assert wide, (report["case"], loads)
