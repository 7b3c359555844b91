"""A short run of real processes under faults; bench/kv_fleet.py makes long ones."""

from pathlib import Path

import pytest

from tests.kv.fleet_run import REDIS, FleetRun, can_make_networks

pytestmark = pytest.mark.skipif(REDIS is None, reason="no redis-server in PATH")


def go(directory: Path, *, turns: int, faults: list[str], **options: object) -> dict[str, object]:
    pytest.importorskip("cryptography")
    run = FleetRun(directory, servers=2, **options)  # type: ignore[arg-type]
    try:
        done = run.run(turns=turns, conversations=4, every=3, faults=faults)
    finally:
        run.close()
    assert done["turns"] == turns
    assert done["different"] == 0 and done["client_errors"] == 0
    books = done["servers"]
    assert isinstance(books, dict)
    for name in ("leaked_bytes", "reserved", "quarantined", "pins"):
        assert books[name] == 0, books
    for fault in faults:
        assert done[f"fault_{fault}"]
    return done


def test_two_processes_that_are_killed_and_lose_their_directory(tmp_path: Path) -> None:
    done = go(tmp_path, turns=9, faults=["redis_lost", "kill"], first_port=23000)
    assert done.get("from_peer") or done.get("from_host")


@pytest.mark.full
def test_servers_that_stop_under_load(tmp_path: Path) -> None:
    """SIGTERM, and SIGKILL shortly after it: conversations move, or are computed again."""
    done = go(tmp_path, turns=60, faults=["leave", "leave_killed"], first_port=28000)
    books = done["servers"]
    assert isinstance(books, dict)
    assert books["kv_handed_over"]  # who took them may have been killed later


@pytest.mark.full
@pytest.mark.skipif(not can_make_networks(), reason="needs root and network namespaces")
def test_partitions_and_stalls(tmp_path: Path) -> None:
    faults = ["partition", "stall", "redis_stall", "redis_old"]
    done = go(tmp_path, turns=40, faults=faults, namespaces=True, first_port=24000)
    assert done["from_peer"], "the servers do not reach each other or the directory"


@pytest.mark.full
def test_approximate_state_between_processes(tmp_path: Path) -> None:
    """Numerics quant, prefill encoder: exact starts only, so every answer is a cold run's."""
    go(tmp_path, turns=30, faults=["kill"], numerics="quant", prefill="encoder", first_port=25000)


@pytest.mark.full
@pytest.mark.parametrize("reuse", ["whole", "replay"])
def test_states_handed_over(reuse: str, tmp_path: Path) -> None:
    """Every answer is that of one server which starts from the same state."""
    port = 26000 if reuse == "whole" else 27000
    options = {"numerics": "quant", "prefill": "encoder", "reuse": reuse}
    done = go(tmp_path, turns=24, faults=["kill"], first_port=port, **options)
    assert done["oracle_checkpoint"] and "oracle_lacks_the_start" not in done
    assert ("provenance_replayed" in done) == (reuse == "replay") and done["provenance_whole"]
