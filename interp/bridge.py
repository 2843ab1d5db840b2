"""Hugging Face causal language models, seen block by block through transformers' attention interface.

``AttentionInterface.register`` lets a function of ours stand where a model calls its attention, whatever the family.
It gets grouped keys, the scaling, and where the family has them a sliding window, a soft cap and learned sinks
(``s_aux``). Ours computes the ordinary output, one block of queries at a time, and shows each block's scores and
weights to those who watch; nothing of size length x length is held. A model is believed only after :func:`self_test`.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from models.addition import generator
from models.config import InputError
from models.normalizers import softmax

NAME = "leaksum"  # under which transformers knows our attention
BLOCKS = (64, 32, 16)  # queries, the most whose scores take no more than this
BLOCK_BYTES = 2**23
KEYS = 512  # a block's keys end at a multiple, the last ones masked: blocks of few sizes leave no holes in memory
TOLERANCE = 1e-4  # of logits, as a share of their range, between our attention and the model's own
TEST_TOKENS, TEST_HEADS = 24, 8
_MOST = {  # of sizes in a configuration; larger ones are a mistake, or fit nowhere
    "num_hidden_layers": 1000,
    "num_attention_heads": 10_000,
    "num_key_value_heads": 10_000,
    "hidden_size": 1_000_000,
    "vocab_size": 10_000_000,
    "max_position_embeddings": 10**10,
}


class Block(NamedTuple):
    """One block of queries of one layer: which, and where they and the keys stand in their sequences.

    ``allowed``: bool ``[batch, 1, query, key]``, which keys a query sees. ``key`` begins past 0 where a sliding window
    leaves the first keys to nobody.
    """

    layer: int
    query: slice
    key: slice
    query_position: Int[Tensor, "batch query"]
    key_position: Int[Tensor, "batch key"]
    allowed: Bool[Tensor, "batch 1 query key"]
    window: int | None

    @property
    def distance(self) -> Int[Tensor, "batch query key"]:
        return self.query_position[:, :, None] - self.key_position[:, None, :]

    @property
    def seen(self) -> Int[Tensor, "batch query"]:
        """How many keys each query sees."""
        return self.allowed[:, 0].sum(-1)


# Scores [batch, head, query, key] and sink [batch, head, query] of a block, changed
Edit = Callable[[Tensor, Tensor | None, Block], tuple[Tensor, Tensor | None]]
# Shown a block, its scores, its sink and its weights
Watch = Callable[[Block, Tensor, Tensor | None, Tensor], None]


@dataclass
class _Session:
    mask: Bool[Tensor, "batch pos"]
    block: int
    edits: Sequence[Edit] = ()
    watches: Sequence[Watch] = ()
    padded: bool = True
    layers: dict[int, int] = field(default_factory=dict)  # attention modules, by identity, in the order of their calls


_SESSION: ContextVar[_Session] = ContextVar("leaksum attention")


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model of transformers, and its tokenizer if it came with one."""

    name: str
    model: Any
    tokenizer: Any = None

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def n_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def n_heads(self) -> int:
        return int(self.config.num_attention_heads)

    @property
    def n_key_heads(self) -> int:
        return int(getattr(self.config, "num_key_value_heads", None) or self.n_heads)

    @property
    def vocabulary(self) -> int:
        return int(self.config.vocab_size)

    @property
    def limit(self) -> int | None:
        """The most positions that the model's configuration names."""
        found = getattr(self.config, "max_position_embeddings", None)
        return None if found is None else int(found)

    def key_head(self, head: int) -> int:
        """The key head that a query head shares."""
        return head // (self.n_heads // self.n_key_heads)

    def run(
        self,
        tokens: Int[Tensor, "batch pos"],
        mask: Bool[Tensor, "batch pos"] | None = None,
        *,
        edits: Sequence[Edit] = (),
        watches: Sequence[Watch] = (),
        block: int | None = None,
        asked: Int[Tensor, "asked"] | None = None,
    ) -> Float[Tensor, "batch pos d_vocab"]:
        """Logits, in blocks of queries, under edits and before watchers.

        Padding is said by the mask alone, on either side; positions are counted over real tokens. With ``asked``, the
        logits at these indices alone, ``[batch, asked, d_vocab]``: those of all take more memory than the rest where
        the vocabulary is large.

        Raises:
            InputError: ids or a mask that do not fit, or more positions than the model has.
        """
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
        self._check(tokens, mask)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        if block is None:
            size = tokens.numel() * self.n_heads * 4  # bytes of one query's scores
            block = next((b for b in BLOCKS if b * size <= BLOCK_BYTES), BLOCKS[-1])
        few: dict[str, Any] = {}
        if asked is not None and "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            few["logits_to_keep"] = asked
        token = _SESSION.set(_Session(mask, block, edits, watches, padded=not bool(mask.all())))
        try:
            with torch.no_grad(), _evaluating(self.model), attention(self.model, NAME):
                out = self.model(
                    input_ids=tokens,
                    attention_mask=mask.long(),
                    position_ids=positions,
                    use_cache=False,
                    return_dict=True,
                    **few,
                )
        finally:
            _SESSION.reset(token)
        return out.logits if few or asked is None else out.logits[:, asked]

    def _check(self, tokens: Tensor, mask: Tensor) -> None:
        if tokens.ndim != 2 or not tokens.numel() or tokens.dtype not in (torch.int64, torch.int32):
            raise InputError(f"tokens must be integer ids [batch, pos], got {tokens.dtype} {tuple(tokens.shape)}")
        if mask.shape != tokens.shape:
            raise InputError(f"the mask must have the tokens' shape {tuple(tokens.shape)}, got {tuple(mask.shape)}")
        if not mask.any(1).all():
            raise InputError("a sequence has no real token; leave it out")
        real = tokens[mask]
        if int(real.min()) < 0 or int(real.max()) >= self.vocabulary:
            found = f"got {int(real.min())} to {int(real.max())}"
            raise InputError(f"token ids run from 0 to {self.vocabulary - 1} in this model, {found}")
        longest = int(mask.sum(1).max())
        if self.limit is not None and longest > self.limit:
            raise InputError(f"{self.name} has {self.limit} positions, got {longest} tokens; take a shorter input")


