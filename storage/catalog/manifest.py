"""A manifest: the places of all slab versions that one step of a job wrote, packed into one run of bytes.

The records are little-endian and of fixed size, so that numpy packs and filters ten thousand slabs as arrays.
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
    """The places of one version of each of some slabs, as arrays.

    Attributes:
        entries: [slabs], of each slab its id, its number of extents and its number of blocks.
        extents: [extents of all slabs], in the order of `entries`.
        checksums: [blocks of all slabs], in the order of `entries`.
    """

    entries: NDArray[Any]
    extents: NDArray[Any]
    checksums: NDArray[np.uint64]

    @classmethod
    def of(cls, slabs: Sequence[int], versions: Sequence[StoredVersion]) -> Manifest:
        """Return the manifest of `versions`, where `versions[i]` belongs to the slab with the id `slabs[i]`."""
        entries = np.empty(len(slabs), _ENTRY)
        entries["slab"] = slabs
        entries["extents"] = [len(version.extents) for version in versions]
        entries["blocks"] = [len(version.checksums) // _CHECKSUM.itemsize for version in versions]
        extents = np.array([(e.offset, e.nbytes, e.file) for version in versions for e in version.extents], _EXTENT)
        return cls(entries, extents, np.frombuffer(b"".join(version.checksums for version in versions), _CHECKSUM))

    @classmethod
    def unpack(cls, data: bytes) -> Manifest:
        """Return the manifest that `pack` made these bytes of.

        Raises:
            ValueError: the bytes are not a packed manifest.
        """
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
        """Return the manifest as the bytes that the catalog stores; `unpack` is the inverse."""
        header = _HEADER.pack(len(self.entries), len(self.extents), len(self.checksums))
        return b"".join([header, self.entries.tobytes(), self.extents.tobytes(), self.checksums.tobytes()])

    @property
    def slabs(self) -> SlabIds:
        """The ids of the slabs that the manifest has a version of, as an array [slabs]."""
        return np.array(self.entries["slab"], np.int64)

    def only(self, mask: Mask) -> Manifest:
        """Return a manifest of the entries for which `mask` [slabs] is true."""
        return Manifest(
            self.entries[mask],
            self.extents[np.repeat(mask, self.entries["extents"])],
            self.checksums[np.repeat(mask, self.entries["blocks"])],
        )

    def replaced_by(self, other: Manifest) -> Manifest:
        """Return a manifest of the slabs of both. For a slab that is in both, it has the entry of `other`."""
        kept = self.only(~np.isin(self.slabs, other.slabs))
        return Manifest(
            np.concatenate([kept.entries, other.entries]),
            np.concatenate([kept.extents, other.extents]),
            np.concatenate([kept.checksums, other.checksums]),
        )

    def versions(self) -> Iterator[tuple[int, StoredVersion]]:
        """Yield for each slab its id and its version, with the version's extents and checksums."""
        extents = [Extent(offset, nbytes, file) for offset, nbytes, file in self.extents.tolist()]
        checksums = self.checksums.tobytes()
        extent = block = 0
        for slab, n_extents, n_blocks in self.entries.tolist():
            nbytes = n_blocks * _CHECKSUM.itemsize
            yield slab, StoredVersion(tuple(extents[extent : extent + n_extents]), checksums[block : block + nbytes])
            extent += n_extents
            block += nbytes


def visible_entries(manifests: Mapping[int, SlabIds], steps: Iterable[int]) -> dict[int, Mask]:
    """Find the manifest entries that readers of `steps` need.

    A reader of a step sees of each slab the newest version that is not newer than the step.

    Args:
        manifests: the slab ids of each manifest, by the manifest's step.
        steps: the committed steps that can be read.

    Returns:
        By the manifest's step, a mask of its entries: true for each entry that a reader of at least one step sees.
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
