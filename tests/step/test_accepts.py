"""Verification of drafts that are right up to a place: equal bits, after the window has wrapped."""

import pytest

from deepdraft.proof.device_check import forced_accepts, step_logits
from tests.step import tiny


@pytest.mark.full
def test_rows_that_count_have_the_bits_of_plain_steps():
    """Window 8 in rings of 16; 20 tokens before, so entries exceed index and candidates."""
    step, text = tiny.step(), tiny.text(25)
    step_logits(step, text[:20], [8] * 3, slot=1)
    assert forced_accepts(step, text[20:25], first=20, slot=1, width=3, begin_with=1) == []


def test_a_text_that_would_overwrite_the_window_before_it_is_refused():
    with pytest.raises(AssertionError, match="overwrites the window"):
        forced_accepts(tiny.step(), tiny.text(6), first=20, width=3)
