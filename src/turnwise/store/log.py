"""An append-only file of JSON lines that loses no acknowledged record.

Each line ends in a CRC of what precedes it and carries a sequence number. A record is one `write()` on
O_APPEND; a short write is cut back to the last good byte. On opening, an incomplete last line is set aside and reported;
damage anywhere else is an error that names the record.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from turnwise.errors import StoreError

log = logging.getLogger(__name__)
_CRC_LENGTH = len(',"crc":"00000000"}')


class RecordLog:
    """The single writer of one log file."""

    def __init__(self, path: Path, *, sync_every_record: bool = False) -> None:
        self._path = path
        self._sync_every_record = sync_every_record
        created = not path.exists()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise StoreError(
                f"{path} is being written by another process; wait for it or choose another run"
            ) from None
        if created:
            sync_folder(path.parent)
        self._size, self._next_seq = self._recover()

    @property
    def size(self) -> int:
        """Bytes of complete records."""
        return self._size

    def append(self, record: Mapping[str, Any]) -> int:
        """Write one record and return its sequence number. On disk for sure after the next `sync`."""
        seq = self._next_seq
        line = encode_record({"seq": seq, **record})
        try:
            written = os.write(self._file, line)
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise StoreError(
                f"cannot append to {self._path}: {error.strerror}; nothing was written"
            ) from error
        if written != len(line):
            os.ftruncate(self._file, self._size)
            raise StoreError(
                f"only {written} of {len(line)} bytes fitted into {self._path}; the record was taken back"
            )
        self._size += written
        self._next_seq += 1
        if self._sync_every_record:
            self.sync()
        return seq

    def sync(self) -> None:
        """Return once every appended record is on disk."""
        os.fsync(self._file)

    def rewind(self, size: int, aside: Path) -> int:
        """Move everything after `size` bytes into `aside` and return how many records that were."""
        if size > self._size:
            raise StoreError(
                f"{self._path} has {self._size} bytes, fewer than the {size} a checkpoint saw; records are missing"
            )
        tail = os.pread(self._file, self._size - size, size)
        if not tail:
            return 0
        with aside.open("ab") as file:
            file.write(tail)
            file.flush()
            os.fsync(file.fileno())
        os.ftruncate(self._file, size)
        os.fsync(self._file)
        moved = tail.count(b"\n")
        self._size = size
        self._next_seq -= moved
        return moved

    def close(self) -> None:
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1

    def _recover(self) -> tuple[int, int]:
        good, next_seq = 0, 0
        for end, record in _scan(self._path):
            good, next_seq = end, record["seq"] + 1
        size = os.fstat(self._file).st_size
        if size > good:
            tail = os.pread(self._file, size - good, good)
            aside = self._path.with_suffix(self._path.suffix + ".incomplete")
            aside.write_bytes(tail)
            os.ftruncate(self._file, good)
            log.warning(
                "%s ended in an incomplete record; its %d bytes are kept in %s",
                self._path,
                len(tail),
                aside.name,
            )
        return good, next_seq


def encode_record(record: Mapping[str, Any]) -> bytes:
    """`{"seq":0,"a":1}` becomes the line `{"seq":0,"a":1,"crc":"…"}`."""
    body = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    return body[:-1] + b',"crc":"%08x"}\n' % zlib.crc32(body)


def decode_record(line: bytes) -> dict[str, Any]:
    """The record of a complete line without its newline; ValueError when a bit is wrong."""
    body = line[:-_CRC_LENGTH] + b"}"
    if line[-_CRC_LENGTH:] != b',"crc":"%08x"}' % zlib.crc32(body):
        raise ValueError("the checksum does not match")
    record: dict[str, Any] = json.loads(body)
    return record


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Every complete record, in order; an incomplete last line (still being written) is left for later."""
    for _, record in _scan(path):
        yield record


def _scan(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Records with the offset of the byte after them."""
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if not line.endswith(b"\n"):
                return
            try:
                record = decode_record(line[:-1])
            except ValueError as error:
                raise StoreError(
                    f"{path}: record {number} (byte {end}) is damaged: {error}; restore it from a copy"
                ) from None
            if record.get("seq") != number:
                raise StoreError(
                    f"{path}: record {number} carries sequence number {record.get('seq')}; records are missing"
                )
            end += len(line)
            yield end, record


def sync_folder(folder: Path) -> None:
    """Make renames and new files in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, content: bytes) -> None:
    """Either the old file or the whole new one is there, whatever happens."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(f"cannot write {path}: {error.strerror}") from error
    sync_folder(path.parent)
