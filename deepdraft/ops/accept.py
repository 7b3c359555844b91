"""What of a verified step stands, and the rows of the next one. Contract and reference, plain
Python: a step has few rows.

Owns: the rule "coupled" on row buffers: drafts stand while they equal the target's picks; stop
ids, token limits and states of sequences. `deepdraft.kernels.accept` computes the same on the
device. `deepdraft.spec.verify` holds the rule itself.
Knows nothing of: logits, how picks and drafts were chosen.

Letters: Q sequences of a step, W rows of each, S slots (sequences that exist), B = W - 1 drafts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

RUNNING, STOPPED, FULL, NO_TOKEN = range(4)
"""States of a slot: it goes on; it ended with a stop token, with its last token allowed, or where
no token could be chosen. Any other value but RUNNING counts as ended, too."""


@dataclass
class Slot:
    """A sequence's limits. `least`: drafts less likely than this to be reached and stand are not
    verified."""

    state: int = RUNNING
    left: int = 0
    stops: Sequence[int] = ()
    least: float = 0.0


@dataclass
class Accepted:
    """Of one sequence: what a step emits, and what is known for the next."""

    tokens: list[int] = field(default_factory=list)
    accepted: int = 0
    """Drafts among the tokens."""
    last: int = 0
    """The token that the next step begins with."""
    place: int = -1
    """Its position; -1 where the sequence does not go on."""


def accept(
    slot: Slot, picks: Sequence[int], ids: Sequence[int], positions: Sequence[int]
) -> Accepted:
    """One sequence's W rows: row 0 is its last token, then drafts; rows at position -1 do not
    count. picks[i]: the target's token behind row i, -1 where there is none.

    Changes slot.state and slot.left. The first `len(tokens)` rows are confirmed.
    """
    first = positions[0]
    if slot.state != RUNNING or first < 0:
        return Accepted(last=ids[0])
    agree = 0
    while (
        agree + 1 < len(ids)
        and positions[agree + 1] >= 0
        and picks[agree] >= 0
        and picks[agree] == ids[agree + 1]
    ):
        agree += 1
    fault = picks[agree] < 0
    tokens = list(picks[: agree + (not fault)])
    for i, token in enumerate(tokens):
        if token in slot.stops:
            del tokens[i + 1 :]
            slot.state = STOPPED
            break
    if len(tokens) > slot.left:
        del tokens[slot.left :]
        slot.state = RUNNING
    slot.left -= len(tokens)
    if slot.state == RUNNING and slot.left <= 0:
        slot.state = FULL
    elif slot.state == RUNNING and fault:
        slot.state = NO_TOKEN
    return Accepted(
        tokens=tokens,
        accepted=min(agree, len(tokens)),
        last=tokens[-1] if tokens else ids[0],
        place=first + len(tokens) if slot.state == RUNNING else -1,
    )


def next_rows(
    slot: Slot, done: Accepted, drafts: Sequence[int], raw: Sequence[float], rows: int
) -> tuple[list[int], list[int]]:
    """ids and positions of a sequence's next `rows` rows: its last token, then the drafts.

    A draft is left out, with all behind it, where there is none (-1), where the step could not
    emit what follows it, behind a stop token, and where its chance of being reached and standing
    is below slot.least. raw: confidences, whose sigmoids are chances.
    """
    ids, positions = [done.last], [done.place]
    survival = 1.0
    for i in range(rows - 1):
        token = drafts[i] if i < len(drafts) else -1
        live = done.place >= 0 and positions[-1] >= 0 and token >= 0 and i + 1 < slot.left
        if i and live and drafts[i - 1] in slot.stops:
            live = False
        if live and slot.least > 0:
            survival *= 1 / (1 + math.exp(-raw[i]))
            live = survival >= slot.least
        ids.append(max(token, 0))
        positions.append(done.place + 1 + i if live else -1)
    return ids, positions
