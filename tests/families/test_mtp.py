"""V3's next-token prediction layer as a drafter, against a second, naive forward of both."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy as entropy

from deepdraft.arch import DeepseekV3Args
from deepdraft.checkpoint.families import parse_model_args
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.engine.runner import Runner
from deepdraft.models import model_class
from deepdraft.models.mtp import BLOCK
from deepdraft.ops.rope import frequencies
from deepdraft.proof.tiny_families import tiny_config, tiny_tensors
from deepdraft.proof.tiny_write import write_tiny
from tests.families.drafting import (
    check_drafted_is_plain,
    check_refined,
    stats_of_trained,
    text,
    train,
)

Weights = dict[str, Tensor]


# ---- the naive forward: whole texts, keys and values expanded, one expert after another ---------


def norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w


def turned(x: Tensor, args: DeepseekV3Args) -> Tensor:
    """Adjacent pairs of x [T, H, P] as complex numbers, times e^(i position frequency)."""
    angle = torch.outer(
        torch.arange(x.shape[0], dtype=torch.float64), frequencies(args.rope, x.shape[-1])
    )
    z = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2))
    z = z * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
    return torch.view_as_real(z).reshape(x.shape).to(x.dtype)


def attention(u: Tensor, w: Weights, at: str, args: DeepseekV3Args) -> Tensor:
    n, heads, nope = u.shape[0], args.num_attention_heads, args.qk_nope_head_dim
    q = norm(u @ w[f"{at}.q_a_proj.weight"].T, w[f"{at}.q_a_layernorm.weight"], 1e-6)
    q = (q @ w[f"{at}.q_b_proj.weight"].T).view(n, heads, -1)
    q = torch.cat([q[..., :nope], turned(q[..., nope:], args)], -1)
    kv = u @ w[f"{at}.kv_a_proj_with_mqa.weight"].T
    latent = norm(kv[:, : args.kv_lora_rank], w[f"{at}.kv_a_layernorm.weight"], 1e-6)
    k_v = (latent @ w[f"{at}.kv_b_proj.weight"].T).view(n, heads, -1)
    shared = turned(kv[:, args.kv_lora_rank :].unsqueeze(1), args).expand(-1, heads, -1)
    k = torch.cat([k_v[..., :nope], shared], -1)
    scores = torch.einsum("ihc,jhc->hij", q, k) * args.softmax_scale
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
    out = torch.einsum("hij,jhc->ihc", scores.softmax(-1), k_v[..., nope:])
    return out.reshape(n, -1) @ w[f"{at}.o_proj.weight"].T


def gated(u: Tensor, w: Weights, at: str) -> Tensor:
    gate, up = (u @ w[f"{at}.{n}_proj.weight"].T for n in ("gate", "up"))
    return (gate * gate.sigmoid() * up) @ w[f"{at}.down_proj.weight"].T


def experts(u: Tensor, w: Weights, at: str, args: DeepseekV3Args) -> Tensor:
    r = args.router
    scores = (u @ w[f"{at}.gate.weight"].T).sigmoid()
    biased = (scores + w[f"{at}.gate.e_score_correction_bias"]).detach()
    groups = biased.view(len(u), r.groups, -1).topk(2, -1)[0].sum(-1)
    kept = torch.zeros_like(groups).scatter(1, groups.topk(r.kept_groups, -1)[1], 1.0).bool()
    allowed = kept.repeat_interleave(r.experts // r.groups, 1)
    picks = biased.masked_fill(~allowed, -math.inf).topk(r.picks, -1)[1]
    weight = scores.gather(1, picks)
    weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * r.scale
    gates = torch.zeros_like(scores).scatter(1, picks, weight)
    out = gated(u, w, f"{at}.shared_experts")
    for e in range(r.experts):
        out = out + gates[:, e : e + 1] * gated(u, w, f"{at}.experts.{e}")
    return out


def layer(x: Tensor, w: Weights, number: int, args: DeepseekV3Args) -> Tensor:
    at, eps = f"model.layers.{number}", args.rms_norm_eps
    x = x + attention(norm(x, w[f"{at}.input_layernorm.weight"], eps), w, f"{at}.self_attn", args)
    u = norm(x, w[f"{at}.post_attention_layernorm.weight"], eps)
    if number < args.num_hidden_layers and args.is_dense(number):
        return x + gated(u, w, f"{at}.mlp")
    return x + experts(u, w, f"{at}.mlp", args)


def hidden_states(ids: Tensor, w: Weights, args: DeepseekV3Args) -> Tensor:
    x = w["model.embed_tokens.weight"][ids]
    for number in range(args.num_hidden_layers):
        x = layer(x, w, number, args)
    return norm(x, w["model.norm.weight"], args.rms_norm_eps)


def next_layer(ids: Tensor, h: Tensor, w: Weights, args: DeepseekV3Args) -> Tensor:
    """h' [N, D] for tokens ids [N] behind hidden states h [N, D]."""
    at, eps = f"model.layers.{args.num_hidden_layers}", args.rms_norm_eps
    tokens = norm(w["model.embed_tokens.weight"][ids], w[f"{at}.enorm.weight"], eps)
    both = torch.cat([tokens, norm(h, w[f"{at}.hnorm.weight"], eps)], -1)
    return layer(both @ w[f"{at}.eh_proj.weight"].T, w, args.num_hidden_layers, args)


def drafted_logits(h: Tensor, w: Weights, args: DeepseekV3Args) -> Tensor:
    at = f"model.layers.{args.num_hidden_layers}.shared_head.norm.weight"
    return norm(h, w[at], args.rms_norm_eps) @ w["lm_head.weight"].T


