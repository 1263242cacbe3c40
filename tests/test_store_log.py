"""The record log: acknowledged records survive, damage is found, nothing is skipped in silence."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from turnwise.errors import StoreError
from turnwise.store.log import RecordLog, decode_record, encode_record, read_records


def write(path, count, first=0):
    log = RecordLog(path)
    for number in range(first, first + count):
        log.append({"number": number, "text": "päivää\n"})
    log.close()


def numbers(path):
    return [record["number"] for record in read_records(path)]


def test_records_come_back_in_order_with_sequence_numbers(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, 3)
    write(path, 2, first=3)
    records = list(read_records(path))
    assert [record["seq"] for record in records] == [0, 1, 2, 3, 4]
    assert records[1] == {"seq": 1, "number": 1, "text": "päivää\n"}


def test_every_line_is_json_that_other_tools_can_read(tmp_path):
    write(tmp_path / "log.jsonl", 2)
    for line in (tmp_path / "log.jsonl").read_text().splitlines():
        assert {"seq", "number", "text", "crc"} == set(json.loads(line))


def test_truncation_at_every_byte_of_the_last_two_records_keeps_the_rest(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, 4)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    start = len(lines[0]) + len(lines[1])
    for size in range(start, len(whole)):
        path.write_bytes(whole[:size])
        complete = whole[:size].count(b"\n")
        assert len(list(read_records(path))) == complete
        log = RecordLog(path)
        log.append({"number": 99, "text": ""})
        log.close()
        assert numbers(path) == [*range(complete), 99]
        aside = tmp_path / "log.jsonl.incomplete"
        if not whole[:size].endswith(b"\n"):
            assert whole[:size].endswith(aside.read_bytes())
            aside.unlink()


def test_every_single_bit_flip_is_detected(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, 2)
    whole = path.read_bytes()
    for position in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            path.write_bytes(bytes(damaged))
            if position == len(whole) - 1:
                # Only a damaged last newline leaves something readable: the records before it.
                assert len(list(read_records(path))) == 1
                continue
            with pytest.raises(StoreError, match="record"):
                list(read_records(path))


def test_a_missing_record_in_the_middle_is_named(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    with pytest.raises(StoreError, match="record 1 carries sequence number 2"):
        list(read_records(path))


def test_a_second_writer_is_refused(tmp_path):
    path = tmp_path / "log.jsonl"
    log = RecordLog(path)
    with pytest.raises(StoreError, match="being written by another process"):
        RecordLog(path)
    log.close()
    RecordLog(path).close()


@pytest.mark.parametrize("fault", ["enospc", "short"])
def test_a_failed_write_takes_the_record_back_and_the_next_one_works(tmp_path, monkeypatch, fault):
    path = tmp_path / "log.jsonl"
    log = RecordLog(path)
    log.append({"number": 0})
    real_write = os.write

    def broken_write(handle, content):
        if fault == "short":
            return real_write(handle, content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", broken_write)
    with pytest.raises(StoreError):
        log.append({"number": 1})
    monkeypatch.setattr(os, "write", real_write)
    log.append({"number": 2})
    log.close()
    assert numbers(path) == [0, 2]


def test_nan_is_never_written(tmp_path):
    log = RecordLog(tmp_path / "log.jsonl")
    with pytest.raises(ValueError, match="JSON compliant"):
        log.append({"reward": float("nan")})
    log.close()


def test_rewinding_moves_the_tail_aside_and_goes_on_counting(tmp_path):
    path = tmp_path / "log.jsonl"
    log = RecordLog(path)
    log.append({"number": 0})
    size = log.size
    log.append({"number": 1})
    assert log.rewind(size, tmp_path / "aside.jsonl") == 1
    log.append({"number": 2})
    log.close()
    assert numbers(path) == [0, 2]
    assert b'"number":1' in (tmp_path / "aside.jsonl").read_bytes()


def test_killed_writers_lose_no_acknowledged_record(tmp_path):
    """Each round a process appends, prints what is on disk, and is killed at a random moment."""
    path = tmp_path / "log.jsonl"
    code = (
        "import sys; from pathlib import Path; from turnwise.store.log import RecordLog\n"
        "log = RecordLog(Path(sys.argv[1]), sync_every_record=True)\n"
        "while True: print(log.append({'text': 'x' * 500}), flush=True)\n"
    )
    acknowledged = -1
    for _ in range(12):
        writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.01)
        writer.send_signal(signal.SIGKILL)
        lines = [line for line in writer.stdout.read().split("\n") if line]
        writer.wait()
        if lines:
            acknowledged = max(acknowledged, *(int(line) for line in lines[:-1] or lines))
    log = RecordLog(path)
    log.close()
    assert [record["seq"] for record in read_records(path)][: acknowledged + 1] == list(
        range(acknowledged + 1)
    )


def test_a_line_carries_its_own_checksum():
    line = encode_record({"seq": 0, "a": 1})
    assert decode_record(line[:-1]) == {"seq": 0, "a": 1}
    with pytest.raises(ValueError, match="checksum"):
        decode_record(line[:-1].replace(b"1", b"2", 1))
