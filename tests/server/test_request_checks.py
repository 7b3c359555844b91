"""The official service's verdicts on 46 bodies, next to ours: docs/request-checks.md is checked."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import Client
from .toy import Toy

ROOT = Path(__file__).resolve().parents[2]
CASES = json.loads((ROOT / "tests/data/encoding.json").read_text())["request_checks"]["cases"]
TABLE = dict(
    re.findall(
        r"^\| `(check/[^`]+)` \| (\w+) \|", (ROOT / "docs/request-checks.md").read_text(), re.M
    )
)
# What "different" means, by status.
DIFFERENT = {
    "check/model unknown": 404,
    "check/unknown field": 400,
    "check/temp think": 200,
    "check/topp v4pro think tools": 200,
    "check/both max": 200,
    "check/freq": 200,
    "check/logit_bias": 200,
    "check/chat_template_kwargs": 200,
    "check/image in system": 400,
    "check/image v4": 400,
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    names = ("DeepSeek-V4.1-Flash", "DeepSeek-V4-Pro")
    toy = Toy(
        tmp_path_factory.mktemp("toy"), server={"served_model_names": names}, max_tokens=1 << 20
    )
    toy.service.start()
    assert toy.service.wait(30)
    yield Client(toy)
    toy.service.close()


def body_of(case: dict[str, Any]) -> dict[str, Any]:
    body = {
        "model": "DeepSeek-V4.1-Flash",
        "messages": [{"role": "user", "content": "Hi"}],
        **case["body"],
    }
    if case["id"] == "check/129 tools":
        body["tools"] = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]
    return body


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["id"])
def test_our_verdict_is_the_documented_one(service: Client, case: dict[str, Any]) -> None:
    verdict = TABLE[case["id"]]
    accepted = "accepted" in case
    if verdict == "different":
        expected = DIFFERENT[case["id"]]
    else:
        assert verdict in ("same", "lenient")
        assert not (verdict == "lenient" and accepted)
        expected = 200 if accepted or verdict == "lenient" else 400
    response = service.post("/v1/chat/completions", body_of(case))
    assert response.status_code == expected, response.text


def test_every_case_has_a_row() -> None:
    assert set(TABLE) == {c["id"] for c in CASES}
