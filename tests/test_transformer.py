from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.attention import Blocks, KeyValueCache
from models.normalizers import softmax

NAMES = ["rotary2d", "rotary", "none", "counters", "alibi", "fire", "cope", "coupling"]
SCHEMES = pytest.mark.parametrize("scheme", NAMES)
SINKS = pytest.mark.parametrize("sink", [True, False], ids=["sink", "no-sink"])
SCORES, PATTERN, SINK = (f"blocks.1.attn.hook_{name}" for name in ("attn_scores", "pattern", "sink_scores"))
HOOKS = [
    "hook_embed",
    "ln_final.hook_scale",
    "ln_final.hook_normalized",
    *(
        f"blocks.{layer}.{name}"
        for layer in (0, 1)
        for name in (
            *(f"hook_{n}" for n in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")),
            *(f"{ln}.hook_{n}" for ln in ("ln1", "ln2") for n in ("scale", "normalized")),
            *(f"attn.hook_{n}" for n in ("q", "k", "v", "rot_q", "rot_k", "z", "result")),
            *(f"attn.hook_{n}" for n in ("attn_scores", "sink_scores", "pattern")),
            *(f"mlp.hook_{n}" for n in ("pre", "post")),
        )
    ),
]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def close(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def hidden_keys(mask):
    """What no query may see: the future and the padding. ``[batch, 1, query, key]``."""
    n = mask.shape[1]
    return (torch.ones(n, n, dtype=torch.bool).triu(1) | ~mask[:, None, :] | ~mask[:, :, None])[:, None]


def widened(block, keys, value):
    """A block of scores or weights with as many keys as the whole sequence."""
    return torch.nn.functional.pad(block, (0, keys - block.shape[-1]), value=value)


def slow_forward(model, tokens, row, column):
    """One sequence in float64, query by query and key by key. Returns logits, scores and sink shares per layer."""
    weights = {name: weight.double().numpy() for name, weight in model.state_dict().items()}
    attention, d_head = model.config.attention, model.config.d_head
    x = weights["embed.W_E"][tokens]
    if attention.scheme == "coupling":
        ids = [0 if token in (10, 11) else c + 1 for token, c in zip(tokens, column, strict=True)]
        x = x + weights["pos_embed.W_pos"][ids]
    scores, shares = [], []
    for layer in range(model.config.n_layers):
        w = {name.removeprefix(f"blocks.{layer}."): value for name, value in weights.items()}
        normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        layer_scores = np.full((model.config.n_heads, len(tokens), len(tokens)), -np.inf)
        layer_shares = np.zeros((model.config.n_heads, len(tokens)))
        out = np.zeros_like(x)
        for head in range(model.config.n_heads):
            q, k, v = (normed @ w[f"attn.W_{name}"][head] for name in "QKV")
            added = np.zeros([len(tokens)] * 2)
            if attention.scheme == "counters":
                added = slow_counters(normed, w, head)
            elif attention.scheme in SLOW_BIASES:
                biased = SLOW_BIASES[attention.scheme]
                for i in range(len(tokens)):
                    for j in range(i + 1):
                        added[i, j] = biased(model.config, w, head, i, j, q[i] / math.sqrt(d_head), k)
            for i in range(len(tokens)):
                for j in range(i + 1):
                    gaps = {
                        "rotary": (i - j) * attention.rotary_base ** (-np.arange(d_head // 2) / (d_head // 2)),
                        "rotary2d": np.outer(
                            [row[i] - row[j], column[i] - column[j]],
                            attention.rotary_base ** (-np.arange(d_head // 4) / (d_head // 4)),
                        ).ravel(),
                    }.get(attention.scheme, np.zeros(d_head // 2))
                    as_complex = [u[: d_head // 2] + 1j * u[d_head // 2 :] for u in (q[i], k[j])]
                    product = (as_complex[0] * as_complex[1].conj() * np.exp(1j * gaps)).sum().real
                    fade = math.exp(-attention.decay * abs(column[i] - column[j]))
                    layer_scores[head, i, j] = product / math.sqrt(d_head) * fade + added[i, j]
                mass = np.exp(layer_scores[head, i])
                null = q[i] @ w["attn.null_key"][head] / math.sqrt(d_head) if attention.null_key else None
                sink = math.exp(w["attn.sink"][head] if null is None else null) if attention.sink else 0.0
                layer_shares[head, i] = sink / (sink + mass.sum())
                out[i] += (mass / (sink + mass.sum())) @ v @ w["attn.W_O"][head]
        x = x + out
        normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        x = x + np.maximum(normed @ w["mlp.W_in"] + w["mlp.b_in"], 0) @ w["mlp.W_out"] + w["mlp.b_out"]
        scores.append(layer_scores)
        shares.append(layer_shares)
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return normed @ weights["unembed.W_U"] + weights["unembed.b_U"], scores, shares


def slow_counters(normed, w, head):
    """What one head's kernels add, ``[query, key]``, token by token."""
    added = np.zeros([len(normed)] * 2)
    for counter in range(w["attn.counters.kernel"].shape[1]):
        kernel, fall = (w[f"attn.counters.{name}"][head, counter] for name in ("kernel", "fall"))
        counts, now = [], 0.0
        for x in normed:
            gate, reset = (
                1 / (1 + math.exp(-x @ w[f"attn.counters.{what}_weight"][head, counter] - bias))
                for what in ("gate", "reset")
                for bias in [w[f"attn.counters.{what}_bias"][head, counter]]
            )
            now = (1 - reset) * now + gate
            counts.append(now)
        apart = np.subtract.outer(counts, counts)
        inside = np.interp(apart, np.arange(-8, 9), kernel)  # constant beyond
        added += inside - np.log1p(np.exp(fall)) * np.maximum(abs(apart) - 8, 0)
    return added


def slow_alibi(config, w, head, i, j, q, k):
    return -(i - j) * 2.0 ** (-8 * (head + 1) / config.n_heads)


def slow_fire(config, w, head, i, j, q, k):
    """The distance between logarithms, then an MLP unit by unit."""
    c, longest = abs(w["attn.bias.c"]), abs(w["attn.bias.threshold"]) * config.task.max_keys
    x = math.log(c * (i - j) + 1) / math.log(c * max(longest, i) + 1)
    units = zip(
        *(w[f"attn.bias.{name}"] for name in ("weight", "offset")), w["attn.bias.out_weight"][head], strict=True
    )
    return sum(out * max(0.0, weight * x + offset) for weight, offset, out in units) + w["attn.bias.out_offset"][head]


def slow_cope(config, w, head, i, j, q, k):
    """A sum of gates, key by key, and the table between two whole positions."""
    table = w["attn.bias.embedding"]
    position = min(sum(1 / (1 + math.exp(-q @ k[m])) for m in range(j, i + 1)), len(table) - 1)
    low, high = math.floor(position), math.ceil(position)
    return q @ table[low] * (1 - (position - low)) + q @ table[high] * (position - low)


SLOW_BIASES = {"alibi": slow_alibi, "fire": slow_fire, "cope": slow_cope}


@SCHEMES
@SINKS
def test_a_slow_float64_reference_agrees(make_adder, scheme, sink):
    model = make_adder(scheme, sink)
    batch = model.task.encode([(987, 45)])
    column = batch.column[0].clamp(min=0).tolist()  # separators stand in column 0
    logits, scores, shares = slow_forward(model, batch.tokens[0].tolist(), batch.row[0].tolist(), column)
    found, cache = model.run_with_cache(batch.tokens)
    close(found[0].double(), torch.from_numpy(logits), 1e-4)
    for layer in range(2):
        close(cache[f"blocks.{layer}.attn.hook_attn_scores"][0].double(), torch.from_numpy(scores[layer]), 1e-4)
        left = 1 - cache[f"blocks.{layer}.attn.hook_pattern"][0].double().sum(-1)
        close(left, torch.from_numpy(shares[layer]), 1e-5)


@SCHEMES
def test_later_tokens_change_nothing_earlier(make_adder, scheme):
    model = make_adder(scheme)
    tokens = model.to_tokens("987+6543")
    before, first = model.run_with_cache(tokens)
    for position in range(1, tokens.shape[1]):
        other = tokens.clone()
        other[:, position:] = (other[:, position:] + 5) % 12  # separators included
        after, second = model.run_with_cache(other)
        assert torch.equal(after[:, :position], before[:, :position])
        assert not torch.equal(after[:, position:], before[:, position:])
        for name in (SCORES, PATTERN):
            assert torch.equal(first[name][:, :, :position], second[name][:, :, :position])


@SCHEMES
@SINKS
def test_what_stands_at_the_padding_does_not_matter(make_adder, batch, scheme, sink):
    model = make_adder(scheme, sink)
    real = batch.mask
    before, first = model.run_with_cache(batch.tokens, batch.mask)
    noise = torch.randint(0, model.cfg.d_vocab, batch.tokens.shape, generator=torch.Generator().manual_seed(0))
    noise[:, ::2] = model.task.vocabulary.plus
    after, second = model.run_with_cache(torch.where(real, batch.tokens, noise), batch.mask)
    assert not real.all()
    assert torch.equal(before[real], after[real])
    for layer in range(2):
        for name in ("attn_scores", "pattern", *(["sink_scores"] if sink else [])):
            name = f"blocks.{layer}.attn.hook_{name}"
            assert torch.equal(first[name], second[name]), name


@SCHEMES
def test_a_batch_is_its_rows_one_by_one(make_adder, batch, scheme):
    model = make_adder(scheme)
    logits = model(batch.tokens)
    for i, (a, b) in enumerate(batch.problems):
        close(logits[i][batch.mask[i]], model(f"{a}+{b}")[0])


@given(st.lists(st.booleans(), min_size=9, max_size=20).filter(lambda holes: sum(holes) == 9))
@SCHEMES
def test_padding_on_the_left_or_in_the_middle_is_not_counted(make_adder, scheme, holes):
    model = make_adder(scheme)
    tokens = model.to_tokens("12+34")[0]
    mask = torch.tensor([holes])
    padded = torch.full(mask.shape, model.task.vocabulary.equals)  # a separator, were it not masked
    padded[mask] = tokens
    close(model(padded, mask)[mask], model(tokens)[0])


@SINKS
def test_pattern_rows_add_to_one_minus_the_sinks_share(make_adder, batch, sink):
    model = make_adder(sink=sink)
    _, cache = model.run_with_cache(batch.tokens, batch.mask)
    n = batch.tokens.shape[1]
    for layer in range(2):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
        assert pattern.shape == (len(batch), 2, n, n)
        assert not pattern.masked_select(hidden_keys(batch.mask)).any()
        scores = cache[f"blocks.{layer}.attn.hook_attn_scores"].double()
        mass = cache[f"blocks.{layer}.attn.hook_sink_scores"].double().exp() if sink else torch.zeros(scores.shape[:3])
        share = mass / (mass + scores.exp().sum(-1))
        real = batch.mask[:, None].expand(-1, 2, -1)
        close(pattern.double().sum(-1)[real], 1 - share[real], 1e-6)
        assert not pattern.sum(-1)[~real].any()  # a padded query sees nothing at all


@SINKS
def test_wholly_padded_sequences_are_finite(make_adder, sink):
    model = make_adder(sink=sink)
    tokens = torch.full((2, 4), model.task.vocabulary.pad)
    logits, cache = model.run_with_cache(tokens)
    assert logits.isfinite().all()
    assert not cache[PATTERN].any()


@SCHEMES
@SINKS
@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_blocks_of_queries_give_the_full_matrices(make_adder, batch, scheme, sink, size):
    model = make_adder(scheme, sink)
    names = [f"blocks.{la}.attn.hook_{n}" for la in (0, 1) for n in ("attn_scores", "pattern", "sink_scores")]
    names = [name for name in names if name in model.hook_dict]
    full, cache = model.run_with_cache(batch.tokens, batch.mask)
    parts = {name: [] for name in names}
    covered = {name: [] for name in names}
    n = batch.tokens.shape[1]

    def keep(value, hook):
        query = hook.ctx["query"]
        covered[hook.name] += range(query.start, query.stop)
        assert value.shape[2] == query.stop - query.start <= size
        if value.ndim == 4:  # the keys end with the block's last query
            assert value.shape[3] == query.stop
            value = widened(value, n, -torch.inf if hook.name.endswith("scores") else 0.0)
        parts[hook.name].append(value)

    blockwise = model.run_with_hooks(
        batch.tokens, batch.mask, blocks=size and Blocks(size), fwd_hooks=[(name, keep) for name in names]
    )
    close(blockwise[batch.mask], full[batch.mask])
    for name in names:
        assert covered[name] == list(range(n))
        close(torch.cat(parts[name], dim=2), cache[name])


@SINKS
@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("edit", ["random", "inf", "one inf", "-inf", "largest", "1e30"])
def test_no_score_edit_opens_the_future_or_the_padding(make_adder, batch, sink, size, edit):
    model = make_adder(sink=sink)
    rng = torch.Generator().manual_seed(0)
    edits = {
        "random": lambda s: 100 * torch.randn(s.shape, generator=rng),
        "inf": lambda s: torch.full_like(s, torch.inf),
        "one inf": lambda s: torch.where(torch.arange(s.shape[3]) == 5, torch.inf, s),
        "-inf": lambda s: torch.full_like(s, -torch.inf),
        "largest": lambda s: torch.full_like(s, torch.finfo(s.dtype).max),
        "1e30": lambda s: torch.full_like(s, 1e30),
    }
    patterns = []
    n = batch.tokens.shape[1]
    hooks = [(SCORES, lambda s, hook: edits[edit](s)), (PATTERN, lambda p, hook: patterns.append(widened(p, n, 0)))]
    logits = model.run_with_hooks(batch.tokens, batch.mask, blocks=size and Blocks(size), fwd_hooks=hooks)
    pattern = torch.cat(patterns, dim=2)
    hidden = hidden_keys(batch.mask)
    assert logits.isfinite().all()
    assert not pattern.masked_select(hidden).any()
    assert (pattern.sum(-1) < 1 + 1e-5).all()
    seen = (~hidden).sum(-1).expand(-1, 2, -1)
    if edit in ("inf", "largest", "1e30"):  # ties share alike, and nothing is left for the sink
        close(pattern, (~hidden / seen[..., None].clamp(min=1)).float())
    elif edit == "one inf":
        close(pattern[..., 5], (~hidden[..., 5]).expand(-1, 2, -1).float())
    elif edit == "-inf":
        assert not pattern.any()


def test_nan_scores_are_refused_by_the_hooks_name(adder, batch):
    def spoil(scores, hook):
        scores[0, 0, 3, 1] = math.nan
        return scores

    with pytest.raises(ValueError, match=SCORES):
        adder.run_with_hooks(batch.tokens, fwd_hooks=[(SCORES, spoil)])


@pytest.mark.parametrize(
    "value",
    [
        math.inf,
        3e38,
        -math.inf,
    ],
)
def test_an_infinite_sink_takes_all_or_nothing(adder, batch, value):
    patterns = []
    hooks = [
        (SINK, lambda s, hook: torch.full_like(s, value)),
        (PATTERN, lambda p, hook: patterns.append(p.clone())),
    ]
    assert adder.run_with_hooks(batch.tokens, fwd_hooks=hooks).isfinite().all()
    close(patterns[0].sum(-1), (batch.mask & (value < 0))[:, None].expand(-1, 2, -1).float())


def test_nan_sink_scores_are_refused_by_the_hooks_name(adder, batch):
    with pytest.raises(ValueError, match=SINK):
        adder.run_with_hooks(batch.tokens, fwd_hooks=[(SINK, lambda s, hook: torch.full_like(s, math.nan))])


def test_sink_boosts_are_added_per_sequence_or_to_all(adder, batch):
    boosts = torch.tensor([0.0, 1.5, -2.0, 10.0])
    sinks = {}
    for boost in (None, 4.5, boosts):
        _, cache = adder.run_with_cache(batch.tokens, sink_boost=boost)
        sinks[None if boost is None else type(boost)] = cache[SINK]
    plain = adder.blocks[1].attn.sink[None, :, None].expand(sinks[None].shape)
    close(sinks[None], plain)
    close(sinks[float], plain + 4.5)
    close(sinks[torch.Tensor], plain + boosts[:, None, None])
    logits = adder(batch.tokens, sink_boost=boosts)
    for i, boost in enumerate(boosts.tolist()):
        close(logits[i], adder(batch.tokens, sink_boost=boost)[i])


def test_the_configured_boost_is_the_default(make_adder, batch):
    model = make_adder()
    config = model.config.model_copy(
        update={"attention": model.config.attention.model_copy(update={"sink_boost": 3.0})}
    )
    boosted = type(model)(config)
    boosted.load_state_dict(model.state_dict())
    assert torch.equal(boosted(batch.tokens), model(batch.tokens, sink_boost=3.0))
    assert torch.equal(boosted(batch.tokens, sink_boost=0.0), model(batch.tokens))


# Hooks


def test_every_hook_is_listed_here(make_adder):
    assert set(make_adder().hook_dict) == set(HOOKS)
    assert set(make_adder("counters").hook_dict) == set(COUNTED_HOOKS)


COUNTER_HOOKS = [f"blocks.{layer}.attn.hook_{name}" for layer in (0, 1) for name in ("gate", "reset", "count")]
COUNTED_HOOKS = [*(name for name in HOOKS if "hook_rot" not in name), *COUNTER_HOOKS]
EVERY_HOOK = pytest.mark.parametrize(
    ("scheme", "name"),
    [*(("rotary2d", name) for name in HOOKS), *(("counters", name) for name in COUNTED_HOOKS)],
)


@EVERY_HOOK
def test_an_edit_at_any_hook_changes_the_logits(make_adder, batch, scheme, name):
    model = make_adder(scheme)
    before = model(batch.tokens)
    after = model.run_with_hooks(batch.tokens, fwd_hooks=[(name, lambda x, hook: 1.5 * x + 0.3)])
    assert after.isfinite().all()
    assert not torch.allclose(before[batch.mask], after[batch.mask], atol=1e-3)
    assert torch.equal(model(batch.tokens), before)


@EVERY_HOOK
def test_an_edit_in_place_is_the_edit(make_adder, batch, scheme, name):
    def in_place(x, hook):
        x.mul_(1.5).add_(0.3)

    model = make_adder(scheme)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    expected = model.run_with_hooks(batch.tokens, fwd_hooks=[(name, lambda x, hook: 1.5 * x + 0.3)])
    close(model.run_with_hooks(batch.tokens, fwd_hooks=[(name, in_place)]), expected)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


def test_an_edit_in_place_leaves_the_sink_parameter_alone(adder):
    before = adder.blocks[1].attn.sink.clone()
    try:
        adder.run_with_hooks(torch.tensor([[3]]), fwd_hooks=[(SINK, lambda x, hook: x.add_(5.0))])
        assert torch.equal(adder.blocks[1].attn.sink, before)
    finally:
        adder.blocks[1].attn.sink.copy_(before)


@pytest.mark.parametrize("name", ["q", "k", "v", "rot_q", "rot_k", "z", "result", "attn_scores", "pattern", "count"])
def test_an_edit_in_place_works_with_gradients_on(make_adder, batch, name):
    adder = make_adder("counters" if f"blocks.1.attn.hook_{name}" in COUNTER_HOOKS else "rotary2d")

    def in_place(x, hook):
        x[:, :, 1] = 0.25

    with torch.enable_grad():
        adder.run_with_hooks(batch.tokens, fwd_hooks=[(f"blocks.1.attn.hook_{name}", in_place)])


def test_computing_head_results_changes_no_logit(adder, batch):
    hooks = [("blocks.0.attn.hook_result", lambda x, hook: None)]
    close(adder.run_with_hooks(batch.tokens, fwd_hooks=hooks), adder(batch.tokens))
    adder.set_use_attn_result(True)
    try:
        seen = adder(batch.tokens)
    finally:
        adder.set_use_attn_result(False)
    close(seen, adder(batch.tokens))


def test_a_raising_hook_leaves_no_hook_behind(adder, batch):
    def fail(x, hook):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        adder.run_with_hooks(batch.tokens, fwd_hooks=[(SCORES, lambda s, hook: s), (PATTERN, fail)])
    assert not any(point._forward_hooks for point in adder.hook_dict.values())


def test_permanent_hooks_keep_firing(adder, batch):
    calls = []
    adder.add_perma_hook(PATTERN, lambda p, hook: calls.append(hook.name))
    try:
        adder(batch.tokens)
        adder.run_with_hooks(batch.tokens, fwd_hooks=[(SCORES, lambda s, hook: s)])
        adder.run_with_cache(batch.tokens)
        assert len(calls) == 3
        adder.generate(*adder.task.prompt([(1, 2)]), max_new_tokens=4)
        assert len(calls) > 3
        adder.reset_hooks()
        before = len(calls)
        adder(batch.tokens)
        assert len(calls) == before + 1
    finally:
        adder.reset_hooks(including_permanent=True)


# Generation


@SCHEMES
@pytest.mark.parametrize("sink", [True, False])
def test_greedy_generation_is_the_argmax_of_full_passes(make_adder, scheme, sink):
    model = make_adder(scheme, sink)
    eos, pad = model.task.vocabulary.eos, model.task.vocabulary.pad
    problems = [(987, 45), (6, 12345), (0, 0), (31, 7), (2, 88), (555, 5)]
    bias = model.unembed.b_U.clone()
    try:
        model.unembed.b_U[pad] = -50.0
        tokens, mask = model.task.prompt(problems)
        last = model(tokens)[torch.arange(len(tokens)), mask.sum(1) - 1]
        others = last.index_fill(1, torch.tensor([eos]), -torch.inf).amax(1)
        model.unembed.b_U[eos] += (others - last[:, eos]).median() + 0.01  # about half end at once
        found = model.generate(*model.task.prompt(problems), max_new_tokens=7)
        for row, (a, b) in zip(found.tolist(), problems, strict=True):
            tokens, new = model.to_tokens(f"{a}+{b}="), []
            while len(new) < 7 and eos not in new:
                new.append(int(model(tokens)[0, -1].argmax()))
                tokens = torch.cat([tokens, torch.tensor([new[-1:]])], dim=1)
            assert row == (new + [pad] * 7)[: len(row)]
            assert len(row) >= len(new)
    finally:
        model.unembed.b_U.copy_(bias)
    assert len({row.index(eos) if eos in row else 7 for row in found.tolist()}) > 1


@given(st.integers(1, 10))
@SCHEMES
def test_reading_in_two_parts_is_reading_at_once(make_adder, batch, scheme, split):
    model = make_adder(scheme)
    cache = KeyValueCache(batch.tokens.shape[1])
    first = model(batch.tokens[:, :split], batch.mask[:, :split], cache=cache)
    second = model(batch.tokens, batch.mask, cache=cache, blocks=Blocks(3))
    close(torch.cat([first, second], dim=1)[batch.mask], model(batch.tokens)[batch.mask])
    with pytest.raises(ValueError, match="cache holds"):
        model(torch.cat([batch.tokens, batch.tokens], dim=1), cache=cache)


@pytest.mark.parametrize("training", [True, False])
def test_generate_restores_the_training_flag(adder, training):
    adder.train(training)
    try:
        adder.generate(*adder.task.prompt([(1, 2)]), max_new_tokens=1)
        assert all(module.training is training for module in adder.modules())
        adder.blocks[0].hook_resid_pre.add_hook(lambda x, hook: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            adder.generate(*adder.task.prompt([(1, 2)]), max_new_tokens=1)
        assert adder.training is training
    finally:
        adder.reset_hooks()
        adder.eval()


# Inputs


def test_the_loss_is_the_mean_surprise_of_the_decisions(adder, batch):
    log_probs = adder(batch.tokens).double().log_softmax(-1)
    surprise = [-log_probs[i, p, batch.targets[i, p]].item() for i, p in batch.decisions.nonzero().tolist()]
    assert adder(batch.tokens, return_type="loss").item() == pytest.approx(np.mean(surprise), rel=1e-5)
    assert adder(batch.tokens, return_type=None) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input": torch.tensor([[0, 14]])}, "0 to 13, got 0 to 14"),
        ({"input": torch.tensor([[-1]])}, "0 to 13"),
        ({"input": torch.tensor([[0.5]])}, "integer"),
        ({"input": torch.zeros(1, 0, dtype=torch.long)}, "integer"),
        ({"input": torch.zeros(1, 1, 1, dtype=torch.long)}, "integer"),
        ({"input": torch.tensor([[1, 2]]), "attention_mask": torch.ones(1, 3)}, r"\(1, 2\), got \(1, 3\)"),
        ({"input": "1+2", "return_type": "loss per token"}, "return_type"),
        ({"input": "1-2"}, "expected"),
        ({"input": ["1+2", "1+2="]}, "do not mix"),
    ],
)
def test_unusable_inputs_are_refused(adder, arguments, message):
    with pytest.raises(ValueError, match=message):
        adder(**arguments)


@pytest.mark.parametrize("arguments", [{"max_new_tokens": 0}, {"mask": torch.zeros(1, 4, dtype=torch.bool)}])
def test_generate_refuses_what_it_cannot_continue(adder, arguments):
    tokens, mask = adder.task.prompt([(1, 2)])
    with pytest.raises(ValueError, match="at least"):
        adder.generate(**{"tokens": tokens, "mask": mask, "max_new_tokens": 1} | arguments)


def test_a_boost_without_a_sink_is_refused(make_adder):
    with pytest.raises(ValueError, match="no sink"):
        make_adder(sink=False)("1+2", sink_boost=1.0)


def test_text_and_ids_are_the_same_input(adder):
    assert torch.equal(adder("12+345"), adder(adder.task.encode([(12, 345)]).tokens))
    assert adder.to_str_tokens("12+9=") == ["2", "1", "+", "9", "="]
    assert [adder.to_single_token(t) for t in adder.to_str_tokens("12+9")] == adder.to_tokens("12+9")[0].tolist()
    with pytest.raises(ValueError, match="not one token"):
        adder.to_single_token("12")


def test_no_text_at_all_is_refused(adder):
    with pytest.raises(ValueError, match="one problem"):
        adder.to_tokens([])


def test_initial_weights_depend_on_the_seed_alone(make_adder):
    model = make_adder()
    torch.manual_seed(5)
    first = type(model)(model.config, seed=3).state_dict()
    torch.manual_seed(6)
    second = type(model)(model.config, seed=3).state_dict()
    other = type(model)(model.config, seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embed.W_E"], other["embed.W_E"])


# Normalizer


@given(
    st.lists(st.one_of(st.floats(-80, 80), st.just(-math.inf)), min_size=1, max_size=8),
    st.one_of(st.none(), st.floats(-80, 80), st.just(-math.inf)),
)
def test_softmax_with_a_sink_is_a_share_of_the_mass(scores, sink):
    as_tensor = partial(torch.tensor, dtype=torch.float64)
    found = softmax(as_tensor(scores), None if sink is None else as_tensor(sink))
    mass = [math.exp(s) for s in scores]
    total = sum(mass) + (math.exp(sink) if sink is not None else 0)
    assert found.tolist() == pytest.approx([m / total if total else 0 for m in mass], abs=1e-12)
