"""``HookedAdder``: a decoder-only, pre-norm transformer that adds, compatible with HookedTransformer.

TransformerLens 4 has no class of that name any more; what tools ask of a model is ``HookedRootModule``,
HookedTransformer's hook names and shapes, its weight names, and the protocol
``transformer_lens.model_protocol.TransformerLensModelWithWeights``. This is such a model, so ``run_with_cache``,
``ActivationCache``, ``head_detector``, ``patching`` and ``tools.analysis`` run on it.

Norms have no weights (TransformerLens calls that ``RMSPre``; the linear maps that follow absorb them), so a direction
in the unembedding is a direction in the residual stream, and direct logit attribution is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens import ActivationCache
from transformer_lens.config import TransformerLensConfig
from transformer_lens.hook_points import HookPoint
from transformer_lens.HookedRootModule import HookedRootModule

from models.addition import AdditionTask, Problem, parse_problem
from models.attention import Attention, Blocks, Geometry, KeyValueCache
from models.config import AdderConfig
from models.counters import Counters
from models.positions import SCHEMES, Bias, Coordinates, coordinates

UNBOUNDED = 2**31 - 1  # no scheme here has a largest position


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x**2) + eps)``, no weights."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps
        self.hook_scale, self.hook_normalized = HookPoint(), HookPoint()

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        scale = self.hook_scale((x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())
        return self.hook_normalized(x / scale)


class MLP(nn.Module):
    """``relu(x W_in + b_in) W_out + b_out``."""

    def __init__(self, d_model: int, d_mlp: int):
        super().__init__()
        self.W_in, self.b_in = nn.Parameter(torch.empty(d_model, d_mlp)), nn.Parameter(torch.zeros(d_mlp))
        self.W_out, self.b_out = nn.Parameter(torch.empty(d_mlp, d_model)), nn.Parameter(torch.zeros(d_model))
        self.hook_pre, self.hook_post = HookPoint(), HookPoint()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        pre = self.hook_pre(nn.functional.linear(x, self.W_in.T, self.b_in))
        return nn.functional.linear(self.hook_post(torch.relu(pre)), self.W_out.T, self.b_out)


class Embed(nn.Module):
    def __init__(self, d_vocab: int, d_model: int):
        super().__init__()
        self.W_E = nn.Parameter(torch.empty(d_vocab, d_model))

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        return nn.functional.embedding(tokens, self.W_E)


class PosEmbed(nn.Module):
    def __init__(self, positions: int, d_model: int):
        super().__init__()
        self.W_pos = nn.Parameter(torch.empty(positions, d_model))

    def forward(self, ids: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        return nn.functional.embedding(ids, self.W_pos)


class Unembed(nn.Module):
    def __init__(self, d_model: int, d_vocab: int):
        super().__init__()
        self.W_U, self.b_U = nn.Parameter(torch.empty(d_model, d_vocab)), nn.Parameter(torch.zeros(d_vocab))

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_vocab"]:
        return nn.functional.linear(x, self.W_U.T, self.b_U)


class Block(nn.Module):
    hook_out_is_single_residual_stream = True  # TransformerLens's readout checks ask for this

    def __init__(self, config: AdderConfig, layer: int, eps: float):
        super().__init__()
        self.ln1, self.attn = RMSNorm(eps), Attention(config, layer)
        self.ln2, self.mlp = RMSNorm(eps), MLP(config.d_model, config.d_mlp)
        self.hook_resid_pre, self.hook_attn_out = HookPoint(), HookPoint()
        self.hook_resid_mid, self.hook_mlp_out, self.hook_resid_post = HookPoint(), HookPoint(), HookPoint()

    def forward(self, x: Tensor, geometry: Geometry, sink_boost: Tensor | float, cache: KeyValueCache | None) -> Tensor:
        x = self.hook_resid_pre(x)
        x = self.hook_resid_mid(x + self.hook_attn_out(self.attn(self.ln1(x), geometry, sink_boost, cache)))
        return self.hook_resid_post(x + self.hook_mlp_out(self.mlp(self.ln2(x))))


class HookedAdder(HookedRootModule):
    """The model that is studied. Needs token ids alone: rows and columns are read off them.

    Args:
        config: shapes, attention and task.
        seed: of the initial weights, drawn from a generator of their own.
    """

    def __init__(self, config: AdderConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.task = AdditionTask(config.task)
        vocab = self.task.vocabulary
        self.cfg = TransformerLensConfig(
            d_model=config.d_model,
            d_head=config.d_head,
            n_layers=config.n_layers,
            n_ctx=UNBOUNDED,
            n_heads=config.n_heads,
            d_mlp=config.d_mlp,
            d_vocab=vocab.size,
            device="cpu",
            default_prepend_bos=False,
            positional_embedding_type=config.attention.scheme,
            act_fn="relu",
            normalization_type="RMSPre",
            uses_rms_norm=True,
            eps=1e-6,
        )
        self.scheme = SCHEMES[config.attention.scheme](config.attention, config.d_head)
        self.embed, self.hook_embed = Embed(vocab.size, config.d_model), HookPoint()
        if config.attention.scheme == "coupling":
            self.pos_embed = PosEmbed(config.attention.coupled_positions, config.d_model)
            self.hook_pos_embed = HookPoint()
        self.blocks: Any = nn.ModuleList(Block(config, layer, self.cfg.eps) for layer in range(config.n_layers))
        self.ln_final = RMSNorm(self.cfg.eps)
        self.unembed = Unembed(config.d_model, vocab.size)
        self._initialise(seed)
        self.setup()

    def _initialise(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        shrink = (2 * self.config.n_layers) ** -0.5  # keeps the residual stream's size at init independent of depth
        for name, weight in self.named_parameters():
            kind = name.rsplit(".", 1)[-1]
            if kind in ("W_E", "W_pos", "null_key"):
                nn.init.normal_(weight, std=1.0, generator=rng)
            elif kind.startswith("W_"):
                fan_in = weight.shape[0] * weight.shape[1] if kind == "W_O" else weight.shape[-2]
                scale = shrink if kind in ("W_O", "W_out") else 1.0
                nn.init.normal_(weight, std=scale * fan_in**-0.5, generator=rng)
        for module in self.modules():
            if isinstance(module, Counters | Bias):
                module.initialise(rng)

    def forward(
        self,
        input: Int[Tensor, "batch pos"] | str | Sequence[str],
        attention_mask: Bool[Tensor, "batch pos"] | None = None,
        *,
        return_type: Literal["logits", "loss"] | None = "logits",
        sink_boost: Float[Tensor, "batch"] | float | None = None,
        first_id: Int[Tensor, "batch"] | int = 0,
        blocks: Blocks | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor | None:
        """Logits ``[batch, pos, d_vocab]``, or the mean cross-entropy over decisions (``return_type="loss"``).

        Args:
            input: token ids, or problems as text (see :meth:`to_tokens`).
            attention_mask: true on real tokens; by default everything but ``<pad>``.
            sink_boost: added to every sink score, one number or one per sequence; by default the configuration's.
            first_id: of position coupling, the id at which each sequence starts (other schemes have none).
            blocks: run in blocks of queries, so that nothing of size pos x pos is held; see :class:`Blocks`.
            cache: keys and values of earlier tokens; only tokens past its length are run, and logits are theirs.

        Raises:
            ValueError: token ids out of range, a mask of another shape, or a boost without a sink.
            PositionError: position coupling has no id for a number as long as this.
        """
        tokens = self.to_tokens(input)
        mask = tokens != self.task.vocabulary.pad if attention_mask is None else attention_mask.bool()
        if mask.shape != tokens.shape:
            raise ValueError(
                f"attention_mask must have the tokens' shape {tuple(tokens.shape)}, got {tuple(mask.shape)}"
            )
        if sink_boost is None:
            sink_boost = self.config.attention.sink_boost
        elif not self.config.attention.sink:
            raise ValueError("sink_boost was given, but this model has no sink")
        boost = torch.as_tensor(sink_boost)
        if (boost.ndim and boost.shape != tokens.shape[:1]) or not torch.isfinite(boost).all():
            raise ValueError(f"sink_boost must be one finite number, or one a sequence, got shape {tuple(boost.shape)}")
        start = cache.length if cache is not None else 0
        at = self.coordinates(tokens, mask)
        geometry = Geometry(
            self.scheme,
            at,
            mask,
            start,
            self.W_U.dtype,
            blocks,
            self.config.trained_distance,
            poolable=self.config.attention.normalizer == "softmax" and not self.config.attention.scalable,
        )
        x = self.hook_embed(self.embed(tokens[:, start:]))
        ids = self.scheme.ids(at, first_id)
        if ids is not None:
            x = x + self.hook_pos_embed(self.pos_embed(ids[:, start:]))
        for block in self.blocks:
            x = block(x, geometry, sink_boost, cache)
        if cache is not None:
            cache.length = tokens.shape[1]
        if return_type is None:
            return None
        logits = self.unembed(self.ln_final(x))
        if return_type == "logits":
            return logits
        if return_type == "loss":
            return self.loss(logits, tokens, mask)
        raise ValueError(f"return_type must be 'logits', 'loss' or None, got {return_type!r}")

    def coordinates(self, tokens: Int[Tensor, "batch pos"], mask: Bool[Tensor, "batch pos"]) -> Coordinates:
        """Where every token stands."""
        vocab = self.task.vocabulary
        return coordinates(tokens, mask, (vocab.plus, vocab.equals), self.config.attention.separator_column)

    def loss(self, logits: Tensor, tokens: Tensor, mask: Tensor) -> Float[Tensor, ""]:
        """Mean cross-entropy, in nats, over the decisions: the tokens after ``=``."""
        answering = (tokens == self.task.vocabulary.equals).cumsum(1).bool()
        scored = (answering & mask)[:, :-1] & mask[:, 1:]
        return nn.functional.cross_entropy(logits[:, :-1][scored].float(), tokens[:, 1:][scored])

    @torch.no_grad()
    def generate(
        self, tokens: Int[Tensor, "batch pos"], mask: Bool[Tensor, "batch pos"], max_new_tokens: int
    ) -> Int[Tensor, "batch new"]:
        """Greedy continuation with a key-value cache; ``<pad>`` after a sequence's ``<eos>``.

        Stops when every sequence has ended. Prompts are padded on the right: padding between a prompt and its
        continuation is masked and not counted as a position.

        Raises:
            ValueError: an empty prompt, or ``max_new_tokens`` below 1.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        if not mask.any(1).all():
            raise ValueError("every prompt needs at least one real token")
        vocab = self.task.vocabulary
        cache = KeyValueCache(tokens.shape[1] + max_new_tokens)
        width = tokens.shape[1]
        last = torch.where(mask, torch.arange(width), -1).amax(1)
        done = torch.zeros(len(tokens), dtype=torch.bool)
        with self.evaluating():
            logits = self(tokens, mask, cache=cache)[torch.arange(len(tokens)), last]
            while True:
                new = torch.where(done, vocab.pad, logits.argmax(-1))
                tokens = torch.cat([tokens, new[:, None]], dim=1)
                mask = torch.cat([mask, ~done[:, None]], dim=1)
                done = done | (new == vocab.eos)
                if done.all() or tokens.shape[1] - width == max_new_tokens:
                    return tokens[:, width:]
                logits = self(tokens, mask, cache=cache)[:, -1]

    @contextmanager
    def evaluating(self) -> Iterator[HookedAdder]:
        """Evaluation mode inside, and the flag as it was afterwards."""
        was = self.training
        self.eval()
        try:
            yield self
        finally:
            self.train(was)

    def run_with_cache(
        self, *args: Any, return_cache_object: bool = True, remove_batch_dim: bool = False, **kwargs: Any
    ) -> Any:
        """As HookedRootModule's, with an ``ActivationCache`` unless ``return_cache_object=False``."""
        out, cache = super().run_with_cache(*args, remove_batch_dim=remove_batch_dim, **kwargs)
        if return_cache_object:
            return out, ActivationCache(cache, self, has_batch_dim=not remove_batch_dim)
        return out, cache

    # What TransformerLens's tools ask of a model

    def to_tokens(
        self, input: Tensor | str | Sequence[str], prepend_bos: bool | None = None
    ) -> Int[Tensor, "batch pos"]:
        """Problems as text (``"12+34"``, or ``"12+34="``), or ids, as ids ``[batch, pos]``.

        ``"12+34"`` is the whole sum with its answer; ``"12+34="`` stops at ``=``. Numbers are written as people
        write them and stored least significant chunk first.

        >>> model = HookedAdder(AdderConfig())
        >>> model.to_str_tokens(model.to_tokens("12+39"))
        ['2', '1', '+', '9', '3', '=', '1', '5', '<eos>']

        Raises:
            ValueError: ids out of range, of another shape, or not integers; text that is no problem.
        """
        if isinstance(input, Tensor):
            if input.is_floating_point() or input.dtype == torch.bool or input.ndim not in (1, 2) or not input.numel():
                raise ValueError(f"tokens must be integer ids [batch, pos], got {input.dtype} {tuple(input.shape)}")
            tokens = input[None] if input.ndim == 1 else input
            if tokens.min() < 0 or tokens.max() >= self.cfg.d_vocab:
                raise ValueError(
                    f"token ids run from 0 to {self.cfg.d_vocab - 1}, got {int(tokens.min())} to {int(tokens.max())}"
                )
            return tokens.long()
        texts = [input] if isinstance(input, str) else list(input)
        if not texts:
            raise ValueError("to_tokens needs at least one problem, got none")
        problems: list[Problem] = [parse_problem(text.removesuffix("=")) for text in texts]
        if len({text.endswith("=") for text in texts}) > 1:
            raise ValueError("problems with and without '=' do not mix in one call")
        return self.task.prompt(problems)[0] if texts[0].endswith("=") else self.task.encode(problems).tokens

    def to_single_token(self, text: str) -> int:
        """The id of one token's text, as :meth:`to_str_tokens` prints it."""
        for token in range(self.cfg.d_vocab):
            if self.task.vocabulary.text(token) == text:
                return token
        raise ValueError(f"{text!r} is not one token of this vocabulary")

    def to_str_tokens(self, input: Tensor | str, prepend_bos: bool | None = None) -> list[str]:
        """Each token of one sequence as text."""
        return [self.task.vocabulary.text(int(token)) for token in self.to_tokens(input)[0]]

    def tokens_to_residual_directions(self, tokens: Any) -> Float[Tensor, "*shape d_model"]:
        """The column of ``W_U`` of each token: the (normalised) residual direction that raises its logit."""
        ids = torch.as_tensor(self.to_single_token(tokens) if isinstance(tokens, str) else tokens)
        return self.W_U.T[ids.squeeze(-1) if ids.ndim == 1 and len(ids) == 1 else ids]

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, "d_model"]:
        """Sum of the biases written to the residual stream before ``layer`` (attention has none)."""
        total = torch.zeros(self.cfg.d_model, dtype=self.W_U.dtype)
        if include_mlp_biases:
            for block in self.blocks[:layer]:
                total = total + block.mlp.b_out
        return total

    def set_use_attn_result(self, use: bool) -> None:
        """Always compute ``hook_result`` (it is computed anyway when something is hooked there)."""
        self.cfg.use_attn_result = use
        for block in self.blocks:
            block.attn.use_attn_result = use

    def _stack(self, module: str, weight: str) -> Tensor:
        return torch.stack([getattr(getattr(block, module), weight) for block in self.blocks])

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        return self.embed.W_E

    @property
    def W_pos(self) -> Float[Tensor, "position d_model"]:
        return self.pos_embed.W_pos

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        return self.unembed.W_U

    @property
    def b_U(self) -> Float[Tensor, "d_vocab"]:
        return self.unembed.b_U

    @property
    def W_Q(self) -> Float[Tensor, "layer head d_model d_head"]:
        return self._stack("attn", "W_Q")

    @property
    def W_K(self) -> Float[Tensor, "layer head d_model d_head"]:
        return self._stack("attn", "W_K")

    @property
    def W_V(self) -> Float[Tensor, "layer head d_model d_head"]:
        return self._stack("attn", "W_V")

    @property
    def W_O(self) -> Float[Tensor, "layer head d_head d_model"]:
        return self._stack("attn", "W_O")

    @property
    def W_in(self) -> Float[Tensor, "layer d_model d_mlp"]:
        return self._stack("mlp", "W_in")

    @property
    def W_out(self) -> Float[Tensor, "layer d_mlp d_model"]:
        return self._stack("mlp", "W_out")

    @property
    def b_in(self) -> Float[Tensor, "layer d_mlp"]:
        return self._stack("mlp", "b_in")

    @property
    def b_out(self) -> Float[Tensor, "layer d_model"]:
        return self._stack("mlp", "b_out")
