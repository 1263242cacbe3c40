"""Where a run's words and figures go besides its own files: the log file."""

from __future__ import annotations

import logging
from pathlib import Path


def start_logging(folder: Path, level: str) -> None:
    """Write everything turnwise logs at `level` or above to `run.log` in the run folder."""
    handler = logging.FileHandler(folder / "run.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("turnwise")
    for old in [found for found in logger.handlers if isinstance(found, logging.FileHandler)]:
        logger.removeHandler(old)
        old.close()
    logger.addHandler(handler)
    logger.setLevel(level)
