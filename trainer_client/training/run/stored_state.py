"""The client state that a commit carried, in the form that this version commits.

Earlier versions committed fewer entries. Only this module knows which entries they lack, so the code that resumes a run
finds the same entries in the commits of all versions. It must never change what a stored entry says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trainer_client.base.index_ranges import from_ranges, to_ranges
from trainer_client.errors import ClientStateError
from trainer_client.training.run import client_state

# The name of the entry that a rank adds to its client state when it amends a step; see `amend`.
AMENDMENT = "amendment"
_USER_PART = "engine.client_state"

# The entries of a client state that earlier versions did not commit. `decode_stored` sets a missing one to None, which
# stands for "was not recorded".
_ENTRIES = (
    *("model", "buffers", "made_at", "made_with", "imported", "rolled_back", "sorted_counts"),
    *("lr_scheduler_class", "sorted_groups", "extra_states", "late_buffers", AMENDMENT),
)


def decode_stored(encoded: bytes) -> dict[str, Any]:
    """Return the decoded client state of a commit; entries that its version did not record are None.

    The number of samples is an exception. If it was not recorded, all steps of the run had the same global batch, so
    the number is computed.

    Args:
        encoded: the state that a trainer or an import committed.

    Raises:
        ClientStateError: no version of this library has made `encoded`.
    """
    state = client_state.decode(encoded)
    try:
        counters = state["counters"]
        if "global_samples" not in counters:
            counters["global_samples"] = counters["global_steps"] * counters["train_batch_size"]
    except (KeyError, TypeError) as error:
        raise ClientStateError(f"the stored client state has no counters of a run: {error!r}") from None
    return dict.fromkeys(_ENTRIES) | state


def amend(state: dict[str, Any], *, everywhere: bool, somewhere: bool) -> None:
    """Apply or drop a rank's amendment, which has the script's changes between the step and the wait for its commit.

    A step has the changes of all its ranks or of none, so the changes count only if all ranks have amended their
    states. If not, the names of the changed buffers go to the entry "late_buffers", and the run's first line names them
    as lost.

    Args:
        state: the state, as `decode_stored` returned it.
        everywhere: whether all ranks of the commit have amended their states.
        somewhere: whether an amendment of any rank has changes; see `has_changes`.
    """
    amendment, late = state[AMENDMENT], state["late_buffers"] or []
    state[AMENDMENT] = None
    if everywhere and amendment is not None:
        (state["model"] or state)["buffers"].update(amendment["buffers"])
        state["user"] = amendment.get("user", state["user"])
        state["late_buffers"] = [name for name in late if name not in amendment["buffers"]]
    elif somewhere and not everywhere:
        lost = set(late)
        if amendment is not None:
            lost |= amendment["buffers"].keys() | ({_USER_PART} if "user" in amendment else set())
        state["late_buffers"] = sorted(lost) or ["those of some ranks"]


def decode_for_all(state_of: Callable[[int], bytes | None], ranks: Iterable[int]) -> dict[str, Any]:
    """Return the decoded state of rank 0. Its amendment is applied if all ranks have amended their states.

    Args:
        state_of: returns the encoded state of a rank.
        ranks: the ranks of the commit.

    Raises:
        ClientStateError: see `decode_stored`.
    """
    state = decode_stored(state_of(0) or b"")
    if state[AMENDMENT] is not None:
        amend(state, everywhere=all(is_amended(state_of(rank)) for rank in ranks), somewhere=has_changes(state))
    return state


def has_changes(state: Mapping[str, Any]) -> bool:
    """Return whether the amendment of a rank's decoded state has changes.

    A rank without changes makes an empty amendment if there are other ranks. They may have changes, which count only if
    each rank has amended its state.
    """
    amendment = state[AMENDMENT] or {}
    return bool(amendment.get("buffers")) or "user" in amendment


def is_amended(encoded: bytes | None) -> bool:
    """Return whether a rank's encoded state has an amendment, even an empty one. It can raise ClientStateError."""
    return bool(encoded) and decode_stored(encoded or b"")[AMENDMENT] is not None


def sort_counts(counts: Sequence[int], names: Sequence[str]) -> list[int] | None:
    """Return the parameters' numbers of updates in the alphabetical order of their names; None if all are equal.

    A later run of the same model may have its parameters in another order, and finds its own numbers by this list.

    Args:
        counts: the numbers of updates, in the model's order.
        names: the names of the parameters, in the model's order.
    """
    if len(set(counts)) <= 1:
        return None
    return [count for _, count in sorted(zip(names, counts, strict=True))]


def counts_of(state: Mapping[str, Any], names: Sequence[str]) -> list[int]:
    """Return the parameters' numbers of updates that a commit has, in the order of `names`.

    Args:
        state: the state, as `decode_stored` returned it.
        names: the names of all parameters of the model that made the commit, in any order. Commits of earlier versions
            have the numbers in the order of their own model only, so `names` is taken to be in that order.
    """
    if state["sorted_counts"] is None:
        return list(state["update_counts"])
    by_name = dict(zip(sorted(names), state["sorted_counts"], strict=True))
    return [by_name[name] for name in names]


def sort_groups(groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[list[list[int]]] | None:
    """Return the parameters of each group by their places in the alphabetical order of all names, as ranges.

    A later run of the same model may have its parameters in another order, and finds its own groups by this list. None
    is returned if one group has all parameters, because their order does not matter then.

    Args:
        groups: the settings of the groups, whose "params" are ranges of indexes in the model.
        names: the names of the parameters, in the model's order.
    """
    members = [from_ranges(group["params"]) for group in groups]
    if len(members) == 1 and len(members[0]) == len(names):
        return None
    place_of = {index: place for place, index in enumerate(_by_name(names))}
    return [to_ranges(sorted(place_of[index] for index in indexes)) for indexes in members]


def groups_of(state: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]] | None:
    """Return the settings of the parameter groups that a commit has, with indexes in the order of `names`.

    None is returned if the commit has no groups.

    Args:
        state: the state, as `decode_stored` returned it.
        names: the names of all parameters of the model that made the commit, as for `counts_of`.
    """
    groups: list[dict[str, Any]] | None = state["optimizer"]
    found = state["sorted_groups"]
    # If the order of the model's parameters is the same as at the commit, the parameters of each group keep the order
    # that they had in the group.
    if groups is None or found is None or found == sort_groups(groups, names):
        return groups
    by_name = _by_name(names)
    return [
        group | {"params": to_ranges(sorted(by_name[place] for place in from_ranges(places)))}
        for group, places in zip(groups, found, strict=True)
    ]


def _by_name(names: Sequence[str]) -> list[int]:
    """Return the indexes in `names` of its elements, in the alphabetical order of the elements."""
    return sorted(range(len(names)), key=names.__getitem__)
