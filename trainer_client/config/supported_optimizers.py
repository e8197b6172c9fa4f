"""Why the store does not run an optimizer. Pure text; knows classes by their names only, for most are not installed."""

from __future__ import annotations

HONOURED = ("AdamW", "Adam", "SGD", "Lion", "Adagrad")

# Lower case, without what implementations put around the name.
_NOT_ELEMENTWISE = frozenset(
    {"adafactor", "adamuon", "galore", "lamb", "lars", "lbfgs", "lion8bit", "muon", "onebitadam", "onebitlamb"}
    | {"shampoo", "soap", "sparseadam", "zerooneadam"}
)


def why_refused(name: str) -> str:
    """A sentence on an optimizer that is none of HONOURED."""
    instead = f"use {', '.join(HONOURED[:-1])} or {HONOURED[-1]}"
    if name.lower().removeprefix("fused") in _NOT_ELEMENTWISE:
        return (
            f"{name} is not elementwise: it needs whole parameters or their gradients' sparsity, and a store updates "
            f"ranges of parameters; {instead}"
        )
    return f"{name} is none of the optimizers that the store runs; {instead}"
