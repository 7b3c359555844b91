"""The trainable model: documents do not leak, gradients reach every parameter, names fit."""

import numpy as np
import pytest
import torch
from tiny import tiny_args, tiny_corpus

from deepdraft.checkpoint.names import tensor_table
from deepdraft.ops.engram_hash import engram_tables as engine_tables
from training import drafter, losses
from training.batches import Sampler
from training.check_golden import pad_rows
from training.model import Batch, Model, alignment, top_mask
from training.optim import orthogonalise
from training.spec import demo_args, engram_tables, parameter_table


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    made = Model(tiny_args(), [i % 90 for i in range(96)])
    made.initialise(1)
    return made


def ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sparse", [False, True])
def test_a_document_is_computed_alike_alone_and_packed(model: Model, sparse: bool) -> None:
    model.options.sparse = sparse
    a, b = ids(1, 50), ids(1, 61, seed=1)
    with torch.no_grad():
        alone = model(pad_rows(b, 32)).hidden[:, :61]
        start = -(-50 // alignment(model.args)) * alignment(model.args)
        row = torch.zeros(1, 128, dtype=torch.int64)
        pos, seg = torch.zeros_like(row), torch.full_like(row, -1)
        for at, doc, k in ((0, a, 0), (start, b, 1)):
            n = doc.shape[1]
            row[:, at : at + n], pos[:, at : at + n] = doc, torch.arange(n)
            seg[:, at : at + n] = k
        packed = model(Batch(row, pos, seg)).hidden[:, start : start + 61]
    model.options.sparse = False
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_a_later_token_changes_nothing_before_it(model: Model) -> None:
    a = ids(1, 64)
    b = a.clone()
    b[0, 41] = (b[0, 41] + 7) % 90
    model.options.sparse = True
    with torch.no_grad():
        x, y = model(pad_rows(a, 32)).hidden, model(pad_rows(b, 32)).hidden
    model.options.sparse = False
    torch.testing.assert_close(x[:, :41], y[:, :41], rtol=1e-4, atol=1e-5)
    assert (x[:, 41] - y[:, 41]).abs().max() > 1e-2


def test_the_draft_ignores_tokens_after_its_anchor(model: Model) -> None:
    a = ids(1, 64)
    b = a.clone()
    b[:, 31:] = (b[:, 31:] + 5) % 90
    anchor = torch.tensor([[30]])
    with torch.no_grad():
        drafts = []
        for row in (a, b):
            batch = pad_rows(row, 32)
            drafts.append(drafter.draft(model, batch, model(batch).taps, anchor).base)
    torch.testing.assert_close(drafts[0], drafts[1], rtol=1e-4, atol=1e-5)


def test_replay_cut_equals_no_cut_where_it_cannot_matter(model: Model) -> None:
    batch = pad_rows(ids(1, 64), 32)
    with torch.no_grad():
        plain = model(batch).hidden
        batch.decoder_cut = torch.tensor([40])
        cut = model(batch).hidden
    torch.testing.assert_close(plain[:, :40], cut[:, :40], rtol=1e-5, atol=1e-6)
    assert (plain[:, 40:] - cut[:, 40:]).abs().max() > 1e-4


def test_every_trained_parameter_gets_a_gradient(model: Model) -> None:
    batch = pad_rows(ids(2, 128), 32)
    model.options.index_rows = 2
    out = model(batch)
    logits = model.logits(out.hidden)
    target, weight = losses.next_tokens(batch)
    ce, _ = losses.token_loss(logits.flatten(0, 1), target.flatten())
    draft, *_ = losses.draft_loss(model, batch, out.taps, logits, weight, 16, 0.5)
    assert out.index_loss is not None
    (ce.mean() + draft + out.index_loss).backward()
    model.options.index_rows = 0
    missing = [
        k
        for k, p in model.params.items()
        if p.requires_grad and (p.grad is None or not p.grad.abs().sum() > 0)
    ]
    for p in model.params.values():
        p.grad = None
    assert missing == []


def test_the_trunk_does_not_see_the_drafters_loss(model: Model) -> None:
    batch = pad_rows(ids(2, 64), 32)
    out = model(batch)
    logits = model.logits(out.hidden)
    _, weight = losses.next_tokens(batch)
    loss, *_ = losses.draft_loss(model, batch, out.taps, logits, weight, 8, 0.5)
    loss.backward()
    touched = [k for k, p in model.params.items() if p.grad is not None]
    for p in model.params.values():
        p.grad = None
    assert touched and all(name.startswith("mtp.") for name in touched)


def test_names_and_shapes_are_the_published_ones() -> None:
    args = tiny_args()
    table = tensor_table(args)
    wanted = {n: e.value_shape for n, e in table.items() if e.format != "scale"}
    formats = {"fp8": "fp8_tile", "fp8row": "fp8_row", "fp4": "mxfp4", "f32": "f32", "bf16": "bf16"}
    got = {}
    for p in parameter_table(args):
        shape = p.shape if p.published == (p.name,) else p.shape[1:]
        for name in p.published:
            got[name] = shape
            assert table[name].format == formats[p.fmt], name
    assert got == wanted


def test_hash_tables_equal_the_engines() -> None:
    args = demo_args(compressed_vocab=3000, noise_token_id=3, image_token_id=None)
    ours, theirs = engram_tables(args), engine_tables(args)
    assert args.engram_num_embeddings == tuple(theirs.num_embeddings)
    for k in range(len(args.engram_layer_ids)):
        assert np.array_equal(ours.primes[k], np.ravel(theirs.primes[k]))
        assert np.array_equal(ours.multipliers[k], np.ravel(theirs.multipliers[k]))


def test_top_mask_takes_ties_by_lower_index() -> None:
    ninf = float("-inf")
    scores = torch.tensor([[0.0, 2.0, 0.0, 0.0, 1.0], [ninf, 3.0, ninf, ninf, ninf]])
    want = torch.tensor([[True, True, False, False, True], [False, True, False, False, False]])
    assert torch.equal(top_mask(scores, 3), want)


def test_rows_keep_documents_apart_and_aligned() -> None:
    sampler = Sampler(tiny_corpus(), "train", 128, 8, 2, 0)
    tokens, pos, seg = sampler.batch(16)
    starts = (pos == 0) & (seg >= 0)
    assert (np.nonzero(starts)[1] % 8 == 0).all()
    assert (tokens[starts] == 0).mean() > 0.6  # the others continue a document longer than a row
    inner = (seg[:, 1:] == seg[:, :-1]) & (seg[:, 1:] >= 0)
    assert (pos[:, 1:][inner] == pos[:, :-1][inner] + 1).all()
    assert (tokens[seg < 0] == 2).all()
    assert (seg >= 0).mean() > 0.8


def test_orthogonalise_brings_singular_values_near_one() -> None:
    g = torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(0))
    s = torch.linalg.svdvals(orthogonalise(g))
    assert s.min() > 0.6 and s.max() < 1.3
