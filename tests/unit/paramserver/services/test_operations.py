"""The answers of the methods that change a running store."""

from __future__ import annotations

from paramserver.services.operations import MAX_DAMAGE_OF_A_MESSAGE, MAX_FQNS_OF_A_BLOCK, describe_damage
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.base.errors import DamagedBlockError
from storage.base.integrity import BLOCK_BYTES

# The largest message that a client of gRPC receives, unless it asks for more.
RECEIVED_BYTES = 4 << 20


def test_the_most_damage_of_a_message_in_blocks_of_many_long_names_goes_into_it() -> None:
    error = DamagedBlockError("job/a/param/step 1", 0, BLOCK_BYTES)
    error.fqns = tuple(f"{number:x>1024}" for number in range(1000))
    damage = describe_damage(error)
    assert list(damage.fqns) == list(error.fqns[:MAX_FQNS_OF_A_BLOCK]) and damage.bytes == BLOCK_BYTES
    message = admin_pb.VerifyResponse(damage=[damage] * MAX_DAMAGE_OF_A_MESSAGE)
    assert message.ByteSize() < RECEIVED_BYTES
