"""The loop around a step: what is emitted, when it ends, what the host may do meanwhile.

The layers are replaced by a table of logits by position, so hundreds of steps cost little; the
loop's kernels are the real ones.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from deepdraft.errors import StateError
from deepdraft.kernels import layout
from deepdraft.models.v41_draft import DraftPass
from deepdraft.models.v41_loop import RUNNING, STOPPED, DeviceLoop, DeviceSettings
from deepdraft.models.v41_step import Output
from tests.kernels.interpreter import DEVICE

V, RANK, D = 40, 32, 32
NOISE, COUNT = 39, 13


def table(seed: int) -> Tensor:
    """Logits behind a row at each position [200, V]."""
    generator = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(200, V, generator=generator)).to(DEVICE)


class Layers:
    """Stands in for `DeviceStep`: sequence in slot s has the logits of table s."""

    def __init__(self, tables: list[Tensor]) -> None:
        self.weights = SimpleNamespace(device=torch.device(DEVICE))
        self.args = SimpleNamespace(vocab_size=V, dspark_noise_token_id=NOISE)
        self.tables = torch.stack(tables)
        self.rows: list[list[int]] = []

    def run(self, inputs) -> Output:
        self.rows.append(inputs.positions.tolist())
        logits = self.tables[inputs.slots.long(), inputs.positions.clamp(min=0).long()]
        places = SimpleNamespace(of=lambda name: inputs.positions, turn=lambda kind: (None, None))
        return Output(logits, torch.zeros(len(inputs), 1), places)


class Drafter:
    """Proposes what the table says, but for positions that it does not know."""

    def __init__(self, layers: Layers, unknown: int) -> None:
        self.layers, self.unknown, self.fed = layers, unknown, []
        self.drafter = SimpleNamespace(
            markov_embed=torch.zeros(V, RANK, dtype=torch.bfloat16, device=DEVICE),
            markov_head=layout.tile_bf16(torch.zeros(V, RANK, device=DEVICE)),
            confidence=torch.zeros(D + RANK, device=DEVICE),
        )

    def feed(self, taps: Tensor, cos, sin, dest: Tensor) -> None:
        self.fed.append([d for d in dest.tolist() if d >= 0])

    def run(self, inputs, block: int) -> DraftPass:
        at = inputs.positions.clamp(min=0).long()
        base = self.layers.tables[inputs.slots.long(), at]
        base = torch.where((at % self.unknown == 0).unsqueeze(1), -base, base)
        return DraftPass(base, torch.zeros(len(inputs), D, dtype=torch.bfloat16, device=DEVICE))


def make(width: int, *, slots: int = 3, unknown: int = 4, masked: bool = False, tables=None):
    layers = Layers(tables or [table(s) for s in range(slots)])
    drafter = Drafter(layers, unknown) if width > 1 else None
    settings = DeviceSettings(slots, DEVICE)
    loop = DeviceLoop(layers, settings, sequences=1, width=width, drafter=drafter, masked=masked)
    return layers, drafter, settings, loop


def tokens_of(loop: DeviceLoop, slot: int, *, most: int, steps: int = 60, **settings) -> list[int]:
    loop.settings.begin(slot, max_tokens=most, **settings)
    loop.set_slots([slot])
    loop.begin(0, 7, 9)
    found: list[int] = []
    for _ in range(steps):
        loop.launch()
        report = loop.read()[0]
        found.extend(report.token_ids)
        if report.state != RUNNING:
            break
    return found


@pytest.mark.parametrize(("unknown", "temperature"), [(3, 0.0), (3, 1.0), (1000, 0.0)])
def test_drafted_text_is_plain_text(temperature, unknown):
    """Whatever the drafter knows: the tokens are those of one row at a time."""
    plain = tokens_of(make(1)[3], 1, most=COUNT, temperature=temperature, seed=5)
    layers, drafter, _, loop = make(4, unknown=unknown)
    drafted = tokens_of(loop, 1, most=COUNT, temperature=temperature, seed=5)
    assert drafted == plain and len(plain) == COUNT
    if temperature == 0.0:
        assert plain == layers.tables[1, 9 : 9 + COUNT].argmax(1).tolist()
    fed = [position for step in drafter.fed for position in step]
    assert fed == list(range(9, 9 + COUNT)), "the drafter hears of confirmed positions, each once"
    if unknown == 1000:
        assert len(layers.rows) <= COUNT // 4 + 2, "right drafts are accepted"


def test_a_stop_id_ends_the_text_within_a_block():
    first = make(1)[0].tables[1, 9:49].argmax(1).tolist()
    stop = first[6]
    loop = make(4, unknown=1000)[3]
    got = tokens_of(loop, 1, most=40, stop_ids=[stop])
    assert got == first[: first.index(stop) + 1]
    loop.launch()
    late = loop.read()[0]
    assert late.token_ids == () and late.state == STOPPED


def test_two_sequences_of_one_step_end_by_themselves():
    layers = Layers([table(s) for s in range(3)])
    settings = DeviceSettings(3, DEVICE)
    loop = DeviceLoop(layers, settings, sequences=2, width=3, drafter=Drafter(layers, 4))
    settings.begin(2, max_tokens=5)
    settings.begin(0, max_tokens=9)
    loop.set_slots([2, 0])
    loop.begin(0, 1, 10)
    loop.begin(1, 1, 30)
    found: dict[int, list[int]] = {2: [], 0: []}
    for _ in range(7):
        loop.launch()
        for report in loop.read():
            found[report.slot].extend(report.token_ids)
    assert found[2] == layers.tables[2, 10:15].argmax(1).tolist()
    assert found[0] == layers.tables[0, 30:39].argmax(1).tolist()


def test_the_host_ends_a_sequence_between_steps():
    loop = make(4)[3]
    loop.settings.begin(1, max_tokens=50)
    loop.set_slots([1])
    loop.begin(0, 7, 9)
    loop.launch()
    loop.settings.end(1)
    loop.launch()
    assert len(loop.read()[0].token_ids) == 1
    report = loop.read()[0]
    assert report.token_ids == () and report.state == STOPPED


def test_masks_are_set_between_layers_and_choice():
    """Even tokens only: the text is the best even token of every row, drafted or not."""
    layers, _, settings, loop = make(4, masked=True)
    even = torch.arange(V) % 2 == 0
    settings.begin(1, max_tokens=8)
    loop.set_slots([1])
    loop.begin(0, 7, 9)
    found: list[int] = []
    while len(found) < 8:
        loop.launch_layers()
        for row in range(4):
            loop.set_mask(row, even)
        loop.launch_end()
        found.extend(loop.read()[0].token_ids)
    best = layers.tables[1, 9:17].cpu().masked_fill(~even, -torch.inf).argmax(1)
    assert found == best.tolist()
    loop.set_mask(0, None)
    assert not bool(loop.bias[0].any()) and bool(torch.isinf(loop.bias[1]).any())


def test_a_host_too_far_behind_is_told():
    loop = make(1)[3]
    loop = DeviceLoop(loop.step, loop.settings, sequences=1, width=1, drafter=None, depth=2)
    tokens_of(loop, 1, most=1)
    for _ in range(3):
        loop.launch()
    assert loop.num_waiting == 3
    with pytest.raises(StateError, match="fell 3 steps behind a ring of 2"):
        loop.read()
    loop.skip_reports()
    assert loop.num_waiting == 0
    with pytest.raises(StateError, match="stop ids"):
        loop.settings.begin(0, max_tokens=1, stop_ids=range(9))
