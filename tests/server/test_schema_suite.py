"""Schemas answered by the bundled model and judged by an independent validator."""

import asyncio
from collections.abc import Iterator

import pytest

from deepdraft.server.service import Service

from .schema_suite import SCHEMAS, answers, problem, serving

SHORT_ONES = (
    *("integer in a range", "enum", "pattern", "date", "uuid", "exact array", "tuple", "point"),
    *("nested", "names that need escapes", "union of objects", "references", "tool call"),
)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    service = serving()
    yield service
    service.close()


@pytest.mark.parametrize("thinking", [False, True])
def test_answers_are_valid(service: Service, thinking: bool) -> None:
    names = list(SHORT_ONES[:: 3 if thinking else 1])
    found = asyncio.run(answers(service, names, thinking, seed=2))
    assert [what for what in found if what.startswith("wrong")] == []
    assert found["valid"] >= len(names) - 1, found


@pytest.mark.full
@pytest.mark.parametrize("thinking", [False, True])
def test_the_whole_suite(service: Service, thinking: bool) -> None:
    found = asyncio.run(answers(service, list(SCHEMAS), thinking, seed=2))
    assert [what for what in found if what.startswith("wrong")] == []
    assert found["valid"] >= 0.95 * len(SCHEMAS), found


def test_the_suite_is_large_and_the_judge_is_strict() -> None:
    assert len(SCHEMAS) >= 60
    for name, good, bad in (
        ("date-time", '"2026-02-28T10:00:00Z"', '"2026-02-30T10:00:00Z"'),
        ("time", '"10:00:00+01:00"', '"25:00:00Z"'),
        ("date", '"2026-02-28"', '"2026-02-30"'),
        ("uuid", '"2b1de1b0-0000-4000-8000-000000000000"', '"2b1de1b0"'),
        ("email", '"a@b.c"', '"ab"'),
        ("point", '{"x": 1, "y": 2}', '{"x": 1}'),
        ("tree", '{"name": "a", "children": []}', '{"name": "d", "children": []}'),
        ("tuple", '[1, "a", true]', '[1, "a", true, 2]'),
        ("one of", '{"a": 1}', '{"a": 1, "b": 2}'),
    ):
        assert problem(SCHEMAS[name], good) is None, name
        assert problem(SCHEMAS[name], bad) is not None, name
    assert "no JSON" in (problem({}, "{") or "")
