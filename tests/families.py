"""Tiny language models of the families that audits are tested on, randomly initialised; no file is fetched."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from interp.bridge import LanguageModel

VOCABULARY = 50
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _GROUPED),
    "gpt_oss": (
        "GptOss",
        {**_GROUPED, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 9},
    ),
    "mistral": ("Mistral", {**_GROUPED, "sliding_window": 9, "head_dim": 8}),
    "gemma2": (
        "Gemma2",
        {**_GROUPED, "head_dim": 8, "sliding_window": 9, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    ),
    "qwen3": ("Qwen3", {**_GROUPED, "head_dim": 8}),
    "gpt2": ("GPT2", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96}),
    "gpt_neox": ("GPTNeoX", _SIZES),
    "gemma3": ("Gemma3", {**_GROUPED, "head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 8}),
    "phi": ("Phi", _GROUPED),
    "olmo2": ("Olmo2", _GROUPED),
}


@cache
def tiny(family: str) -> LanguageModel:
    """Cached: leave it as you found it."""
    import transformers

    name, sizes = FAMILIES[family]
    text = "Text" if family == "gemma3" else ""
    config = getattr(transformers, f"{name}{text}Config")(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = "LMHeadModel" if family == "gpt2" else "ForCausalLM"
        model = getattr(transformers, f"{name}{head}")(config).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if any(part in name for part in ("q_proj", "k_proj", "c_attn", "query_key_value")) and weight.ndim == 2:
                    weight.mul_(15)  # peaked attention
                if name.endswith("sinks"):
                    weight.copy_(torch.linspace(-1, 2, len(weight)))
    return LanguageModel(family, model)


def word_tokenizer() -> Any:
    """Token i is the word ``t{i}``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t1", eos_token="t2", pad_token="t0")
