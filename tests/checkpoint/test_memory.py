"""Peak memory of a full load: the loaded tensors and a bounded working set, whatever the size."""

import json
import subprocess
import sys
from math import prod

from deepdraft.checkpoint.config import parse_args
from deepdraft.checkpoint.names import tensor_table
from tests.checkpoint.tiny import tiny_config, write_shard

LOAD = """
import json, resource, sys
import torch
from deepdraft.checkpoint.reader import Checkpoint

torch.set_num_threads(1)
checkpoint = Checkpoint.open(sys.argv[1])
checkpoint.tensor("norm.weight")
with open("/proc/self/statm") as file:
    before = int(file.read().split()[1]) * resource.getpagesize()
loaded = [
    checkpoint.tensor(name, torch.bfloat16)
    for name, entry in checkpoint.table.items()
    if entry.format != "scale"
]
# Not ru_maxrss: across exec that keeps the peak of the process that started this one.
with open("/proc/self/status") as file:
    peak = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
print(json.dumps([before, peak, sum(t.nbytes for t in loaded)]))
"""
WORKING_SET = 40 << 20


def write_sparse(directory, config):
    """A checkpoint of zeros whose file takes no disk space."""
    header, position = {}, 0
    for entry in tensor_table(parse_args(config)).values():
        end = position + entry.num_bytes
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [position, end],
        }
        position = end
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    path = directory / "model.safetensors"
    write_shard(path, header, b"")
    with path.open("ab") as file:
        file.truncate(file.tell() + position)
    return position


def test_peak_memory_of_a_full_load(tmp_path):
    primes = (1_000_003, 1_000_033, 1_000_037)
    config = tiny_config(
        vocab_size=1 << 19, engram_vocab_size=1_000_000, engram_num_embeddings=[sum(primes)]
    )
    stored = write_sparse(tmp_path / "sparse", config)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, tmp_path / "sparse"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    before, peak, loaded = json.loads(done.stdout)
    assert loaded == 2 * sum(
        prod(e.value_shape)
        for e in tensor_table(parse_args(config)).values()
        if e.format != "scale"
    )
    # Pages of the file that stayed mapped would not fit into the working set.
    assert stored > 5 * WORKING_SET
    assert peak - before - loaded < WORKING_SET, f"{(peak - before - loaded) / 2**20:.0f} MiB"
