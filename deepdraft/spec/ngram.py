"""Drafts from the text itself (prompt lookup): what followed the last tokens earlier.

Owns: `History`, the tokens of a sequence and the search in them. Costs no model and no training;
right wherever a text repeats itself or its prompt. Knows nothing of: models, logits, verification.
"""

from collections.abc import Sequence

import numpy as np

SHORTEST, LONGEST = 2, 8
"""Tokens of a match at least, and at most that are compared."""


class History:
    """The tokens of one sequence, kept as an array that grows."""

    def __init__(self) -> None:
        self._ids = np.empty(256, dtype=np.int64)
        self._size = 0

    def update(self, token_ids: Sequence[int]) -> None:
        """Takes what was appended since. Tokens seen before must stand unchanged."""
        if len(token_ids) < self._size:
            self._size = 0
        new = token_ids[self._size :]
        size = self._size + len(new)
        if size > len(self._ids):
            grown = np.empty(2 * size, dtype=np.int64)
            grown[: self._size] = self._ids[: self._size]
            self._ids = grown
        self._ids[self._size : size] = new
        self._size = size

    def propose(self, token_id: int, most: int) -> tuple[list[int], int]:
        """Up to `most` tokens to follow `token_id`, which stands behind the history, and how long
        the match was: the longest, of equally long ones the latest. None and 0 without a match.

        Where the match reaches the end, what it begins is repeated.
        """
        n, ids = self._size, self._ids
        if n < SHORTEST or most < 1:
            return [], 0
        found = np.flatnonzero((ids[1:n] == token_id) & (ids[: n - 1] == ids[n - 1])) + 1
        if not len(found):
            return [], 0
        length = SHORTEST
        while length < LONGEST:
            # The token that far back must agree, too; the last one of the text is `token_id`.
            longer = found[found >= length]
            longer = longer[ids[longer - length] == ids[n - length]] if length <= n else longer[:0]
            if not len(longer):
                break
            found, length = longer, length + 1
        first = int(found[-1]) + 1
        text = [*ids[first:n].tolist(), token_id]
        while len(text) < most:
            text += text[: most - len(text)]
        return text[:most], length