def naive_drafts(ids: list[int], drafts: list[int], w: Weights, args: Any) -> Tensor:
    """Logits of each draft behind a text: those before it go in with h' in the place of h."""
    h = hidden_states(torch.tensor(ids[:-1]), w, args)
    tokens = ids[1:]
    rows = []
    for draft in [*drafts, None]:
        out = next_layer(torch.tensor(tokens), h, w, args)
        rows.append(drafted_logits(out[-1:], w, args)[0])
        if draft is not None:
            tokens, h = [*tokens, draft], torch.cat([h, out[-1:]])
    return torch.stack(rows)


# ---- tests -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(write_tiny(tmp_path_factory.mktemp("mtp") / "m", "v3", mtp=True))


def double(checkpoint: Checkpoint) -> tuple[Any, Weights]:
    model = model_class(checkpoint.args)(
        checkpoint.args, checkpoint, dtype=torch.float64, drafter=True
    )
    weights = {name: checkpoint.tensor(name, torch.float64) for name in checkpoint.table}
    return model, weights


def test_the_model_is_the_naive_one(v3: Checkpoint) -> None:
    model, w = double(v3)
    ids = text(40)
    sequence = model.new_pool(1, 64, slack=64).open()
    ours = model.prefill(sequence, ids, logits="all").logits
    theirs = hidden_states(torch.tensor(ids), w, v3.args) @ w["lm_head.weight"].T
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-10


@pytest.mark.parametrize("cut", [1, 7, 29])
def test_drafts_are_the_naive_ones(v3: Checkpoint, cut: int) -> None:
    model, w = double(v3)
    ids, drafts = text(30), [50, 60]
    pool = model.new_pool(2, 64, slack=8)
    sequence, other = pool.open(), pool.open()
    model.prefill(other, text(12)[::-1], feed_drafter=True)
    model.prefill(sequence, ids[:cut], feed_drafter=True)
    for first in range(cut, 29, 5):  # steps, with tokens that are taken back
        part = ids[first : min(first + 5, 29)]
        out = model.step([(sequence, [*part, 9, 9])])
        sequence.truncate(first + len(part))
        model.drafter.feed_all([(sequence, out.taps[: len(part)], first)])
    expected = naive_drafts(ids, drafts, w, v3.args)
    starts = model.drafter.start([(sequence, ids[29]), (other, 5)], BLOCK)
    check_refined(model.drafter, starts, ids[29], drafts, expected)


@pytest.mark.parametrize("kind", ["v3", "v32"])
def test_drafted_is_plain(kind: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_tiny(tmp_path / "m", kind, mtp=True, storage="published"))
    check_drafted_is_plain(checkpoint, block_size=BLOCK, tokens=30)


def test_parked_and_undone_sequences_draft_on(v3: Checkpoint) -> None:
    runner = Runner.from_checkpoint(v3, None, max_context=128, num_sequences=2, drafter=True)
    a, b = runner.open_sequence(), runner.open_sequence()
    for sequence in (a, b):
        runner.prefill(sequence, text(20), final=True)
        runner.step([(sequence, [5, 6, 7])])
        runner.commit(sequence, 22)
    b = runner.unpark(runner.park(b))
    drafts = runner.draft([(a, 8), (b, 8)])
    logits, _ = runner.refine(drafts, 0, [8, 8])
    assert torch.equal(logits[0], logits[1])
    alone, _ = runner.refine(runner.draft([(a, 8)]), 0, [8])
    assert torch.equal(alone[0], logits[0])
    b.truncate(10)
    with pytest.raises(Exception, match="not known to the drafter"):
        runner.draft([(b, 8)])
    runner.step([(b, [4, 4])])  # and goes on behind the next step
    assert len(runner.draft([(b, 8)])) == 1


def test_without_the_layer_the_text_drafts(tmp_path: Path) -> None:
    plain = Checkpoint.open(write_tiny(tmp_path / "a", "v3"))
    runner = Runner.from_checkpoint(plain, None, max_context=64, drafter=True)
    assert runner.model.drafter is None and runner.block_size > BLOCK


def test_a_trained_layer_drafts_far_above_chance(tmp_path: Path) -> None:
    """Trained with the naive forward on texts in which each token follows from the last two."""
    config = tiny_config("v3", mtp=True) | {
        "vocab_size": 32,
        "hidden_size": 48,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 1,
        "intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    args: Any = parse_model_args(config)
    w = {name: t.clone().requires_grad_() for name, t in tiny_tensors(config, 1).items()}
    generator = torch.Generator().manual_seed(0)

    def sample(count: int) -> Tensor:
        ids = torch.randint(3, 32, (2,), generator=generator).tolist()
        while len(ids) < count:
            ids.append(3 + (ids[-1] + 2 * ids[-2]) % 29)
        return torch.tensor(ids)

    def loss() -> Tensor:
        ids = sample(40)
        h = hidden_states(ids, w, args)
        own = entropy(h[:-1] @ w["lm_head.weight"].T, ids[1:])
        out = next_layer(ids[1:-1], h[:-2], w, args)
        return own + entropy(drafted_logits(out, w, args), ids[2:])

    train(w, loss, steps=150, lr=5e-3)
    prompt = sample(12).tolist()
    stats = stats_of_trained(tmp_path / "m", config, w, prompt, tokens=80, num_drafts=1)
    share = stats["spec_accepted_1"] / stats["spec_verified"]
    assert share > 0.6, f"{share=}, chance is 1/32"
