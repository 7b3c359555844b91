"""Held-out loss per source, draft acceptance, and answers to the evaluation prompts.

Owns: evaluation during training. Knows nothing of: optimisers. Nothing here may change the model.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training import losses, ops
from training.batches import SourceRows, sources_of, stack
from training.continuations import rows_of, split_given
from training.model import Batch, Model, alignment


def to_batch(rows: np.ndarray, device: torch.device) -> Batch:
    """Host rows [3 or 4, B, T] -> device batch; the fourth says where the drafter learns."""
    t = torch.from_numpy(rows)
    if device.type == "cuda":
        t = t.pin_memory().to(device, non_blocking=True)
    own = t[3] > 0 if t.shape[0] > 3 else None
    return Batch(t[0], t[1], t[2], own=own)


class HeldOut:
    """A few fixed rows of every held-out source."""

    def __init__(self, corpus: Any, model: Model, length: int, rows: int) -> None:
        self.parts: list[tuple[str, np.ndarray]] = []
        a = model.args
        for s in sources_of(corpus):
            if s.split != "val" or s.end - s.start < 2:
                continue
            maker = SourceRows(corpus, s, length, alignment(a), a.pad_token_id, 0)
            self.parts.append((s.name, stack([maker.next_row() for _ in range(rows)])))
        self.shape = (length, alignment(a), a.pad_token_id)

    def add_continuations(self, held_out: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
        """Also the model's own greedy texts, as `own-KIND`: 4 rows of each kind."""
        self.parts = [x for x in self.parts if not x[0].startswith("own-")]
        for kind, (tokens, starts) in held_out.items():
            maker = rows_of(tokens, starts, *self.shape, 0)
            self.parts.append((f"own-{kind}", split_given([maker.next_row() for _ in range(4)])))

    @torch.no_grad()
    def run(self, model: Model) -> dict[str, dict[str, float]]:
        """Per source: cross entropy per token, accuracy, accepted length."""
        device = model.token_map.device
        out = {}
        for name, rows in self.parts:
            batch = to_batch(rows, device)
            result = model(batch)
            logits = model.logits(result.hidden)
            target, weight = losses.next_tokens(batch)
            ce, _ = losses.token_loss(logits.flatten(0, 1), target.flatten())
            hit = (logits.argmax(-1) == target).float()
            anchors, valid = losses.pick_anchors(batch, weight, 32)
            length = losses.accepted_lengths(model, batch, result.taps, logits, anchors, valid)
            total = weight.sum().clamp(min=1)
            out[name] = {
                "ce": round(float((ce * weight.flatten()).sum() / total), 4),
                "acc": round(float((hit * weight).sum() / total), 4),
                "accepted": round(float(length), 3),
            }
        return out


