"""The archive in which `torch.save` writes: a zip without compression, of which only the list of records is trusted.

The records are read where the list says that they are, by this module alone. Two readers of a zip can see different
records in one file, so a check by one reader would say nothing about what another reader reads.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

from trainer_client.errors import ImportCheckpointError

_READ_AT_ONCE = 4 << 20
# The fixed part of the header that comes before the bytes of each record in a zip archive. It has the signature and, at
# its end, the lengths of the record's name and of the extra field, which follow it.
_HEADER = struct.Struct("<4s22xHH")
_SIGNATURE = b"PK\3\4"
_ENCRYPTED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One entry of an archive: where its bytes are in the file, and their CRC-32."""

    first_byte: int
    size_bytes: int
    checksum: int


class TorchArchive:
    """An archive that is open for reading.

    Attributes:
        records: the records by name, without the name of the archive's only directory.
    """

    def __init__(self, file: IO[bytes], where: object) -> None:
        """Read the list of records of an open file, which must stay open. `where` names the file in errors.

        Raises:
            ImportCheckpointError: the file is no such archive, or reading it could take more memory than the file has
                bytes.
        """
        self._file = file
        self._where = where
        self._size = file.seek(0, os.SEEK_END)
        try:
            if not zipfile.is_zipfile(file):
                raise ImportCheckpointError(
                    f"{where} is not a file of torch.save in its present format, a zip archive, or it is cut short"
                )
            with zipfile.ZipFile(file) as archive:
                self.records = self._locate(archive.infolist())
        except ImportCheckpointError:
            raise
        except Exception as error:
            # zipfile raises errors of many classes for a damaged archive, so errors of all classes are caught.
            raise damaged(where, error) from None

    def read(self, record: Record) -> bytes:
        """Return the bytes of one of this archive's records, read from the file."""
        self._file.seek(record.first_byte)
        return self._file.read(record.size_bytes)

    def verify(self) -> None:
        """Read all records, and compare them with their checksums. It can raise ImportCheckpointError, OSError."""
        for name, record in self.records.items():
            self._file.seek(record.first_byte)
            found, missing = 0, record.size_bytes
            while missing and (piece := self._file.read(min(missing, _READ_AT_ONCE))):
                found, missing = zlib.crc32(piece, found), missing - len(piece)
            if missing or found != record.checksum:
                raise ImportCheckpointError(f"{self._where}: record {name!r} differs from its checksum")

    def _locate(self, entries: list[zipfile.ZipInfo]) -> Mapping[str, Record]:
        """Return the record of each entry in the zip's list, by its name. It can raise ImportCheckpointError."""
        directories = {entry.filename.partition("/")[0] for entry in entries}
        found: dict[str, Record] = {}
        end = 0
        for entry in sorted(entries, key=lambda entry: entry.header_offset):
            name = entry.filename.partition("/")[2]
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise self._refusal(entry, "is compressed, which torch.save never does")
            if entry.flag_bits & _ENCRYPTED:
                raise self._refusal(entry, "is encrypted, which torch.save never does")
            if not name or name in found or len(directories) > 1:
                raise self._refusal(entry, "has no name of its own in the archive's only directory")
            if entry.header_offset < end or (not found and entry.header_offset):
                raise self._refusal(entry, "overlaps another one, or is not the first of the file")
            first_byte = self._first_byte(entry)
            found[name] = Record(first_byte=first_byte, size_bytes=entry.file_size, checksum=entry.CRC)
            end = first_byte + entry.file_size
            if end > self._size:
                raise self._refusal(entry, "goes beyond the end of the file")
        return found

    def _first_byte(self, entry: zipfile.ZipInfo) -> int:
        self._file.seek(entry.header_offset)
        header = self._file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(_SIGNATURE):
            raise self._refusal(entry, "has no header")
        _, name_bytes, extra_bytes = _HEADER.unpack(header)
        return entry.header_offset + _HEADER.size + int(name_bytes) + int(extra_bytes)

    def _refusal(self, entry: zipfile.ZipInfo, why: str) -> ImportCheckpointError:
        return ImportCheckpointError(f"{self._where}: record {entry.filename!r} {why}")


def damaged(where: object, error: Exception) -> ImportCheckpointError:
    """Return the error that says that the file `where` is damaged, because reading it has failed with `error`."""
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return ImportCheckpointError(f"{where} is damaged or not a file of torch.save: {reason}")
