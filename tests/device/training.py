"""The comparison of training runs on an accelerator with runs on the CPU, to rounding; the tests on GPUs use it."""

from __future__ import annotations

import torch

from tests.integration.support.training import Result

# Kernels add in another order on the device than on the CPU, because their results are laid out as a GPU's are.
RELATIVE = 1e-4
# The gradient of the bias of attention's keys is zero but for rounding, because attention does not depend on the bias.
# Weights of such parameters may differ by this.
ABSOLUTE = 1e-5


def assert_close(
    actual: Result, expected: Result, *, relative: float = RELATIVE, left_out: tuple[str, ...] = ()
) -> None:
    """Compare two results to rounding; the weights whose names end with a text of `left_out` are not compared.

    Weights are compared by the norm of the difference, because AdamW turns the rounding of a gradient that is nearly
    zero into a difference of some thousandths of the learning rate.
    """
    assert actual.skipped == expected.skipped
    torch.testing.assert_close(torch.tensor(actual.losses), torch.tensor(expected.losses), rtol=relative, atol=0)
    torch.testing.assert_close(torch.tensor(actual.norms), torch.tensor(expected.norms), rtol=relative, atol=0)
    assert actual.weights.keys() == expected.weights.keys()
    for name, weight in actual.weights.items():
        if name.endswith(left_out):
            continue
        norm = torch.linalg.vector_norm(expected.weights[name])
        difference = torch.linalg.vector_norm(weight - expected.weights[name])
        assert difference <= relative * norm + ABSOLUTE, (
            f"{name} differs by {difference:.2e}, and its norm is {norm:.2e}"
        )
