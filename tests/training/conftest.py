import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in (str(ROOT), str(Path(__file__).resolve().parent)):
    if folder not in sys.path:
        sys.path.insert(0, folder)
