"""A small language model with a known task: induction, learned at short lengths.

A Llama of transformers (rotary positions) that reads random tokens repeated once, and predicts every token of the
second half: the token after the previous occurrence of the one it stands at. The checkpoint is a directory in Hugging
Face format, with ``training.json`` beside it.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from models.addition import generator
from models.checkpoint import CheckpointError
from models.files import write_atomically
from models.recipes import LanguageRecipe
from models.training import source_commit

PROBES = 64  # sequences behind each accuracy of the curve
PROBE_EVERY = 100


def train_language_model(
    recipe: LanguageRecipe,
    seed: int,
    folder: Path,
    progress: Callable[[int, float, float], None] = lambda step, loss, right: None,
) -> dict[str, Any]:
    """Train and write the checkpoint; takes minutes on one core, and starts again if it is stopped.

    Returns the last point of its curve: step, loss, and share of decisions right at the longest training length.

    Raises:
        CheckpointError: the folder holds a checkpoint already.
    """
    from transformers.utils.logging import disable_progress_bar

    if (folder / "training.json").exists():
        raise CheckpointError(f"{folder} already holds a checkpoint; choose another --out")
    folder.mkdir(parents=True, exist_ok=True)  # what cannot be written is known before the work
    model = _llama(recipe, seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay, betas=(0.9, 0.98)
    )
    curve: list[dict[str, Any]] = []
    right = 0.0
    for step in range(recipe.steps):
        warm = min(1.0, (step + 1) / recipe.warmup) if recipe.warmup else 1.0
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
        rng = generator(seed, "induction length", step)
        length = int(rng.integers(recipe.shortest // 2, recipe.longest // 2 + 1)) * 2
        tokens = repeated(recipe.vocabulary, length, recipe.batch, seed, step)
        logits = model(input_ids=tokens).logits
        loss = cross_entropy(logits[:, length // 2 : -1].flatten(0, 1), tokens[:, length // 2 + 1 :].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % PROBE_EVERY == 0 or step + 1 == recipe.steps:
            right = accuracy(model, repeated(recipe.vocabulary, recipe.longest, PROBES, seed, 0, "probe"))
            curve.append({"step": step + 1, "loss": loss.item(), "right": right})
        progress(step + 1, loss.item(), right)
    disable_progress_bar()
    model.eval().save_pretrained(folder, safe_serialization=True)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": _transformers()}
    record = {
        "recipe": recipe.model_dump(),
        "seed": seed,
        "threads": torch.get_num_threads(),
        "commit": source_commit(),
    }
    text = json.dumps({**record, "versions": versions, "curve": curve}, indent=1) + "\n"
    write_atomically(folder / "training.json", lambda aside: aside.write_text(text, encoding="utf-8"))
    return curve[-1]


def repeated(
    vocabulary: int, length: int, n: int, seed: int, index: int, stream: str = "train"
) -> Int[Tensor, "n length"]:
    """``n`` sequences of ``length // 2`` distinct random tokens, each repeated once; a function of seed and index."""
    rng = generator(seed, f"induction {stream}", index)
    first = rng.permuted(torch.arange(vocabulary).expand(n, -1).numpy(), axis=1)[:, : length // 2]
    return torch.from_numpy(first).repeat(1, 2)


@torch.no_grad()
def accuracy(model: Any, tokens: Int[Tensor, "n length"]) -> float:
    """Share of the second half's tokens that are predicted."""
    half = tokens.shape[1] // 2
    found = model(input_ids=tokens).logits[:, half:-1].argmax(-1)
    return (found == tokens[:, half + 1 :]).float().mean().item()


def _llama(recipe: LanguageRecipe, seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.width,
        intermediate_size=2 * recipe.width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=recipe.positions,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rotary_base},
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _transformers() -> str:
    import transformers

    return str(transformers.__version__)
