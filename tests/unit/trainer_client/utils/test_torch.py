"""The version of torch is compared as a version and not as a text."""

from __future__ import annotations

import pytest
import torch

from trainer_client.utils.torch import required_torch_version


def test_versions_are_compared_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.13.0"))

    assert required_torch_version(min_version="2.9") and required_torch_version(min_version=2.1, max_version="3.0")
    assert not required_torch_version(min_version="2.14") and not required_torch_version(max_version="2.9")
    with pytest.raises(ValueError, match="min_version or max_version"):
        required_torch_version()
