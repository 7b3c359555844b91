"""Converting to the pre-sharded layout, reading it back at speed, and what may go wrong."""

import itertools
import json
import os
from pathlib import Path

import pytest
import torch

from deepdraft.checkpoint import convert as convert_module
from deepdraft.checkpoint import fast_read, progress
from deepdraft.checkpoint.convert import JOURNAL, convert, verify
from deepdraft.checkpoint.device_source import DeviceSource
from deepdraft.checkpoint.fast_read import ParallelReader, Piece
from deepdraft.checkpoint.presharded import MANIFEST, open_rank, read_manifest, shard_plan
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.cli.main import main
from deepdraft.errors import CheckpointError, ConfigError
from deepdraft.parallel.shards import SlicedSource
from tests.checkpoint.tiny import patch_tensor, write_tiny
from tests.parallel.tiny import write_of_eight


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Checkpoint:
    return write_of_eight(tmp_path_factory.mktemp("published") / "of-eight")


@pytest.fixture(scope="module")
def converted(published, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "of-four"
    convert(published, out, 4)
    return out


def test_every_part_is_the_slice_of_the_published_tensor(published, converted):
    plan = shard_plan(published.args, 4)
    held = dict.fromkeys(published.table, 0)
    for rank in range(4):
        part, sliced = open_rank(converted, rank, 4), SlicedSource(published, plan, rank)
        for name, entry in part.table.items():
            if entry.format == "scale":
                continue
            own, cut = part.packed(name), sliced.packed(name)
            assert torch.equal(own.values, cut.values), name
            assert (own.scales is None) == (cut.scales is None)
            assert own.scales is None or torch.equal(own.scales, cut.scales), name
            held[name] += own.values.numel()
    for name, entry in published.table.items():
        if entry.format != "scale":
            whole = published.packed(name).values.numel()
            assert held[name] == (whole if plan.cut(name) else 4 * whole), name


def test_hash_tables_are_split_whole(published):
    plan = shard_plan(published.args, 8)
    rows = [plan.bounds("layers.1.engram.embed.weight", 0, rank) for rank in range(8)]
    assert rows[0][0] == 0 and rows[-1][1] == published.args.engram_num_embeddings[0]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(rows))
    assert len({stop - start for start, stop in rows}) > 1  # primes: no two parts are alike


def test_tensors_start_where_direct_reads_want_them(converted):
    part = open_rank(converted, 1, 4)
    for name, place in part.places.items():
        size = place.end - place.start
        assert place.start % min(size & -size, 4096) == 0, name


def test_verify_and_a_flipped_bit(converted, tmp_path):
    assert verify(converted) == sum(n for n, _ in read_manifest(converted).files.values())
    victim = converted / "rank-2" / "layers.1.safetensors"
    raw = bytearray(victim.read_bytes())
    raw[-5] ^= 1
    sound = victim.read_bytes()
    victim.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"rank-2.layers\.1.* is not what"):
        verify(converted)
    victim.write_bytes(sound)


def test_it_goes_on_after_an_interruption(published, converted, tmp_path, monkeypatch):
    out, seen = tmp_path / "out", []
    write = convert_module._write_unit

    def interrupted(source, plan, rank, unit, path):
        seen.append(f"rank-{rank}/{unit}.safetensors")
        if len(seen) == 6:
            path.parent.mkdir(exist_ok=True)
            path.with_name(path.name + ".partial").write_bytes(b"half")
            raise KeyboardInterrupt
        return write(source, plan, rank, unit, path)

    monkeypatch.setattr(convert_module, "_write_unit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(published, out, 4)
    assert not (out / MANIFEST).exists()
    with pytest.raises(CheckpointError, match=r"sharded\.json cannot be read"):
        open_rank(out, 0, 4)
    with (out / JOURNAL).open("a") as journal:
        journal.write('{"file": "rank-0/la')  # the machine went down while it was written
    (out / seen[0]).write_bytes(b"cut off")
    first, seen[:] = list(seen), ["-"] * 10
    convert(published, out, 4)
    again = seen[10:]
    assert not set(again) & set(first[1:5]) and {first[0], first[5]} <= set(again)
    assert verify(out) > 0 and not list(out.rglob("*.partial")) and not (out / JOURNAL).exists()
    assert read_manifest(out).files == read_manifest(converted).files


def test_a_second_conversion_and_other_directories(published, converted, tmp_path):
    before = (converted / MANIFEST).stat().st_mtime_ns
    assert convert(published, converted, 4) == read_manifest(converted)
    assert (converted / MANIFEST).stat().st_mtime_ns == before
    with pytest.raises(CheckpointError, match="another number of ranks"):
        convert(published, converted, 2)
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty"):
        convert(published, tmp_path, 2)
    with pytest.raises(ConfigError, match=r"split over 3 ranks.*Sizes that work: 1, 2, 4, 8"):
        convert(published, tmp_path / "three", 3)


def test_too_little_room(published, tmp_path, monkeypatch):
    usage = convert_module.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"still takes .* has 0\.0 GB free"):
        convert(published, tmp_path / "out", 2)


