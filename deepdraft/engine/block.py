"""One request's part of a step of decoding.

Owns: a block's drafts, their laws and confidences, the rows behind them, the way through a grammar.
Knows nothing of: how drafts are made, judged and chosen.
"""

from collections import Counter

import numpy as np

from deepdraft.engine.request import Request
from deepdraft.engine.sampler import Row
from deepdraft.errors import DeepdraftError, EngineError
from deepdraft.spec.protocol import Row as Law

FATAL = (KeyboardInterrupt, SystemExit)
"""What ends the engine. Any other BaseException is the panic of a library written in Rust, and ends
the request that it belongs to."""


class Block:
    """One request's part of the next step."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.start = request.next_position
        self.token_ids: list[int] = []
        self.laws: list[Law] | None = None if request.rule == "coupled" else []
        self.raw: list[float] = []
        self.drafted = False
        """The drafter ran for it."""
        self.size = 0
        """Drafts that it was to have, as known before any was made."""
        self.num_drafted = 0
        """Drafts before the schedule cut them."""
        self.error: BaseException | None = None
        """Why the request can have no further token."""
        self._walked = 0
        """Drafts that the grammar's matcher was led through."""
        params = request.source.sampling
        self._counts = bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        )
        mask = None
        if request.matcher is not None:
            try:
                mask = request.matcher.mask()
            except DeepdraftError as error:
                self.error = error
        self.rows = [
            Row(
                params=params,
                position=self.start,
                output_counts=request.output_counts,
                prompt_ids=request.source.prompt_ids,
                mask=mask,
            )
        ]

    def extend(self, token_id: int, raw: float, law_V: Law | None) -> None:
        """Adds a draft, and the row of the place behind it.

        Raises, and adds nothing, where the grammar has nothing to say behind it.
        """
        mask = self._walk(token_id)
        self.token_ids.append(token_id)
        self.raw.append(raw)
        if self.laws is not None and law_V is not None:
            self.laws.append(law_V)
        last = self.rows[-1]
        counts = last.output_counts
        if self._counts:
            counts = Counter(counts)
            counts[token_id] += 1
        self.rows.append(
            Row(
                params=last.params,
                position=last.position + 1,
                output_counts=counts,
                prompt_ids=last.prompt_ids,
                mask=mask,
            )
        )

    def _walk(self, token_id: int) -> np.ndarray | None:
        matcher = self.request.matcher
        if matcher is None:
            return None
        if not matcher.advance(token_id):
            raise EngineError(f"token {token_id} was drafted although the grammar forbids it")
        self._walked += 1
        return matcher.mask()

    @property
    def complete(self) -> bool:
        """The drafts complete what the grammar asks for."""
        matcher = self.request.matcher
        return matcher is not None and matcher.is_finished

    def walk_back(self) -> None:
        """Leads the grammar's matcher back to before the drafts."""
        walked, self._walked = self._walked, 0
        if self.request.matcher is None or not walked:
            return
        try:
            self.request.matcher.rollback(walked)
        except FATAL:
            raise
        except BaseException as error:
            self.error = error
            self.cut(0)

    def cut(self, num_drafts: int) -> None:
        """Keeps the first drafts. Raw confidences stay: what was cut is part of the record."""
        del self.token_ids[num_drafts:]
        if self.laws is not None:
            del self.laws[num_drafts:]
        del self.rows[num_drafts + 1 :]

    @property
    def step_ids(self) -> list[int]:
        """What the model is to see: the last token, then the drafts."""
        return [self.request.output_ids[-1], *self.token_ids]
