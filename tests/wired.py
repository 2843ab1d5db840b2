"""A model wired by hand: one head looks up the first number's digit in the decision's column, and the logits say it.

The residual stream holds the token one-hot (0 to 13), a constant (14), and what the head writes (16 to 25); the logits
read the last. Nothing else has weights. Rotated by row and column, the head's query and key agree best where the key
stands two rows before and one column after the query.
"""

from __future__ import annotations

import torch

from models.config import AdderConfig, AttentionConfig, TaskConfig
from models.transformer import HookedAdder

HEAD = (1, 0)
CONSTANT, WRITTEN = 14, 16


def wired(rows: int = 2, columns: int = -1, head: tuple[int, int] = HEAD) -> HookedAdder:
    """``rows`` and ``columns``: query less key, where the head looks."""
    config = AdderConfig(
        task=TaskConfig(),
        attention=AttentionConfig(rotary_base=100.0, separator_column=-1),
        n_layers=2,
        n_heads=2,
        d_model=32,
        d_head=16,
        d_mlp=4,
    )
    model = HookedAdder(config).eval()
    layer, h = head
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.embed.W_E[:, :14] = torch.eye(14)
        model.embed.W_E[:, CONSTANT] = 1.0
        attention = model.blocks[layer].attn
        attention.W_Q[h, CONSTANT, :8] = 20.0
        frequencies = 100.0 ** (-torch.arange(4) / 4)
        angle = torch.cat([rows * frequencies, columns * frequencies])
        attention.W_K[h, CONSTANT] = torch.cat([angle.cos(), angle.sin()])
        for digit in range(10):
            attention.W_V[h, digit, digit] = 1.0
            attention.W_O[h, digit, WRITTEN + digit] = 1.0
            model.unembed.W_U[WRITTEN + digit, digit] = 10.0
    return model
