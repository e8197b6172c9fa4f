"""Numbers on which the two ends must agree, each with the reason for its value."""

from __future__ import annotations

# HTTP/2 frames are 16 KiB by default and would split each chunk of 1 MiB into 64. With the largest size that HTTP/2
# allows, a chunk is one frame.
MAX_FRAME_BYTES = (1 << 24) - 1

# Shards start at multiples of this number of elements, in their parameter and in their group. torch's fused CPU kernels
# round the last `numel % 16` elements of a call differently. So a parameter that is cut at these multiples gets the
# same bits as the whole parameter. storage.base.shard.ELEMENT_ALIGNMENT is the same number; a test compares the two.
ELEMENT_ALIGNMENT = 16

# Ranges that one lease gathers start at multiples of this number of bytes, so that each can be viewed as its element
# type. storage.memory.gathering.GATHER_ALIGNMENT is the same number; a test compares the two.
GATHER_ALIGNMENT_BYTES = 16

# The store verifies this number of bytes of a tensor at once. A read that begins at a multiple of it and covers the
# whole block goes into the arena without a copy. storage.base.integrity.BLOCK_BYTES is the same number; a test compares
# the two.
READ_BLOCK_BYTES = 128 << 10

# The most gradients that a rank has at once without parking them, if the store asks it to park (`Lease.park`): that of
# the root, those of the unit whose backward runs and of the one before, and one that another unit waits with. The
# daemon admits a job only if its host budget can hold this number of the largest gradients of each rank.
GRADIENTS_AT_ONCE = 4

# The most units that the only rank of a job at a store maps in place at once: the root, the unit in use, and the one
# before or after it. Units placed in the host tier are not included. The daemon admits a job only if its host budget
# can hold this number of the largest units. If more units are in use, the trainer copies some of them
# (trainer_client/training/step/residency.py).
UNITS_MAPPED_AT_ONCE = 3

# A client state has random states, a schedule and a data cursor. OpenJob answers with the states of all retained steps
# in one message, so a single one must be small. The trainer looks before a step is made, because a state that the
# daemon refuses would end the run.
MAX_CLIENT_STATE_BYTES = 2 << 20