def _pad_batch(lists: list[list[int]], multiple: int, pad: int, device: torch.device) -> Batch:
    longest = max(len(x) for x in lists)
    width = -(-longest // multiple) * multiple
    ids = torch.full((len(lists), width), pad, dtype=torch.int64)
    seg = torch.full((len(lists), width), -1, dtype=torch.int64)
    for k, x in enumerate(lists):
        ids[k, : len(x)] = torch.tensor(x)
        seg[k, : len(x)] = 0
    pos = torch.arange(width).expand(len(lists), -1)
    return Batch(ids.to(device), pos.to(device), seg.to(device))


@torch.no_grad()
def generate(model: Model, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy answers by full recomputation (all prompts in one batch)."""
    a = model.args
    device = model.token_map.device
    multiple = a.sliding_window
    room = a.max_position_embeddings
    lists = [list(p) for p in prompts]
    done = [False] * len(lists)
    batch = _pad_batch(
        [x + [a.pad_token_id] * min(new_tokens, room - len(x)) for x in lists],
        multiple,
        a.pad_token_id,
        device,
    )
    ids, ends = batch.tokens, torch.tensor([len(x) for x in lists], device=device)
    row = torch.arange(len(lists), device=device)
    steps = min(new_tokens, room - max(len(x) for x in lists))
    chosen = []
    for _ in range(steps):
        hidden = model(batch).hidden[row, ends - 1]
        token = model.logits(hidden).argmax(-1)
        ids[row, ends] = token
        ends = ends + 1
        chosen.append(token)
    columns: list[list[int]] = torch.stack(chosen, 1).tolist() if chosen else [[] for _ in lists]
    answers = []
    for k, tokens in enumerate(columns):
        if a.eos_token_id in tokens:
            tokens = tokens[: tokens.index(a.eos_token_id) + 1]
            done[k] = True
        answers.append(tokens)
    return answers


def _field(item: dict[str, Any], *names: str) -> Any:
    for name in names:
        if item.get(name) is not None:
            return item[name]
    return None


class Prompts:
    """Evaluation prompts (token ids, class, expected answer as ids where there is one)."""

    def __init__(self, path: Path, tokenizer: Path | None, limit: int) -> None:
        raw = json.loads(path.read_text())
        items = raw if isinstance(raw, list) else raw["prompts"]
        self.encode, self.decode = _tokenizer(tokenizer)
        self.items = []
        for item in items:
            ids = _field(item, "token_ids", "ids", "tokens", "prompt_ids", "prompt")
            if not isinstance(ids, list) or not 0 < len(ids) <= limit:
                continue
            want = _field(item, "expected_ids", "expected_token_ids", "answer_ids", "expected")
            text = _field(item, "expected_text", "expected", "answer")
            if not isinstance(want, list):
                want = self.encode(text) if isinstance(text, str) and self.encode else None
            kind = str(_field(item, "class", "kind", "name") or "?")
            self.items.append((kind, ids, want))

    def forced(self, model: Model) -> dict[str, list[float]]:
        """Teacher-forced argmax accuracy on expected answers: per class [tokens, all correct]."""
        known = [(k, p, w) for k, p, w in self.items if w]
        room = model.args.max_position_embeddings
        known = [x for x in known if len(x[1]) + len(x[2]) <= room]
        sums: dict[str, list[float]] = {}
        for at in range(0, len(known), 16):
            part = known[at : at + 16]
            batch = _pad_batch(
                [p + w for _, p, w in part],
                model.args.sliding_window,
                model.args.pad_token_id,
                model.token_map.device,
            )
            with torch.no_grad():
                best = model.logits(model(batch).hidden).argmax(-1).cpu()
            for k, (kind, p, w) in enumerate(part):
                got = best[k, len(p) - 1 : len(p) + len(w) - 1]
                same = (got == torch.tensor(w)).float()
                s = sums.setdefault(kind, [0.0, 0.0, 0.0])
                s[0] += float(same.mean())
                s[1] += float(same.min())
                s[2] += 1
        return {k: [round(s[0] / s[2], 3), round(s[1] / s[2], 3)] for k, s in sums.items()}

    def samples(self, model: Model, per_class: int, new_tokens: int) -> list[str]:
        """Short greedy answers, as text where a tokenizer is at hand."""
        taken: dict[str, int] = {}
        chosen = []
        for kind, ids, want in self.items:
            if taken.get(kind, 0) < per_class:
                taken[kind] = taken.get(kind, 0) + 1
                chosen.append((kind, ids, want))
        if not chosen:
            return []
        answers = generate(model, [ids for _, ids, _ in chosen], new_tokens)
        lines = []
        for (kind, ids, _), answer in zip(chosen, answers, strict=True):
            if self.decode:
                lines.append(f"[{kind}] {self.decode(ids)[-160:]!r} -> {self.decode(answer)!r}")
            else:
                lines.append(f"[{kind}] {ids[-20:]} -> {answer}")
        return lines


def _tokenizer(
    path: Path | None,
) -> tuple[Callable[[str], list[int]] | None, Callable[[list[int]], str] | None]:
    if path is None or not path.exists():
        return None, None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None, None
    tok = Tokenizer.from_file(str(path))
    return (
        lambda text: tok.encode(text, add_special_tokens=False).ids,
        lambda ids: tok.decode(ids, skip_special_tokens=False),
    )


def quietly(fn: Callable[[], Any], log: Callable[[str], None]) -> Any:
    """Run an evaluation eagerly; an error is logged and never stops training."""
    compiled = ops.is_compiled()
    ops.set_compiled(False)
    try:
        return fn()
    except Exception as e:
        log(f"evaluation failed: {type(e).__name__}: {e}")
        return None
    finally:
        ops.set_compiled(compiled)


def mean_of(result: dict[str, dict[str, float]] | None, key: str) -> float | None:
    """Unweighted mean over sources."""
    if not result:
        return None
    return round(sum(v[key] for v in result.values()) / len(result), 4)
