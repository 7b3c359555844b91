"""The KV cache's counters in the Prometheus text format.

Owns: their names, labels and help. Knows nothing of: the cache, HTTP.
"""

from collections.abc import Callable, Iterator, Mapping

_PLAIN = {
    "tokens_reused": ("kv_tokens_reused_total", "Prompt tokens that were not computed."),
    "tokens_computed": ("kv_tokens_computed_total", "Prompt tokens that were, beside them."),
    "stored": ("kv_stored_total", "Conversations kept."),
    "store_full": ("kv_store_full_total", "Conversations not kept for want of memory."),
    "store_refused": (
        "kv_store_refused_total",
        "Conversations that could not be kept as they are.",
    ),
    "chunks_shared": ("kv_chunks_shared_total", "Chunks that were there already."),
    "leases_expired": (
        "kv_leases_expired_total",
        "Leases that ended by time, not by their reader.",
    ),
    "errors": ("kv_errors_total", "Faults of the cache that cost a request its help."),
    "fetch_bytes": ("kv_fetch_bytes_total", "Bytes read from peers."),
    "export_bytes": ("kv_export_bytes_total", "Bytes sent to peers."),
    "export_reader_gone": ("kv_export_readers_gone_total", "Peers that left in the middle."),
    "disk_written": ("kv_disk_written_total", "Conversations written to disk."),
    "disk_write_failed": ("kv_disk_write_failed_total", "Those that the disk did not take."),
    "fetched_for_nothing": (
        "kv_fetches_unused_total",
        "Conversations that were fetched and dropped without a use.",
    ),
    "handed_over": ("kv_handed_over_total", "Conversations that peers took when this server left."),
    "handed_over_bytes": ("kv_handed_over_bytes_total", "Their bytes."),
    "hand_over_left": ("kv_hand_over_left_total", "Those that nobody took in time."),
    "taken_over": ("kv_taken_over_total", "Conversations taken from peers that left."),
    "directory_answers": ("kv_directory_answers_total", "Calls that the directory answered."),
    "directory_epoch_changes": (
        "kv_directory_epoch_changes_total",
        "Times that the directory had lost its data.",
    ),
    "sidecar_reads": ("kv_sidecar_reads_total", "Chunks read through the sidecar."),
    "sidecar_restarts": ("kv_sidecar_restarts_total", "Starts of it after it had ended."),
    "sidecar_stalled": ("kv_sidecar_stalls_total", "Times that it was ended for want of answers."),
    "directory_breaker_open": ("kv_directory_breaker_open_total", "Calls not made: it was down."),
}
_GAUGES = {
    "entries": ("kv_entries", "Conversations in memory."),
    "leases": ("kv_leases", "Conversations that peers read now."),
    "pins": ("kv_pins", "Uses of conversations by this server now."),
    "disk_files": ("kv_disk_files", "Conversations on disk."),
    "disk_bytes": ("kv_disk_bytes", "Their bytes."),
    "fetch_peers_backing_off": ("kv_peers_backing_off", "Peers that failed and are not asked now."),
    "preparing": ("kv_preparing", "Requests that are looked up or fetched now."),
}
_LABELLED = (
    (
        "kv_lookups_total",
        "result",
        "Prompts looked up in the cache.",
        {"hits": "hit", "misses": "miss"},
    ),
    (
        "kv_starts_total",
        "kind",
        "How requests with a hit were started.",
        {f"hits_{kind}": kind for kind in ("checkpoint", "recompute", "replay", "prefix")},
    ),
    (
        "kv_verify_failures_total",
        "what",
        "Bytes that were not what they should be; nothing of them was used.",
        {"corrupt": "memory", "fetch_corrupt": "fetch", "disk_damaged": "disk"},
    ),
    (
        "kv_dropped_total",
        "reason",
        "Conversations dropped from memory.",
        {f"dropped_{reason}": reason for reason in ("evicted", "corrupt")},
    ),
    (
        "kv_directory_lookups_total",
        "result",
        "Sessions looked up in the directory.",
        {"lookup_ok": "ok", "lookup_none": "unavailable", "prepare_failed": "failed"},
    ),
    (
        "kv_claims_total",
        "result",
        "Claims of ownership.",
        {f"claim_{r}": r for r in ("ok", "stale", "unknown", "unavailable")},
    ),
    (
        "kv_fetches_total",
        "result",
        "Fetches from peers by how they ended.",
        {
            f"fetch_{r}": r
            for r in (
                *("hit", "miss", "stale", "incompatible", "busy", "too_slow", "timeout"),
                *("disconnect", "corrupt", "full", "backoff", "unneeded"),
            )
        },
    ),
)
Family = Callable[[str, str, str, list[tuple[str, float]]], None]


def kv_families(stats: Mapping[str, int], family: Family) -> None:
    """Every family of the cache whose counters are in `stats`, named kv_*."""
    known = {k.removeprefix("kv_"): v for k, v in stats.items() if k.startswith("kv_")}
    for kind, table in (("gauge", _GAUGES), ("counter", _PLAIN)):
        for key, (name, text) in table.items():
            family(name, kind, text, [("", known[key])] if key in known else [])
    for name, label, text, keys in _LABELLED:
        family(
            name,
            "counter",
            text,
            [(f'{{{label}="{v}"}}', known[k]) for k, v in keys.items() if k in known],
        )
    family("kv_slab_bytes", "gauge", "Memory of the cache by state.", list(_slab(known)))
    for key, name, text in (
        ("fetch_microseconds", "kv_fetch_seconds_total", "Time of good fetches."),
        ("directory_microseconds", "kv_directory_seconds_total", "Time of the answers."),
    ):
        family(name, "counter", text, [("", known[key] / 1e6)] if key in known else [])
    phases = {"open": "fetch_open", "read": "fetch_read", "verify": "fetch_verify"}
    found = {phase: f"{key}_microseconds" for phase, key in phases.items()}
    found["copy"] = "restore_microseconds"
    family(
        "kv_phase_seconds_total",
        "counter",
        "Time by phase; bytes are verified while others are read.",
        [(f'{{phase="{p}"}}', known[key] / 1e6) for p, key in found.items() if key in known],
    )
    most = "lease_most_milliseconds"
    ages = [("", known[most] / 1e3)] if most in known else []
    family("kv_lease_age_max_seconds", "gauge", "Of the longest lease so far.", ages)


def _slab(known: Mapping[str, int]) -> Iterator[tuple[str, float]]:
    for state in ("free", "used", "condemned", "quarantined"):
        if f"slots_{state}" in known:
            yield f'{{state="{state}"}}', known[f"slots_{state}"] * known.get("slot_bytes", 0)
