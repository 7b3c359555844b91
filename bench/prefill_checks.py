"""Rows of a long prompt against float64: checks of prefill_gpu.py, at any sizes.

Owns: random caches and rows at chosen positions, what each kernel gives for them, the same in
float64 from the same inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepdraft.arch import V41Args
from deepdraft.kernels import cache as cache_kernels
from deepdraft.kernels import index, prefill_attention, prefill_index
from deepdraft.models.v41_prefill_layers import Plans
from deepdraft.ops import cache
from deepdraft.ops import index as reference
from deepdraft.ops.prefill import running_sink_attention

GAP = 2.0**-18
"""Of a row's largest score: what sums in float32 may differ by, 160 terms of two signs."""


def positions(limit: int, rows: int, seed: int = 0) -> list[int]:
    """Around the thresholds and at random, below `limit`."""
    generator = torch.Generator().manual_seed(seed)
    around = [t + d for t in (1024, 16384, 65536, limit) for d in (-2, -1, 0, 1)]
    fixed = [p for p in around if 0 <= p < limit][:rows]
    more = torch.randint(0, limit, (rows - len(fixed),), generator=generator).tolist()
    return sorted(fixed + more)


_SCALES = {"window": (119, 121), "main": (40, 56), "index": (125, 128)}


def random_records(kind: str, count: int, channels: int, device: str, seed: int) -> Tensor:
    """Random codes, scales of the size that normed values have."""
    generator = torch.Generator(device).manual_seed(seed)
    size = count, cache_kernels.record_bytes(kind, channels)
    out = torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=generator)
    codes = channels if kind == "window" else channels // 2
    if kind == "window":
        out[:, :codes].bitwise_and_(0xF7)  # no NaN
    scales = out[:, codes:].shape
    out[:, codes:] = torch.randint(
        *_SCALES[kind], scales, dtype=torch.uint8, device=device, generator=generator
    )
    return out


