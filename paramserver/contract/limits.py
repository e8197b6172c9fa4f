"""Numbers on which the daemon and its clients must agree, each with the reason for its value."""

from __future__ import annotations

# The size of HTTP/2 frames between clients and the daemon: the largest that HTTP/2 allows, so that a chunk of 1 MiB is
# one frame. With the default of 16 KiB, a chunk would be split into 64 frames.
MAX_FRAME_BYTES = (1 << 24) - 1

# Shards start at multiples of this number of elements, in their parameter and in their group. torch's fused CPU kernels
# round the last `numel % 16` elements of a call differently. So a parameter that is cut at these multiples gets the
# same bits as the whole parameter. storage.base.shard.ELEMENT_ALIGNMENT is the same number; a test compares the two.
ELEMENT_ALIGNMENT = 16

# If one lease gathers several ranges of tensors, each range starts at a multiple of this number of bytes in the lease,
# so that it can be viewed as a tensor of its dtype. storage.memory.gathering.GATHER_ALIGNMENT is the same number; a
# test compares the two.
GATHER_ALIGNMENT_BYTES = 16

# The store verifies a tensor's checksums in blocks of this number of bytes. Only a read that begins at a multiple of it
# and covers whole blocks goes into the arena without a copy. storage.base.integrity.BLOCK_BYTES is the same number; a
# test compares the two.
READ_BLOCK_BYTES = 128 << 10

# If the store asks a rank to park gradients (`Lease.park`), the rank has at most this number of gradients that are not
# parked: the root unit's, those of the unit whose backward runs and of the unit before, and one of a further unit. The
# daemon admits a job only if its host budget can hold this number of the largest gradients of each rank.
GRADIENTS_AT_ONCE = 4

# The most units that the only rank of a job at a store maps in place at once: the root, the unit in use, and the one
# before or after it. Units placed in the host tier are not included. The daemon admits a job only if its host budget
# can hold this number of the largest units. If more units are in use, the trainer copies some of them
# (trainer_client/training/step/residency.py).
UNITS_MAPPED_AT_ONCE = 3

# The largest client state, which holds a rank's random states, schedule and data cursor. The limit is small, because
# OpenJob answers with the states of all retained steps in one message. The trainer checks the size before it makes a
# step, because the run would end if the daemon refused the state.
MAX_CLIENT_STATE_BYTES = 2 << 20
