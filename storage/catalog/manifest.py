"""A manifest: where the bytes of all slabs that were written in one step of a job are, packed into one run of bytes.

Fixed-size little-endian records, so that ten thousand slabs are packed, searched and thinned out as arrays.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.catalog.records import StoredVersion
from storage.tiers.extents import Extent

_HEADER = struct.Struct("<IIQ")
_ENTRY = np.dtype([("slab", "<i8"), ("extents", "<u4"), ("blocks", "<u4")])
_EXTENT = np.dtype([("offset", "<i8"), ("nbytes", "<i8"), ("file", "<i8")])
_CHECKSUM = np.dtype("<u8")

SlabIds = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Manifest:
    """`entries` [slabs]: id and number of extents and blocks of each; `extents` and `checksums`: of all, in order."""

    entries: NDArray[Any]
    extents: NDArray[Any]
    checksums: NDArray[np.uint64]

    @classmethod
    def of(cls, slabs: Sequence[int], versions: Sequence[StoredVersion]) -> Manifest:
        """Of the versions of the slabs with these ids."""
        entries = np.empty(len(slabs), _ENTRY)
        entries["slab"] = slabs
        entries["extents"] = [len(version.extents) for version in versions]
        entries["blocks"] = [len(version.checksums) // _CHECKSUM.itemsize for version in versions]
        extents = np.array([(e.offset, e.nbytes, e.file) for version in versions for e in version.extents], _EXTENT)
        return cls(entries, extents, np.frombuffer(b"".join(version.checksums for version in versions), _CHECKSUM))

    @classmethod
    def unpack(cls, data: bytes) -> Manifest:
        """What `pack` gave. Raises ValueError for anything else."""
        if len(data) < _HEADER.size:
            raise ValueError(f"a manifest of {len(data)} bytes has no header")
        entries, extents, blocks = _HEADER.unpack_from(data)
        first_extent = _HEADER.size + entries * _ENTRY.itemsize
        first_block = first_extent + extents * _EXTENT.itemsize
        if len(data) != first_block + blocks * _CHECKSUM.itemsize:
            raise ValueError(f"a manifest of {len(data)} bytes cannot have {entries}, {extents}, {blocks} records")
        manifest = cls(
            np.frombuffer(data, _ENTRY, entries, _HEADER.size),
            np.frombuffer(data, _EXTENT, extents, first_extent),
            np.frombuffer(data, _CHECKSUM, blocks, first_block),
        )
        if (manifest.entries["extents"].sum(), manifest.entries["blocks"].sum()) != (extents, blocks):
            raise ValueError(f"the slabs of a manifest do not have {extents} extents and {blocks} blocks in all")
        return manifest

    def pack(self) -> bytes:
        """The bytes that the catalog keeps."""
        header = _HEADER.pack(len(self.entries), len(self.extents), len(self.checksums))
        return b"".join([header, self.entries.tobytes(), self.extents.tobytes(), self.checksums.tobytes()])

    @property
    def slabs(self) -> SlabIds:
        """[slabs], the ids."""
        return np.array(self.entries["slab"], np.int64)

    def only(self, mask: Mask) -> Manifest:
        """The entries for which `mask` [slabs] is true."""
        return Manifest(
            self.entries[mask],
            self.extents[np.repeat(mask, self.entries["extents"])],
            self.checksums[np.repeat(mask, self.entries["blocks"])],
        )

    def replaced_by(self, other: Manifest) -> Manifest:
        """Both, where of a slab that is in both only the entry of `other` counts."""
        kept = self.only(~np.isin(self.slabs, other.slabs))
        return Manifest(
            np.concatenate([kept.entries, other.entries]),
            np.concatenate([kept.extents, other.extents]),
            np.concatenate([kept.checksums, other.checksums]),
        )

    def versions(self) -> Iterator[tuple[int, StoredVersion]]:
        """Each slab's id and version."""
        extents = [Extent(offset, nbytes, file) for offset, nbytes, file in self.extents.tolist()]
        checksums = self.checksums.tobytes()
        extent = block = 0
        for slab, n_extents, n_blocks in self.entries.tolist():
            nbytes = n_blocks * _CHECKSUM.itemsize
            yield slab, StoredVersion(tuple(extents[extent : extent + n_extents]), checksums[block : block + nbytes])
            extent += n_extents
            block += nbytes


def seen(manifests: Mapping[int, SlabIds], steps: Iterable[int]) -> dict[int, Mask]:
    """For each manifest (the slabs of its entries, by its step), which entries a reader of one of `steps` sees.

    A reader sees of each slab the newest version that is not newer than its step.
    """
    found = {step: np.zeros(len(slabs), np.bool_) for step, slabs in manifests.items()}
    if not manifests:
        return found
    first = min(int(slabs.min()) for slabs in manifests.values())
    last = max(int(slabs.max()) for slabs in manifests.values())
    for reader in steps:
        done = np.zeros(last - first + 1, np.bool_)
        for step in sorted((step for step in manifests if step <= reader), reverse=True):
            index = manifests[step] - first
            found[step] |= ~done[index]
            done[index] = True
    return found
