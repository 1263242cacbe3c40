import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_masking_benchmark_prints_one_row_per_length():
    command = [
        sys.executable,
        "benchmarks/masking.py",
        "--json",
        "--lengths",
        "64",
        "256",
        "--seconds",
        "0.05",
    ]
    shown = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT / "src")}
    )
    result = json.loads(shown.stdout)
    assert [row["tokens"] for row in result["rows"]] == [64, 256]
    assert all(row["speedup"] > 1 for row in result["rows"])
    assert shown.returncode == (0 if result["is_flat"] else 1)
