"""An audit's pass over a language model beside the usual ways, one thread, one run.

A randomly initialised Llama of 4 layers, 8 heads, 4 key heads and width 256. ``sdpa``: the plain forward pass with
scaled-dot-product attention. ``audit``: the same logits through leaksum's attention, with the ledger of 64 decisions.
``output_attentions``: what transformers returns when asked for weights. ``run_with_cache``: scores and patterns of all
layers through TransformerBridge. Seconds are medians over rounds in which the ways alternate, and the ratio that is
held to its bar the median of the rounds' ratios; peak memory is the growth of the resident set's high-water mark over
the loaded model, each in a process of its own. Run with ``make bench``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peak import grown, in_own_process

from interp.audit import _Book
from interp.bridge import LanguageModel, attention
from interp.cases import Case

LENGTHS = (1024, 4096, 16384)
FULL_UP_TO = 4096
DECISIONS = 64
ROUNDS = {1024: 5, 4096: 5, 16384: 1}


def llama() -> LanguageModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=16384,
    )
    torch.manual_seed(0)
    return LanguageModel("llama", LlamaForCausalLM(config).eval())


def tokens(length: int) -> torch.Tensor:
    return torch.randint(0, 512, (1, length), generator=torch.Generator().manual_seed(0))


def sdpa(model: LanguageModel, length: int) -> None:
    with torch.no_grad(), attention(model.model, "sdpa"):
        model.model(input_ids=tokens(length), use_cache=False)


def audited(model: LanguageModel, length: int) -> None:
    decisions = tuple(range(length - DECISIONS - 1, length - 1))
    case = Case(tuple(tokens(length)[0].tolist()), decisions, tuple((query // 2,) for query in decisions))
    model.run(tokens(length), watches=[_Book([case], 64, model.n_layers, model.n_heads).watch])


def output_attentions(model: LanguageModel, length: int) -> None:
    with torch.no_grad(), attention(model.model, "eager"):
        model.model(input_ids=tokens(length), use_cache=False, output_attentions=True)


_BRIDGES: dict[int, Any] = {}


def run_with_cache(model: LanguageModel, length: int) -> None:
    from transformer_lens.model_bridge import TransformerBridge

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from families import word_tokenizer

    if id(model) not in _BRIDGES:
        os.environ["HF_HUB_OFFLINE"] = "1"
        with tempfile.TemporaryDirectory() as folder:
            model.model.save_pretrained(folder)
            word_tokenizer().save_pretrained(folder)
            _BRIDGES[id(model)] = TransformerBridge.boot_transformers(folder, device="cpu")
    wanted = ("hook_attn_scores", "hook_pattern")
    with torch.no_grad():
        _BRIDGES[id(model)].run_with_cache(tokens(length), names_filter=lambda name: name.endswith(wanted))


ROUTES: dict[str, Callable[[LanguageModel, int], None]] = {
    "sdpa": sdpa,
    "audit": audited,
    "output_attentions": output_attentions,
    "run_with_cache": run_with_cache,
}


def measure_peak(route: str, length: int) -> float:
    model = llama()
    ROUTES[route](model, 128)  # what the first call alone takes
    return grown(lambda: ROUTES[route](model, length))


def main() -> int:
    torch.set_num_threads(1)
    if len(sys.argv) == 3:
        print(json.dumps(measure_peak(sys.argv[1], int(sys.argv[2]))))
        return 0
    model = llama()
    cells = [(r, n) for n in LENGTHS for r in ROUTES if n <= FULL_UP_TO or r in ("sdpa", "audit")]
    rounds: dict[tuple[str, int], list[float]] = {cell: [] for cell in cells}
    for route in ROUTES:
        ROUTES[route](model, 128)
    for i in range(max(ROUNDS.values())):
        for route, n in cells:
            if i < ROUNDS[n]:
                began = time.process_time()
                ROUTES[route](model, n)
                rounds[route, n].append(time.process_time() - began)
    seconds = {cell: median(taken) for cell, taken in rounds.items()}
    memory = {cell: in_own_process(__file__, *cell) for cell in cells}
    print("| one thread | " + " | ".join(f"{n} tokens" for n in LENGTHS) + " |")
    print("|---|" + "---:|" * len(LENGTHS))
    for route in ROUTES:
        row = [f"{seconds[c]:.1f} s, {memory[c]:.0f} MB" if (c := (route, n)) in seconds else "" for n in LENGTHS]
        print(f"| {route} | " + " | ".join(row) + " |")
    ratios = [a / b for a, b in zip(rounds["audit", 4096], rounds["sdpa", 4096], strict=True)]
    slower = median(ratios)
    above = memory["audit", 4096] - memory["sdpa", 4096]
    spread = f"{slower:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"\n- audit over sdpa, time, 4096 tokens: at most 3: {spread}{'' if slower <= 3 else ' (missed)'}")
    print(f"- audit above sdpa, MB, 4096 tokens: at most 250: {above:.0f}{'' if above <= 250 else ' (missed)'}")
    return 0 if slower <= 3 and above <= 250 else 1


if __name__ == "__main__":
    sys.exit(main())
