"""Acceptance and the next step's rows: the device's program against plain Python."""

from itertools import chain

import pytest
import torch

from deepdraft.kernels import accept as kernels
from deepdraft.ops import accept as reference
from deepdraft.spec.protocol import Proposal
from deepdraft.spec.verify import verify_coupled
from tests.kernels.interpreter import DEVICE

STOPS = [7, 8]


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Device:
    """One step's buffers for some sequences of `width` rows."""

    def __init__(self, slots, width, rows, depth=3):
        self.count, self.width, self.rows = len(slots), width, rows
        self.limits = kernels.Slots(
            ints([reference.RUNNING] * 6),
            ints([100] * 6),
            ints([[*STOPS, -1]] * 6),
            torch.zeros(6, device=DEVICE),
        )
        ring = torch.full((depth, self.count, kernels.HEAD + width), -9, dtype=torch.int32)
        self.reports = kernels.Reports(
            ring.to(DEVICE),
            torch.zeros(1, dtype=torch.int64, device=DEVICE),
            torch.zeros(1, dtype=torch.int64, device=DEVICE),
        )
        self.slots = ints(
            [s for s in slots for _ in range(width)] + [0] * (rows - len(slots) * width)
        )

    def accept(self, picks, ids, positions):
        pad = [0] * (self.rows - self.count * self.width)
        flat = [ints([*chain(*x), *pad]) for x in (picks, ids)]
        self.positions = ints([*chain(*positions), *[-1] * len(pad)])
        return kernels.accept(
            flat[0], flat[1], self.positions, self.slots, self.limits, self.reports,
            sequences=self.count, noise=55,
        )  # fmt: skip


def random_case(generator, count, width):
    def pick(low, high, size):
        return torch.randint(low, high, (size,), generator=generator).tolist()

    ids, picks, positions = [], [], []
    for _ in range(count):
        first = pick(0, 40, 1)[0]
        live = pick(1, width + 1, 1)[0]
        row = pick(0, 10, width)
        target = row[1:] + pick(0, 10, 1)
        for at in range(width):  # now and then another pick, or none
            change = pick(0, 6, 1)[0]
            target[at] = -1 if change == 0 else (pick(0, 10, 1)[0] if change == 1 else target[at])
        ids.append(row)
        picks.append(target)
        at = [first + i if i < live else -1 for i in range(width)]
        positions.append([-1] * width if pick(0, 8, 1)[0] == 0 else at)
    return picks, ids, positions


@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 6, 8), (4, 4, 16), (3, 5, 16)])
def test_accept_and_next_rows(shape):
    count, width, rows = shape
    generator = torch.Generator().manual_seed(width)
    for trial in range(12):
        slots = torch.randperm(6, generator=generator)[:count].tolist()
        step = Device(slots, width, rows)
        wanted = [
            reference.Slot(
                state=int(torch.randint(0, 12, (1,), generator=generator)) // 11 * 9,
                left=int(torch.randint(1, 9, (1,), generator=generator)),
                stops=STOPS,
                least=[0.0, 0.3][trial % 2],
            )
            for _ in slots
        ]
        for slot, limits in zip(slots, wanted, strict=True):
            step.limits.state[slot], step.limits.left[slot] = limits.state, limits.left
            step.limits.least[slot] = limits.least
        picks, ids, positions = random_case(generator, count, width)
        got = step.accept(picks, ids, positions)
        drafts = torch.randint(-1, 9, (count, width - 1), generator=generator)
        drafts = torch.where(torch.rand(drafts.shape, generator=generator) < 0.6, 3, drafts)
        raw = torch.randn(drafts.shape, generator=generator)
        given = {"drafts": drafts.int().to(DEVICE), "raw": raw.to(DEVICE)} if width > 1 else {}
        next_ids = torch.full((rows,), -5, dtype=torch.int32, device=DEVICE)
        next_at = next_ids.clone()
        kernels.next_rows(got, step.limits, step.slots, next_ids, next_at, **given)
        report = step.reports.ring[0].tolist()
        for q, slot in enumerate(slots):
            limits = wanted[q]
            want = reference.accept(limits, picks[q], ids[q], positions[q])
            n, own = len(want.tokens), slice(q * width, q * width + width)
            assert got.last[q] == want.last
            assert got.place[q] == want.place
            assert got.confirmed[own].tolist() == positions[q][:n] + [-1] * (width - n)
            assert step.limits.state[slot] == limits.state
            assert step.limits.left[slot] == limits.left
            assert report[q] == [
                slot, n, want.accepted, limits.state, limits.left, *want.tokens, *[-1] * (width - n)
            ]  # fmt: skip
            rows_of = reference.next_rows(limits, want, drafts[q].tolist(), raw[q].tolist(), width)
            assert next_ids[own].tolist() == rows_of[0]
            assert next_at[own].tolist() == rows_of[1]
            block = slice(q * (width - 1), (q + 1) * (width - 1))
            if width > 1:
                assert got.draft_ids[block].tolist() == [want.last] + [55] * (width - 2)
                assert got.draft_positions[block].tolist() == [
                    want.place + i if want.place >= 0 else -1 for i in range(width - 1)
                ]
        assert (got.confirmed[count * width :] == -1).all()
        assert (next_ids[count * width :] == -5).all()


def test_the_rule_is_that_of_the_verifier():
    class Target:
        def __init__(self, picks):
            self.picks = picks

        def pick(self, i):
            return None if self.picks[i] < 0 else self.picks[i]

    generator = torch.Generator().manual_seed(1)
    accepted = set()
    for _ in range(60):
        picks, ids, _ = random_case(generator, 1, 5)
        got = reference.accept(reference.Slot(left=50), picks[0], ids[0], list(range(4, 9)))
        verdict = verify_coupled(
            Proposal(start=5, token_ids=tuple(ids[0][1:]), laws=None), Target(picks[0])
        )
        assert tuple(got.tokens) == verdict.tokens(Proposal(start=5, token_ids=tuple(ids[0][1:])))
        accepted.add(verdict.num_accepted)
    assert accepted >= {0, 1, 4}


def test_reports_go_round_and_an_ended_sequence_emits_nothing():
    step = Device([2], 2, 8)
    step.limits.left[2] = 3
    tokens = []
    for n in range(5):
        done = step.accept([[4, 5]], [[3, 4]], [[n, n + 1]])
        assert step.reports.written.item() == n + 1
        report = step.reports.ring[n % 3, 0].tolist()
        tokens += report[kernels.HEAD : kernels.HEAD + report[1]]
        if n:
            assert done.place.tolist() == [-1]
            assert done.confirmed.max() == (n if n == 1 else -1)
            assert report[3] == reference.FULL
    assert tokens == [4, 5, 4]


def test_wrong_operands_are_refused():
    step = Device([0], 2, 8)
    with pytest.raises(ValueError, match="do not fit 2 sequences"):
        kernels.accept(
            step.slots, step.slots, step.slots, step.slots, step.limits, step.reports, sequences=2
        )
    with pytest.raises(ValueError, match="int32"):
        kernels.accept(
            step.slots.long(), step.slots, step.slots, step.slots, step.limits, step.reports,
            sequences=1,
        )  # fmt: skip
