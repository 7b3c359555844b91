"""`bench prefill`: what the command refuses before anything is loaded."""

import pytest
from click.testing import CliRunner

from deepdraft.cli.tools import bench

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["prefill", "--rows", "8192,4096"], "one number of --rows"),
        (["prefill", "--rows", "x"], "--rows takes numbers such as 8192"),
        (["prefill", "--prefill", "1K"], "--prefill takes numbers such as 1024,8192"),
        (["drafted", "--rows", "8"], "are for bench step and prefill"),
    ],
)
def test_wrong_use_is_told(arguments, says):
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == 2 and says in result.output
