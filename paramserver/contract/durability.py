"""The durability classes of a job in the form in which people write them: "step", "snapshot:N" or "none".

Trainers also know "replicated": the store's class is "step", and the trainer waits for the job's replicas besides.
"""

from __future__ import annotations

from paramserver.v1 import parameter_store_pb2 as pb

# The training config accepts durabilities that match this pattern. `parse_durability` also accepts leading zeros in N.
DURABILITY_PATTERN = r"^(step|replicated|none|snapshot:[1-9][0-9]*)$"
REPLICATED = "replicated"


def parse_durability(text: str) -> pb.Durability:
    """Return the durability class that a text names, for example "snapshot:10".

    Raises:
        ValueError: the text names no class.
    """
    if text in ("step", REPLICATED):
        return pb.Durability(step=pb.Durability.Step())
    if text == "none":
        return pb.Durability(none=pb.Durability.Volatile())
    word, _, number = text.partition(":")
    if word == "snapshot" and number.isdecimal() and int(number) > 0:
        return pb.Durability(snapshot=pb.Durability.Snapshot(every_steps=int(number)))
    raise ValueError(f"{text!r} is no durability class")


def durability_text(durability: pb.Durability) -> str:
    """Return the text that names a durability class, for example "snapshot:10", or "-" if none is set."""
    name = durability.WhichOneof("class") or "-"
    return f"snapshot:{durability.snapshot.every_steps}" if name == "snapshot" else name


def durable_every_steps(durability: pb.Durability) -> int:
    """Return the number of steps from one durable commit to the next; 0 if no commit is durable."""
    match durability.WhichOneof("class"):
        case "step":
            return 1
        case "snapshot":
            return durability.snapshot.every_steps
        case _:
            return 0
