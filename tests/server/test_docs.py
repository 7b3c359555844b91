"""docs/api.md against the schema: every request field is in exactly one of the three lists. The
tables of metrics against the code."""

import re
from pathlib import Path

from deepdraft.server import schema

ROOT = Path(__file__).resolve().parents[2]
DOCS, PACKAGE = ROOT / "docs", ROOT / "deepdraft" / "server"
TEXT = (DOCS / "api.md").read_text()


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## )", TEXT, re.M | re.S)
    assert found is not None, title
    return found[1]


def first_cells(text: str) -> list[tuple[set[str], str]]:
    """Names in the first cell of each row, and the second cell."""
    rows = re.findall(r"^\| (.*?) \| (.*?) \|", text, re.M)
    return [(set(re.findall(r"`(\w+)`", first)), second) for first, second in rows]


def test_honoured_fields() -> None:
    chat, completions = set[str](), set[str]()
    for names, where in first_cells(section("Request fields: honoured")):
        if where in ("both", "chat"):
            chat |= names
        if where in ("both", "completions"):
            completions |= names
    assert chat == schema.field_names(schema.ChatRequest)
    # The one row that both share although only chat has both of its fields.
    assert completions - {"top_logprobs"} == schema.field_names(schema.CompletionRequest)


def test_fields_without_effect() -> None:
    lists = section("Request fields: accepted without effect").split("\n\n")
    named = next(part for part in lists if part.lstrip().startswith("`cache_salt`"))
    assert set(re.findall(r"`(\w+)`", named)) == schema.IGNORED_FIELDS


def test_refused_fields() -> None:
    rows = first_cells(section("Request fields: refused by name"))
    assert set().union(*(names for names, _ in rows)) == set(schema.REFUSED_FIELDS)


def test_no_field_is_in_two_lists() -> None:
    honoured = schema.field_names(schema.ChatRequest) | schema.field_names(schema.CompletionRequest)
    refused = set(schema.REFUSED_FIELDS)
    assert not honoured & schema.IGNORED_FIELDS
    assert not honoured & refused
    assert not refused & schema.IGNORED_FIELDS


def test_every_metric_is_documented() -> None:
    """The names that the two modules can print, against the tables for those who read them."""
    source = "".join((PACKAGE / name).read_text() for name in ("metrics.py", "metrics_kv.py"))
    kinds = "total|seconds|bytes|ms|length|gauge"
    printed = {
        *re.findall(rf'"([a-z_]+_(?:{kinds}))"(?!:|, 0\))', source),
        *re.findall(r'\("(kv_[a-z_]+|num_[a-z_]+|http_[a-z]+)", "[A-Z]', source),
    }
    assert len(printed) > 60 and {"kv_entries", "kv_phase_seconds_total"} <= printed
    told = "".join((DOCS / name).read_text() for name in ("operations.md", "metrics.md"))
    known = set(re.findall(r"`([a-z_]+)[`{]", told))
    assert printed - known == set()
    assert set(re.findall(r"`(kv_[a-z_]+|spec_[a-z_]+)[`{]", told)) <= printed
