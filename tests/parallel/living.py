"""Whether a process runs; without pytest, so that scripts may ask too."""

from pathlib import Path


def alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"
