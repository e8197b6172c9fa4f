"""Results that differ by rounding only."""

from __future__ import annotations

import torch

from tests.integration.support.training import Result


def assert_close(actual: Result, expected: Result) -> None:
    """Assert that both results are close, each tensor as a whole: where both moments are near 0, AdamW turns any
    rounding difference into a step of full size."""
    torch.testing.assert_close(actual.losses, expected.losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual.norms, expected.norms, rtol=1e-3, atol=1e-5)
    for ours, theirs in ((actual.weights, expected.weights), (actual.moments, expected.moments)):
        assert ours.keys() == theirs.keys()
        for name in ours:
            distance = torch.linalg.vector_norm(ours[name] - theirs[name])
            assert distance <= 1e-2 * torch.linalg.vector_norm(theirs[name]) + 1e-5, name


def assert_close_in_16_bits(actual: Result, expected: Result, *, weights: float = 2e-2) -> None:
    """Assert that both results are close, the model as a whole.

    `weights` is the most distance of the weights, and of the moments if there are any, as a part of their norm.

    In 16 bits the order of three numbers changes their sum by up to a 256th. Some gradients consist of rounding only
    (the keys' biases), and AdamW turns such a gradient into a step of any size, so single tensors cannot be compared.
    """
    torch.testing.assert_close(actual.losses, expected.losses, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(actual.norms, expected.norms, rtol=1e-2, atol=1e-5)
    for ours, theirs in ((actual.weights, expected.weights), (actual.moments, expected.moments)):
        assert ours.keys() == theirs.keys()
        if not theirs:
            continue
        all_ours, all_theirs = (torch.cat([each[name].flatten() for name in theirs]) for each in (ours, theirs))
        assert torch.linalg.vector_norm(all_ours - all_theirs) <= weights * torch.linalg.vector_norm(all_theirs)