def load_language_model(name: str | Path) -> LanguageModel:
    """A model from a local directory, offline, or from the hub where no such directory exists and an id is given.

    Weights are read from safetensors alone, and no code that comes with a model is run. A directory without a tokenizer
    will do: token ids need none.

    Raises:
        InputError: no such directory, a model that cannot be read, or one that is no causal language model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar, set_verbosity

    disable_progress_bar()
    set_verbosity(logging.CRITICAL)  # what is wrong is said in one line, below
    path, text = Path(name), str(name)[:200]
    local = path.is_dir()
    if local:
        _check_files(path)
    elif path.exists() or text.startswith((".", "/", "~")) or text.count("/") != 1 or Path(text.split("/")[0]).exists():
        raise InputError(f"{text}: no such directory; give a model's directory, or a hub id as owner/name")
    options: dict[str, Any] = {"local_files_only": local, "trust_remote_code": False}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = AutoConfig.from_pretrained(name, **options)
            _check_config(config, text)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                name,
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                attn_implementation="eager",
                output_loading_info=True,
                **options,
            )
    except InputError:
        raise
    except Exception as error:  # whatever transformers makes of it
        why = " ".join(str(error).split())[:200]
        raise InputError(
            f"{text} cannot be read as a causal language model ({type(error).__name__}: {why}); see its files"
        ) from error
    model, found = loaded
    _check_weights(model, found, text)
    tokenizer, files = None, ("tokenizer.json", "tokenizer_config.json")
    if not local or any((path / file).is_file() for file in files):
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, **options)
        except Exception:  # token ids do without one, and text is refused where it is met
            tokenizer = None
    return LanguageModel(text, model.eval(), tokenizer)


def _check_files(path: Path) -> None:
    """Refuses a directory whose weights are not, or not all, in safetensors files of its own."""
    if not (path / "config.json").is_file():
        raise InputError(f"{path}: no config.json; give a model's directory in Hugging Face format")
    if not any(path.glob("*.safetensors")):
        raise InputError(f"{path}: no weights in safetensors; save the model with safe_serialization=True")
    for index in path.glob("*.index.json"):
        try:
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise InputError(f"{index}: no index of weights ({type(error).__name__}); save the model again") from error
        for file in files:
            if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
                raise InputError(f"{index}: names {str(file)[:60]!r}, which is no safetensors file of this directory")


def _check_config(config: Any, name: str) -> None:
    """Refuses sizes that make no model, or none that fits any machine, before one is built."""
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(f"{name}: its weights are quantized; give the model in float32, float16 or bfloat16")
    text = config.get_text_config()
    for field_name, most in _MOST.items():
        value = getattr(text, field_name, None)
        if value is not None and not (isinstance(value, int) and 1 <= value <= most):
            raise InputError(f"{name}: its config.json has {field_name}={value!r}, which must be from 1 to {most}")
    window = getattr(text, "sliding_window", None)
    if window is not None and not (isinstance(window, int) and window >= 1):
        raise InputError(f"{name}: its config.json has sliding_window={window!r}, which must be at least 1 or null")


def _check_weights(model: Any, found: dict[str, Any], name: str) -> None:
    """Refuses a model of which weights are missing, left over or not finite."""
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        keys = sorted(map(str, found.get(what) or ()))
        if keys:
            kind = what.removesuffix("_keys")
            raise InputError(
                f"{name}: {len(keys)} weights are {kind}, {keys[0][:80]} first; give a causal language model"
            )
    for key, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise InputError(
                f"{name}: {key} has weights that are not finite; the file is damaged, or training diverged"
            )


@contextmanager
def attention(model: Any, implementation: str) -> Iterator[None]:
    """Another attention implementation inside, and the former one afterwards."""
    _register()
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*arguments: Any, **options: Any) -> None:
    """The session knows the padding, and blocks make their own masks: none of length x length is built."""
    return None


def _attend(
    module: Any,
    query: Float[Tensor, "batch head query d"],
    key: Float[Tensor, "batch key_head key d"],
    value: Float[Tensor, "batch key_head key d"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, "head"] | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "batch query head d"], None]:
    session = _SESSION.get()
    layer = session.layers.setdefault(id(module), len(session.layers))
    _, heads, length, d = query.shape
    groups = heads // key.shape[1]
    scale = d**-0.5 if scaling is None else scaling
    position = (session.mask.cumsum(1) - 1).clamp(min=0)
    index = torch.arange(length)
    done = []
    for first in range(0, length, session.block):
        queries = slice(first, min(first + session.block, length))
        shown = min(length, -(-queries.stop // KEYS) * KEYS)
        keys = slice(0 if sliding_window is None else max(0, first - sliding_window + 1), shown)
        grouped = (scale * query[:, :, queries]).unflatten(1, (key.shape[1], groups)).flatten(2, 3)
        scores = (grouped @ key[:, :, keys].transpose(2, 3)).float()
        scores = scores.unflatten(2, (groups, -1)).flatten(1, 2)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        apart = index[queries, None] - index[keys]
        allowed = apart >= 0
        if sliding_window is not None:
            allowed &= apart < sliding_window
        seen = (allowed & session.mask[:, None, keys] & session.mask[:, queries, None])[:, None]
        block = Block(layer, queries, keys, position[:, queries], position[:, keys], seen, sliding_window)
        plain = sliding_window is None and not session.padded  # then every query sees what stands before the block
        last = scores[..., first if plain else 0 :]
        last.masked_fill_(~seen[..., first if plain else 0 :], -torch.inf)
        sink = None if s_aux is None else s_aux.float()[None, :, None].expand(scores.shape[:3])
        for edit in session.edits:
            scores, sink = edit(scores, sink, block)
            scores = scores.masked_fill(~seen, -torch.inf)  # no edit can open the future or the padding
        weights = softmax(scores, sink)
        for watch in session.watches:
            watch(block, scores, sink, weights)
        cast = weights.to(value.dtype).unflatten(1, (key.shape[1], groups)).flatten(2, 3)
        done.append((cast @ value[:, :, keys]).unflatten(2, (groups, -1)).flatten(1, 2))
    return torch.cat(done, dim=2).transpose(1, 2).contiguous(), None


def self_test(language_model: LanguageModel, seed: int = 0) -> None:
    """Refuses a model whose attention is not what we compute.

    On random tokens: our logits are those of the model's own attention; our weights are the ones that it reports; our
    scores and sinks give those weights; an edit of scores reaches the weights of every layer; without a head's weights
    the logits are others.

    Raises:
        InputError: one of these fails; says which.
    """
    try:
        _compare(language_model, _random_tokens(language_model, TEST_TOKENS, seed))
    except InputError:
        raise
    except Exception as error:  # of the model's own code
        why = " ".join(str(error).split())[:120]
        raise _refused(language_model, f"its forward pass fails ({type(error).__name__}: {why})") from error


def _compare(language_model: LanguageModel, tokens: Int[Tensor, "1 pos"]) -> None:
    kept: dict[int, list[Tensor]] = {}

    def keep(block: Block, scores: Tensor, sink: Tensor | None, weights: Tensor) -> None:
        full = torch.zeros(*weights.shape[:3], tokens.shape[1])
        full[..., block.key] = weights
        kept.setdefault(block.layer, []).append(full)

    found = language_model.run(tokens, watches=[keep], block=7)
    with torch.no_grad(), _evaluating(language_model.model), attention(language_model.model, "eager"):
        own = language_model.model(input_ids=tokens, use_cache=False, output_attentions=True, return_dict=True)
    span = float(own.logits.max() - own.logits.min()) or 1.0
    apart = float((found - own.logits).abs().max()) / span
    if not apart <= TOLERANCE:
        raise _refused(language_model, f"its logits and ours differ by {apart:.1e} of their range")
    if len(kept) != language_model.n_layers or len(own.attentions) != len(kept):
        raise _refused(language_model, f"{len(kept)} of {language_model.n_layers} layers called our attention")
    for layer, parts in kept.items():
        off = float((torch.cat(parts, dim=2) - own.attentions[layer]).abs().max())
        if not off <= TOLERANCE:
            raise _refused(language_model, f"layer {layer}'s weights differ by {off:.1e} from those it reports")
    _moves(language_model, tokens)


def _moves(language_model: LanguageModel, tokens: Tensor) -> None:
    """Equal scores give equal weights in every layer; a head silenced has no weights, and some head is missed."""
    off: list[float] = []

    def level(scores: Tensor, sink: Tensor | None, block: Block) -> tuple[Tensor, Tensor | None]:
        return torch.zeros_like(scores), None if sink is None else torch.zeros_like(sink)

    def leveled(block: Block, scores: Tensor, sink: Tensor | None, weights: Tensor) -> None:
        terms = block.seen + (sink is not None)
        even = torch.where(block.allowed, 1 / terms.clamp(min=1)[:, None, :, None], 0.0)
        off.append(float((weights - even).abs().max()))

    language_model.run(tokens, edits=[level], watches=[leveled])
    if not max(off) <= TOLERANCE:
        raise _refused(language_model, "equal scores did not give equal weights")
    heads = min(language_model.n_heads, TEST_HEADS)
    each = torch.arange(heads)  # row i of the batch is without head i of the first layer, the last without none
    empty: list[bool] = []

    def silence(scores: Tensor, sink: Tensor | None, block: Block) -> tuple[Tensor, Tensor | None]:
        if block.layer == 0:
            scores = scores.clone()
            scores[each, each] = -torch.inf
        return scores, sink

    def silenced(block: Block, scores: Tensor, sink: Tensor | None, weights: Tensor) -> None:
        if block.layer == 0:
            alive = weights.abs().amax((2, 3)) > 0
            empty.append(bool((alive[:, :heads] != torch.eye(heads + 1, heads, dtype=torch.bool)).all()))

    after = language_model.run(tokens.expand(heads + 1, -1), edits=[silence], watches=[silenced])
    if not all(empty):
        raise _refused(language_model, "a head's scores did not reach its weights alone")
    if all(torch.equal(after[-1], row) for row in after[:-1]):
        raise _refused(language_model, "its logits do not depend on the weights of its first layer")


def _refused(language_model: LanguageModel, why: str) -> InputError:
    return InputError(f"{language_model.name} is not audited: {why}; its attention is not one that leaksum knows")


def _random_tokens(language_model: LanguageModel, length: int, seed: int) -> Int[Tensor, "1 pos"]:
    most = length if language_model.limit is None else min(length, language_model.limit)
    ids = generator(seed, "audit", 0).integers(0, language_model.vocabulary, size=(1, most))
    return torch.from_numpy(ids)


# Edits at any length


def in_heads(edit: Edit, heads: Sequence[tuple[int, int]], n_heads: int) -> Edit:
    """The edit in these (layer, head) alone; in all where none is named."""
    if not heads:
        return edit

    def scoped(scores: Tensor, sink: Tensor | None, block: Block) -> tuple[Tensor, Tensor | None]:
        here = torch.zeros(n_heads, dtype=torch.bool)
        here[[head for layer, head in heads if layer == block.layer]] = True
        if not here.any():
            return scores, sink
        changed, changed_sink = edit(scores, sink, block)
        scores = torch.where(here[:, None, None], changed, scores)
        if sink is not None and changed_sink is not None:
            sink = torch.where(here[:, None], changed_sink, sink)
        return scores, sink

    return scoped


def far(beyond: int) -> Edit:
    """Removes keys more than so many positions before the query."""
    return _removing(lambda block: block.distance > beyond)


def first_and_window(first: int, last: int) -> Edit:
    """Removes every key but the first so many and the last so many, as in streaming attention (2309.17453)."""
    return _removing(lambda block: (block.key_position[:, None] >= first) & (block.distance >= last))


def _removing(which: Callable[[Block], Bool[Tensor, "batch query key"]]) -> Edit:
    def edit(scores: Tensor, sink: Tensor | None, block: Block) -> tuple[Tensor, Tensor | None]:
        return scores.masked_fill(which(block)[:, None], -torch.inf), sink

    return edit


def scaled(factor: Callable[[Block], Float[Tensor, "batch query"]]) -> Edit:
    """Multiplies scores, the learned sink's among them, by a factor of each query's."""

    def edit(scores: Tensor, sink: Tensor | None, block: Block) -> tuple[Tensor, Tensor | None]:
        here = factor(block)[:, None].to(scores.dtype)
        scores = torch.where(torch.isneginf(scores), scores, scores * here[..., None])
        return scores, None if sink is None else sink * here

    return edit


def temperature(value: float) -> Edit:
    """Divides scores and the learned sink by a number."""
    return scaled(lambda block: torch.full(block.query_position.shape, 1 / value))


def scalable_softmax(s: float) -> Edit:
    """Multiplies scores and the learned sink by ``s ln n``, n the keys that the query sees (2501.19399)."""
    return scaled(lambda block: s * block.seen.clamp(min=1).log())


def sink_boost(value: float | str, trained: int) -> Edit:
    """Adds to the learned sink a number, or ``log`` or ``2log``: log(n / trained), once or twice, never below 0."""

    def edit(scores: Tensor, sink: Tensor | None, block: Block) -> tuple[Tensor, Tensor | None]:
        if sink is None:
            raise InputError("sink-boost needs learned sinks, and this model has none; try first-and-window or far")
        if isinstance(value, str):
            boost = (2 if value == "2log" else 1) * (block.seen / trained).clamp(min=1).log()
        else:
            boost = torch.full(block.query_position.shape, float(value))
        return scores, sink + boost[:, None].to(sink.dtype)

    return edit


def uniform_first_token(length: int) -> float:
    """The mean weight on the first token over all queries of a sequence that attends evenly: ``H(length) / length``."""
    return math.fsum(1 / n for n in range(1, length + 1)) / length
