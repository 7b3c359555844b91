"""The selftest holds here, and notices when an operation breaks the row rule."""

import json

import pytest
import torch

from deepdraft.ops import elementwise, index, moe
from deepdraft.proof import selftest


def test_all_checks_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest.main("cpu", as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"]
    assert len(report["checks"]) == len(selftest.CHECKS) + len(selftest.FAMILY_CHECKS)


def test_notices_a_sigmoid_whose_tail_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def tailed(x: torch.Tensor) -> torch.Tensor:
        y = elementwise.softplus(x).clone()
        y.view(-1)[-1] += 1e-6  # as a vectorised loop with another formula for its last elements
        return y

    monkeypatch.setattr(elementwise, "sigmoid", tailed)
    with pytest.raises(selftest.Failed, match="sigmoid"):
        selftest.check_elementwise_rows("cpu")


def test_notices_unstable_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_first(scores: torch.Tensor, k: int) -> torch.Tensor:
        return torch.arange(scores.shape[1] - k, scores.shape[1]).unsqueeze(0)

    monkeypatch.setattr(index, "select_top", last_first)
    with pytest.raises(selftest.Failed, match="lower entry"):
        selftest.check_index_rows("cpu")


def test_notices_experts_summed_by_row_count(monkeypatch: pytest.MonkeyPatch) -> None:
    products = moe.expert_products

    def biased(x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return products(x, *args, **kwargs) * (1 + 1e-6 * x.shape[0])  # type: ignore[arg-type]

    monkeypatch.setattr(moe, "expert_products", biased)
    with pytest.raises(selftest.Failed, match="experts"):
        selftest.check_expert_rows("cpu")


def test_a_failed_check_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(device: str) -> str:
        raise selftest.Failed("row 3 differs")

    monkeypatch.setattr(selftest, "CHECKS", (("broken", broken),))
    monkeypatch.setattr(selftest, "FAMILY_CHECKS", ())
    assert selftest.main("cpu") == 1
    out = capsys.readouterr().out
    assert "FAIL broken: row 3 differs" in out
