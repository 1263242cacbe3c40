"""Tokens per second of the action tracker, beside decoding the whole text at each token.

    python benchmarks/masking.py [--json] [--lengths 64 512 4096] [--seconds 0.5]

Half of each output is prose with stray braces, the other half an action that is still open, which is the tracker's
dearest case. Fails when a token of the longest output costs 1.5 times one of the shortest.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import transformers

import turnwise.models
from turnwise.masking import ActionTracker, TokenBytes

KEYS = frozenset({"move"})
MAX_RATIO = 1.5
# Short units, so that outputs of every length are made of the same stuff.
PROSE = 'so {1} "é" '
ACTION = '"a{": [-2.5], '


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--seconds", type=float, default=0.5, help="how long to measure each cell")
    options = parser.parse_args()
    folder = Path(turnwise.models.__file__).parent / "data" / "tiny-text"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    token_bytes = TokenBytes(tokenizer)
    rows = []
    for length in options.lengths:
        ids = make_output(tokenizer, length)
        tracked_s = best_time(lambda ids=ids: track(token_bytes, ids), options.seconds)
        naive_s = best_time(lambda ids=ids: decode_each_time(tokenizer, ids), options.seconds)
        rows.append(
            {
                "tokens": length,
                "tracker_tokens_per_s": round(length / tracked_s),
                "naive_tokens_per_s": round(length / naive_s),
                "tracker_us_per_token": round(tracked_s / length * 1e6, 3),
                "speedup": round(naive_s / tracked_s, 1),
            }
        )
    ratio = round(rows[-1]["tracker_us_per_token"] / rows[0]["tracker_us_per_token"], 3)
    result = {"rows": rows, "cost_ratio": ratio, "max_ratio": MAX_RATIO, "is_flat": ratio < MAX_RATIO}
    if options.json:
        print(json.dumps(result))
    else:
        print(f"{'tokens':>8} {'tracker tok/s':>14} {'naive tok/s':>12} {'µs/token':>9} {'speedup':>8}")
        for row in rows:
            print(
                f"{row['tokens']:>8} {row['tracker_tokens_per_s']:>14,} {row['naive_tokens_per_s']:>12,} "
                f"{row['tracker_us_per_token']:>9.2f} {row['speedup']:>7.1f}x"
            )
        print(f"cost per token, longest : shortest = {ratio} (must stay under {MAX_RATIO})")
    return 0 if result["is_flat"] else 1


def make_output(tokenizer: transformers.PreTrainedTokenizerBase, length: int) -> list[int]:
    prose = tokenizer.encode(PROSE * length, add_special_tokens=False)[: length // 2]
    action = tokenizer.encode("{" + ACTION * length, add_special_tokens=False)[: length - length // 2]
    return prose + action


def track(token_bytes: TokenBytes, ids: list[int]) -> ActionTracker:
    tracker = ActionTracker(token_bytes, KEYS)
    for token_id in ids:
        tracker.push(token_id)
    return tracker


def decode_each_time(tokenizer: transformers.PreTrainedTokenizerBase, ids: list[int]) -> int:
    """What a stopping rule without a tracker does: decode everything so far and look for a whole object."""
    found = 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end])
        start = text.find("{")
        if start >= 0 and text.rstrip().endswith("}"):
            try:
                json.loads(text[start:])
            except ValueError:
                continue
            found += 1
    return found


def best_time(call: Callable[[], object], seconds: float) -> float:
    """CPU time of the shortest of the runs that fit into `seconds`; other work on the machine only ever adds to a run."""
    best, until = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < until:
        started = time.process_time()
        call()
        best = min(best, time.process_time() - started)
    return best


if __name__ == "__main__":
    sys.exit(main())