def test_nan_is_found(tmp_path):
    write_tiny(tmp_path / "tiny")
    patch_tensor(tmp_path / "tiny", "layers.1.attn.wq_b.scale", 0, b"\xff")
    source = Checkpoint.open(tmp_path / "tiny")
    with pytest.raises(CheckpointError, match=r"layers\.1\.attn\.wq_b\.scale .* holds NaN"):
        convert(source, tmp_path / "out", 1)
    patch_tensor(tmp_path / "tiny", "layers.0.attn_norm.weight", 0, b"\xc0\x7f")
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn_norm\.weight .* holds NaN"):
        convert(Checkpoint.open(tmp_path / "tiny"), tmp_path / "out2", 1)


def test_wrong_ranks_and_damaged_files(converted, tmp_path):
    with pytest.raises(CheckpointError, match="converted for 4 ranks, not 2: give --tp 4"):
        open_rank(converted, 0, 2)
    manifest = json.loads((converted / MANIFEST).read_text())
    for change, told in (
        ({"version": 9}, "version 9"),
        ({"files": {"../../etc/x": [1, ""]}}, "no file of this directory"),
        ({"files": [1]}, "malformed"),
    ):
        (tmp_path / MANIFEST).write_text(json.dumps(manifest | change))
        with pytest.raises(CheckpointError, match=told):
            read_manifest(tmp_path)
    victim = converted / "rank-3" / "rest.safetensors"
    sound = victim.read_bytes()
    victim.write_bytes(sound[:-1])
    with pytest.raises(CheckpointError, match=r"rest\.safetensors has \d+ bytes, sharded\.json"):
        open_rank(converted, 3, 4)
    victim.write_bytes(sound)


# ---- reading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("chunk", [4096, 1 << 20])
def test_pieces_arrive_whatever_the_chunks(direct, chunk, tmp_path):
    """Pieces that begin and end anywhere, across chunks and within one, of two files."""
    files = []
    for number, size in enumerate((300_001, 4096)):
        raw = os.urandom(size)
        path = tmp_path / str(number)
        path.write_bytes(raw)
        starts = [0, 3, 4095, 4096, 70_000, 299_990][: 6 if number == 0 else 3]
        ends = [3, 4095, 4096, 69_000, 299_990, 300_001]
        pieces = [
            Piece(a, torch.zeros(b - a, dtype=torch.uint8))
            for a, b in zip(starts, ends, strict=False)
        ]
        files.append((path, raw, pieces))
    read: list[int] = []
    with ParallelReader(threads=3, chunk_bytes=chunk, direct=direct) as reader:
        jobs = [(path, pieces) for path, _, pieces in files]
        result = reader.read(jobs, progress=read.append)
        assert reader.read(jobs[1:]).num_bytes == 4096  # the threads are kept
    for _, raw, pieces in files:
        for piece in pieces:
            assert bytes(piece.tensor.numpy()) == raw[piece.start :][: piece.tensor.numel()]
    total = sum(p.tensor.numel() for *_, pieces in files for p in pieces)
    assert result.num_bytes == sum(read) == total


def test_scratch_reads_and_leaves_the_tensors_alone(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 10_000)
    piece = Piece(0, torch.zeros(10_000, dtype=torch.uint8))
    with ParallelReader(scratch=True) as reader:
        assert reader.read([(tmp_path / "a", [piece])]).num_bytes == 10_000
    assert not piece.tensor.any()


def test_files_that_are_short_or_fail(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"x" * 100)
    with ParallelReader() as reader:
        with pytest.raises(CheckpointError, match="shorter than its header says"):
            reader.read([(tmp_path / "a", [Piece(50, torch.zeros(51, dtype=torch.uint8))])])
        with pytest.raises(CheckpointError, match=r"cannot read .*nothing"):
            reader.read([(tmp_path / "nothing", [])])

        def broken(*_):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(fast_read.os, "preadv", broken)
        with pytest.raises(CheckpointError, match=r"cannot read .*a: Input/output error"):
            reader.read([(tmp_path / "a", [Piece(0, torch.zeros(5, dtype=torch.uint8))])])


