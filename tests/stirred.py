"""Untrained models in which every weight matters."""

from __future__ import annotations

import torch

from models.transformer import HookedAdder


def stirred(model: HookedAdder, scale: float = 1.5) -> HookedAdder:
    """Peaked attention, and no weight left at its initial zero."""
    rng = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("W_Q", "W_K")):
                weight.mul_(scale)
            if name.rsplit(".", 1)[-1] in ("sink", "b_in", "b_out", "b_U"):
                weight.copy_(torch.randn(weight.shape, generator=rng))
            if ".bias." in name:
                weight.add_(0.3 * torch.randn(weight.shape, generator=rng))
            if ".counters." in name:
                weight.copy_(torch.randn(weight.shape, generator=rng) - (1.5 if "reset" in name else 0))
    return model.eval()
