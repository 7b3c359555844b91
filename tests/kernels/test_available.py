"""Kernels are optional at run time; the tests of this folder are not, where triton is installed."""

import subprocess
import sys

import pytest


def test_triton_is_there():
    triton = pytest.importorskip(
        "triton", reason="no triton: the kernel tests were not run (pip install 'deepdraft[gpu]')"
    )
    major, minor = map(int, triton.__version__.split(".")[:2])
    assert (major, minor) >= (3, 6)


def test_operations_import_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None; "
        "import deepdraft.ops.gemm, deepdraft.models.deepseek_v41"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