def test_no_direct_reads_on_this_file_system(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"y" * 5000)
    real = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(fast_read.os, "open", refuse)
    piece = Piece(1, torch.zeros(4999, dtype=torch.uint8))
    with ParallelReader() as reader:
        assert not reader.read([(tmp_path / "a", [piece])]).direct
    assert (piece.tensor == ord("y")).all()


@pytest.mark.parametrize("order", [1, -1])
def test_a_device_source_gives_every_tensor(order, converted):
    """In the model's order and backwards; progress ends at the whole."""
    part, seen = open_rank(converted, 2, 4), []
    names = [n for n, e in part.table.items() if e.format != "scale"][::order]
    with DeviceSource(part, "cpu", progress=lambda a, b: seen.append((a, b))) as source:
        for name in names:
            own, stored = source.packed(name), part.packed(name)
            assert torch.equal(own.values, stored.values), name
            assert own.scales is None or torch.equal(own.scales, stored.scales), name
        assert torch.equal(source.tensor(names[5]), part.tensor(names[5]))
        values, scales = source.stack("layers.2.ffn.experts.w2.weight")
        one = part.packed("layers.2.ffn.experts.1.w2.weight")
        assert torch.equal(values[1], one.values) and torch.equal(scales[1], one.scales)
        with pytest.raises(CheckpointError, match=r"has no tensor layers\.9"):
            source.packed("layers.9.attn.wo_b.weight")
    assert seen[-1][0] >= seen[-1][1] == sum(e.num_bytes for e in part.table.values())
    if order == 1:
        assert (source.total_bytes, source.total_bytes) in seen  # nothing was read twice


def test_bench_load_compares_both_ways(converted, capsys):
    assert main(["bench", "load", str(converted), "--runs", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 4 and found["rank"] == 0
    assert len(found["device_s"]) == len(found["scratch_s"]) == 2
    assert found["share"] > 0 and found["machine"]
    assert main(["bench", "load", str(converted.parent)]) == 2
    assert "sharded.json cannot be read" in capsys.readouterr().err


def test_the_command_converts_checks_and_says_what_is_wrong(published, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["convert", str(published.path), str(out), "--tp", "8"]) == 0
    assert main(["convert", "--check", str(out)]) == 0
    said = capsys.readouterr().out
    assert "8 ranks, " in said and "every digest as it was written" in said
    victim = out / "rank-5" / "rest.safetensors"
    victim.write_bytes(victim.read_bytes()[:-1] + b"\x7f")
    for arguments, told in (
        (["--check", str(out)], "rank-5/rest.safetensors is not what sharded.json says"),
        ([str(published.path), str(out), "--tp", "2"], "another number of ranks"),
        ([str(published.path), str(tmp_path / "b"), "--tp", "3"], "Sizes that work: 1, 2, 4, 8"),
        ([str(tmp_path / "none"), str(tmp_path / "b"), "--tp", "2"], "no checkpoint directory"),
        ([str(published.path)], "give OUT and --tp N"),
        (["--check", str(out), "--tp", "2"], "takes the converted directory alone"),
    ):
        assert main(["convert", *arguments]) == 2
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("tty", [True, False])
def test_progress_is_drawn_on_a_terminal_and_told_elsewhere(tty, monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: tty, raising=False)
    bar = progress.Bar("read")
    for done in range(0, 41):
        now[0] += 1
        bar(done * 10**9, 40 * 10**9)
    bar(41 * 10**9, 40 * 10**9)  # once it was whole, nothing is drawn any more
    said = capsys.readouterr().err
    if tty:
        assert "\rread 20.0 of 40.0 GB, 0.95 GB/s [###############               ]" in said
        assert said.endswith("\n") and said.count("\n") == 1
    else:
        assert said.splitlines()[0] == "read 10.0 of 40.0 GB, 0.91 GB/s"
        assert 3 <= said.count("\n") <= 4 and "\r" not in said


@pytest.mark.parametrize("tty", [True, False])
def test_a_bar_that_does_not_get_to_the_end_ends_its_line(tty, monkeypatch, capsys):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: tty, raising=False)
    with progress.Bar("read") as bar:
        bar(2 * 10**6, 4 * 10**6)
        bar(3 * 10**6, 4 * 10**6)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("read 3.0 of 4.0 MB") if tty else not lines