def check_index(
    args: V41Args, device: str, *, tokens: int, rows: int, plans: Plans
) -> dict[str, object]:
    """Sets at ratio 2: equal to those of float64 scores except at narrow gaps."""
    heads, width, k = args.index_n_heads, args.index_head_dim, args.index_topk
    generator = torch.Generator(device).manual_seed(1)
    keys = random_records("index", tokens // 2, width, device, 2)
    at = positions(tokens, rows)
    reach = torch.tensor([(p + 1) // 2 for p in at], dtype=torch.int32, device=device)
    raw = torch.randn(rows, heads * width, device=device, generator=generator).bfloat16()
    turn = torch.randn(rows, args.qk_rope_head_dim // 2, device=device, generator=generator)
    q = index.index_queries(raw, turn.cos(), turn.sin(), heads=heads, channels=width)
    weights = torch.randn(rows, heads, device=device, generator=generator)
    base = torch.zeros_like(reach)
    scale = (heads * width) ** -0.5
    options = {"weight_scale": scale, "skip": k, "plan": plans.index}
    values = prefill_index.key_values(
        keys, torch.empty(len(keys), width, dtype=torch.bfloat16, device=device)
    )
    packed, unpacked = (
        prefill_index.stream_top(q, weights, used, base, reach, k, **options)
        for used in (keys, values)
    )
    got = packed if prefill_index.reads_records(q.device, heads, width) else unpacked
    w = cache.bf16(cache.bf16(weights).float() * scale).double()
    unequal = beyond = 0
    for row in range(rows):
        n = int(reach[row])
        scores = torch.empty(n, dtype=torch.float64, device=device)
        for first in range(0, n, 1 << 16):
            some = slice(first, min(first + (1 << 16), n))
            stored = cache.unpack("index", keys[some], torch.float64)
            scores[some] = reference.index_scores(
                q[row : row + 1].double(), w[row : row + 1], stored
            )[0]
        want = set(reference.select_top(scores.unsqueeze(0), k)[0].tolist()) - {-1}
        ours = set(got.entries[row].tolist()) - {-1}
        if n <= k:
            want = set(range(n))
        unequal += ours != want
        left = sorted(scores[list(ours - want)].tolist())
        right = sorted(scores[list(want - ours)].tolist())
        top = float(scores.abs().max()) if n else 0.0
        if len(left) != len(right) or any(
            abs(a - b) > GAP * top for a, b in zip(left, right, strict=False)
        ):
            beyond += 1
    return {
        "rows": rows,
        "positions": [at[0], at[-1]],
        "unequal": unequal,
        "beyond_the_gap": beyond,
        "rows_with_the_same_set_of_packed_and_unpacked_keys": int(
            (packed.entries == unpacked.entries).all(1).sum()
        ),
    }


def check_attention(
    args: V41Args, device: str, *, tokens: int, rows: int, plans: Plans
) -> dict[str, object]:
    """Outputs of rows whose entries lie anywhere in a long sequence, relative L2 and the worst
    element against float64."""
    heads, c, k = args.num_attention_heads, args.head_dim, args.index_topk
    window = args.sliding_window
    generator = torch.Generator(device).manual_seed(3)
    main = random_records("main", tokens // 2, c, device, 4)
    own = random_records("window", rows + window - 1, c, device, 5)
    q = torch.randn(rows, heads * c, device=device, generator=generator).bfloat16()
    turn = torch.randn(rows, args.qk_rope_head_dim // 2, device=device, generator=generator)
    sink = torch.randn(heads, device=device, generator=generator)
    reach = torch.tensor([(p + 1) // 2 for p in positions(tokens, rows)], device=device)
    lists = torch.full((rows, k), -1, dtype=torch.int32, device=device)
    for row, n in enumerate(reach.tolist()):
        some = torch.randint(0, max(n, 1), (4 * k,), device=device, generator=generator).unique()
        some = some[: min(k, n)]
        lists[row, : len(some)] = some.int()
    first = torch.tensor([max(0, window - 1 - 40 * r) for r in range(rows)], device=device).int()
    values = prefill_attention.main_values(
        main, torch.empty(len(main), c, dtype=torch.bfloat16, device=device)
    )
    got, packed = (
        prefill_attention.attend_rows(
            q, turn.cos(), turn.sin(), prefill_attention.window_values(own), first, sink,
            places=window, scale=c**-0.5, main=used, main_rows=lists, plan=plans.attention,
        )
        for used in (values, main)
    )  # fmt: skip
    difference = size = worst = 0.0
    turns = plans.attention.keys
    for row in range(rows):
        parts = [cache.unpack("window", own[row : row + window], torch.float64)]
        parts.append(cache.unpack("main", main[lists[row].clamp(min=0).long()], torch.float64))
        valid = [torch.arange(window, device=device) >= first[row], lists[row] >= 0]
        for i in range(2):
            missing = -parts[i].shape[0] % turns
            parts[i] = torch.nn.functional.pad(parts[i], (0, 0, 0, missing))
            valid[i] = torch.nn.functional.pad(valid[i], (0, missing))
        cos, sin = turn[row : row + 1].double().cos(), turn[row : row + 1].double().sin()
        own_q = q[row : row + 1].double().view(1, heads, c)
        o = running_sink_attention(
            cache.bf16(cache.rotate_pairs(own_q, cos, sin)), torch.cat(parts).unsqueeze(0),
            torch.cat(valid).unsqueeze(0), sink.double(), c**-0.5, turn=turns,
        )  # fmt: skip
        want = cache.bf16(cache.rotate_pairs(cache.bf16(o), cos, -sin))[0]
        error = got[row].double() - want
        difference += float(error.square().sum())
        size += float(want.square().sum())
        worst = max(worst, float(error.abs().max()))
    relative = (difference / max(size, 1e-300)) ** 0.5
    return {
        "rows": rows,
        "relative_L2": round(relative, 6),
        "worst": round(worst, 6),
        "equal_values_of_packed_and_unpacked_entries": round(
            float((got == packed).double().mean()), 5
        ),
    }


def check_cache(args: V41Args, device: str, *, tokens: int, rows: int) -> dict[str, object]:
    """Main records and index keys at long positions: bytes against the reference in float64."""
    c = args.head_dim
    generator = torch.Generator(device).manual_seed(6)
    x = torch.randn(rows, c, device=device, generator=generator).bfloat16()
    norm = torch.rand(c, device=device, generator=generator) + 0.5
    at = torch.tensor(positions(tokens, rows), device=device, dtype=torch.float32)
    turn = at.unsqueeze(1) * torch.rand(
        1, args.qk_rope_head_dim // 2, device=device, generator=generator
    )
    found = {}
    dest = torch.arange(rows, dtype=torch.int32, device=device)
    for kind in ("window", "main"):
        out = torch.zeros(
            rows, cache_kernels.record_bytes(kind, c), dtype=torch.uint8, device=device
        )
        cache_kernels.write_entries(
            kind, x, norm, turn.cos(), turn.sin(), dest, out, norm_eps=args.rms_norm_eps
        )
        want, _ = cache.entry(
            kind, x.double(), norm.double(), turn.cos().double(), turn.sin().double(),
            norm_eps=args.rms_norm_eps,
        )  # fmt: skip
        found[kind] = round(float((out == want).double().mean()), 5)
    return {"rows": rows, "equal_bytes": found}
