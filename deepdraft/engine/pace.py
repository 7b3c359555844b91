"""How much of a prompt may be read between two steps of decoding.

Owns: the measured speed of prompts, and the rows that fit a given time.
Knows nothing of: requests, tensors. Everything here runs without torch.
"""

STEP_ROWS = 256
"""Rows of a step where nobody says otherwise."""
FIRST_ROWS = 32
"""Rows of a part whose cost is not known yet."""
LEAST_ROWS = 8
"""A prompt goes on by at least so much, however slow the machine."""
_NEWEST = 0.5


class Pace:
    """The rows of a prompt that take about `max_stall_ms`, going by those that came before."""

    def __init__(self, max_stall_ms: float, *, least_rows: int = LEAST_ROWS) -> None:
        """`least_rows`: fewer take no less time here, so a part has at least so many."""
        self.max_stall_ms, self.least_rows = max_stall_ms, least_rows
        self._ms_per_row: float | None = None

    def observe(self, num_rows: int, ms: float) -> None:
        """Takes the time of a part. Parts with the fixed cost of few rows count as slow ones, so
        the number settles where a whole part takes the time that is allowed."""
        if num_rows < 1:
            return
        seen = ms / num_rows
        old = self._ms_per_row
        self._ms_per_row = seen if old is None else old + _NEWEST * (seen - old)

    @property
    def rows(self) -> int:
        """Rows that may be computed while others wait for their next token."""
        if self._ms_per_row is None:
            return max(FIRST_ROWS, self.least_rows)
        if self._ms_per_row <= 0.0:
            return 1 << 30
        return max(self.least_rows, int(min(self.max_stall_ms / self._ms_per_row, 1 << 30)))
