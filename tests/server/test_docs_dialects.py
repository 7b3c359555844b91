"""docs/api-messages.md and docs/api-responses.md against the code: each field is in one list."""

import re
from pathlib import Path

import pytest

from deepdraft.config import ServerConfig
from deepdraft.server import messages_schema, responses_schema
from deepdraft.server.dialect_routes import MESSAGES_PREFIXES, RESPONSES_PREFIXES
from deepdraft.server.schema import field_names

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {
    "api-messages.md": (messages_schema, messages_schema.MessagesRequest),
    "api-responses.md": (responses_schema, responses_schema.ResponsesRequest),
}


def section(page: str, title: str) -> str:
    text = (DOCS / page).read_text() + "\n## "
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## )", text, re.M | re.S)
    assert found is not None, title
    return found[1]


def first_cells(text: str) -> set[str]:
    rows = re.findall(r"^\| (.*?) \|", text, re.M)
    return {name for row in rows for name in re.findall(r"`([\w.-]+)`", row)}


@pytest.mark.parametrize("page", PAGES)
def test_every_field_is_in_its_list(page: str) -> None:
    schema, request = PAGES[page]
    assert first_cells(section(page, "Request fields: honoured")) == field_names(request)
    assert first_cells(section(page, "Request fields: refused by name")) == set(
        schema.REFUSED_FIELDS
    )
    ignored = section(page, "Request fields: accepted without effect")
    top = ignored.split("And below")[0]
    assert set(re.findall(r"`(\w+)`", top)) == schema.IGNORED_FIELDS


@pytest.mark.parametrize("page", PAGES)
def test_no_field_is_in_two_lists(page: str) -> None:
    schema, request = PAGES[page]
    lists = [field_names(request), schema.IGNORED_FIELDS, frozenset(schema.REFUSED_FIELDS)]
    assert sum(map(len, lists)) == len(frozenset().union(*lists))


@pytest.mark.parametrize("page", PAGES)
def test_nested_fields_without_effect_are_named(page: str) -> None:
    schema, _ = PAGES[page]
    text = (DOCS / page).read_text()
    for name in schema.NESTED_IGNORED:
        assert f"`{name}`" in text, name


def test_every_ignored_nested_field_is_in_the_list() -> None:
    """What the code passes to `ignore` is what the lists, and so the docs, say."""
    source = Path(messages_schema.__file__).parent
    listed = messages_schema.NESTED_IGNORED | responses_schema.NESTED_IGNORED
    for name in ("messages_read.py", "responses_read.py", "responses_tools.py"):
        for found in re.findall(r'\.ignore\(f?"([^"]+)"\)', (source / name).read_text()):
            pattern = re.sub(r"\\{.*?\\}", r"\\w+", re.escape(found))
            assert any(re.fullmatch(pattern, known) for known in listed), found


def test_blocks_items_and_tools() -> None:
    tags = {
        member.__struct_config__.tag
        for member in messages_schema.Block.__args__  # type: ignore[attr-defined]
    }
    assert first_cells(section("api-messages.md", "Blocks")) == tags
    assert first_cells(section("api-responses.md", "Items")) == set(responses_schema.ITEMS)
    assert first_cells(section("api-responses.md", "Tools")) == set(responses_schema.TOOLS)


def test_limits_and_paths() -> None:
    settings, page = ServerConfig(), (DOCS / "api-responses.md").read_text()
    assert settings.response_retention_s == 3600 and "for an hour" in page
    assert settings.response_store_bytes == 64 << 20 and "in 64 MiB" in page
    assert set(MESSAGES_PREFIXES) == {*RESPONSES_PREFIXES, "/anthropic", "/anthropic/v1"}
