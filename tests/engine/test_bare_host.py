"""A GPU host has torch, Triton, numpy, safetensors, click, tokenizers; the rest may be absent."""

import subprocess
import sys

ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import {module}
"""
PACKAGES = {
    "blake3", "deepseek_recipe", "llguidance", "msgpack", "msgspec", "redis", "starlette", "uvicorn"
}  # fmt: skip


MODULES = """
    deepdraft.engine.engine deepdraft.engine.gpu_runner deepdraft.proof.bench_lossless
    deepdraft.proof.bench_step deepdraft.proof.golden deepdraft.proof.selftest
""".split()


def test_imports_without_the_servers_packages():
    code = ABSENT.format(absent=PACKAGES, module=", ".join(MODULES))
    subprocess.run([sys.executable, "-c", code], check=True)
