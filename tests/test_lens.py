"""TransformerLens's own tools run on the model and give right numbers."""

from __future__ import annotations

import pytest
import torch
import transformer_lens.patching as patching
from transformer_lens import ActivationCache
from transformer_lens.head_detector import detect_head
from transformer_lens.model_protocol import TrainableTransformerLensModel, TransformerLensModelWithWeights
from transformer_lens.tools.analysis import direct_logit_attribution, logit_lens

TEXT = "987+6543"
SINK_OR_NOT = pytest.mark.parametrize("sink", [True, False], ids=["sink", "no-sink"])


def close(found, expected, tolerance=1e-4):
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.fixture(scope="module")
def run(adder):
    """Logits and cache of one problem."""
    with torch.no_grad():
        return adder.run_with_cache(TEXT)


def unembedded(adder, residual):
    return residual @ adder.W_U + adder.b_U


def test_the_model_satisfies_the_protocols(adder):
    assert isinstance(adder, TransformerLensModelWithWeights)
    assert isinstance(adder, TrainableTransformerLensModel)


@pytest.mark.parametrize("scheme", ["rotary2d", "rotary", "none"])
@SINK_OR_NOT
def test_hook_names_and_shapes_are_hooked_transformers(make_adder, scheme, sink):
    model = make_adder(scheme, sink)
    batch = model.task.encode([(987, 45), (6, 12)])
    _, cache = model.run_with_cache(batch.tokens)
    b, n = batch.tokens.shape
    residual, vector, square = (b, n, 16), (b, n, 2, 8), (b, 2, n, n)
    expected = {"hook_embed": residual, "ln_final.hook_scale": (b, n, 1), "ln_final.hook_normalized": residual}
    for layer in (0, 1):
        block = {f"hook_{name}": residual for name in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")}
        for ln in ("ln1", "ln2"):
            block |= {f"{ln}.hook_scale": (b, n, 1), f"{ln}.hook_normalized": residual}
        block |= {f"attn.hook_{name}": vector for name in "qkvz"}
        block |= {"attn.hook_result": (b, n, 2, 16), "attn.hook_attn_scores": square, "attn.hook_pattern": square}
        block |= {"mlp.hook_pre": (b, n, 32), "mlp.hook_post": (b, n, 32)}
        if scheme != "none":
            block |= {"attn.hook_rot_q": vector, "attn.hook_rot_k": vector}
        if sink:
            block["attn.hook_sink_scores"] = (b, 2, n)
        expected |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
    assert {name: tuple(value.shape) for name, value in cache.items()} == expected


def test_weights_carry_hooked_transformers_names_and_shapes(adder):
    shapes = {
        "W_E": (14, 16),
        "W_U": (16, 14),
        "b_U": (14,),
        **{f"W_{name}": (2, 2, 16, 8) for name in "QKV"},
        "W_O": (2, 2, 8, 16),
        "W_in": (2, 16, 32),
        "W_out": (2, 32, 16),
        "b_in": (2, 32),
        "b_out": (2, 16),
    }
    assert {name: tuple(getattr(adder, name).shape) for name in shapes} == shapes
    for layer, block in enumerate(adder.blocks):
        assert all(torch.equal(getattr(adder, name)[layer], getattr(block.attn, name)) for name in ("W_Q", "W_O"))
        assert all(torch.equal(getattr(adder, name)[layer], getattr(block.mlp, name)) for name in ("W_in", "b_out"))


def test_cached_activations_fit_together(adder, run):
    _, cache = run
    for layer in (0, 1):
        q, k, v, z = (cache[name, layer] for name in "qkvz")
        close(torch.einsum("bhqk,bkhd->bqhd", cache["pattern", layer], v), z)
        close(torch.einsum("bphd,hdm->bphm", z, adder.W_O[layer]), cache["result", layer])
        close(cache["result", layer].sum(2), cache["attn_out", layer])
        close(cache["resid_pre", layer] + cache["attn_out", layer], cache["resid_mid", layer])
        close(cache["resid_mid", layer] + cache["mlp_out", layer], cache["resid_post", layer])
        for rotated, plain in (("rot_q", q), ("rot_k", k)):
            close(cache[rotated, layer].norm(dim=-1), plain.norm(dim=-1))


def test_the_logit_lens_ends_at_the_logits(adder, run):
    logits, cache = run
    for result in (cache.logit_lens(positions=None), logit_lens(adder, TEXT, positions=None)):
        close(result.values[-1], logits)
        assert result.labels[-1] == "final_post"
        assert len(result.labels) == 3
    first = unembedded(adder, adder.ln_final(cache["resid_pre", 0]))
    close(cache.logit_lens(positions=None).values[0], first)


def test_residual_parts_add_up_to_the_logits(adder, run):
    logits, cache = run
    stacks = {
        "components": cache.decompose_resid(apply_ln=True, return_labels=True),
        "heads": cache.stack_head_results(apply_ln=True, incl_remainder=True, return_labels=True),
        "neurons": cache.get_full_resid_decomposition(apply_ln=True, expand_neurons=True, return_labels=True),
        "full": cache.get_full_resid_decomposition(apply_ln=True, expand_neurons=False, return_labels=True),
    }
    for name, (stack, labels) in stacks.items():
        assert len(stack) == len(labels), name
        close(unembedded(adder, stack.sum(0)), logits)
    assert stacks["heads"][1][:4] == ["L0H0", "L0H1", "L1H0", "L1H1"]
    accumulated, labels = cache.accumulated_resid(apply_ln=True, incl_mid=True, return_labels=True)
    assert labels == ["0_pre", "0_mid", "1_pre", "1_mid", "final_post"]
    close(unembedded(adder, accumulated[-1]), logits)


@pytest.mark.parametrize("layer", [0, 1])
def test_residual_parts_add_up_at_every_layer(run, layer):
    _, cache = run
    close(cache.decompose_resid(layer=layer).sum(0), cache["resid_pre", layer])
    close(cache.decompose_resid(layer=layer, mlp_input=True).sum(0), cache["resid_mid", layer])
    close(cache.accumulated_resid(layer=layer)[-1], cache["resid_pre", layer])
    close(cache.get_full_resid_decomposition(layer=layer, expand_neurons=True).sum(0), cache["resid_pre", layer])
    if layer:
        close(cache.stack_head_results(layer=layer).sum(0), cache["attn_out", 0])


def test_the_batch_dimension_can_be_left_out(adder, run):
    logits, cache = run
    out, single = adder.run_with_cache(TEXT, remove_batch_dim=True)
    assert isinstance(single, ActivationCache)
    assert not single.has_batch_dim
    assert set(single.keys()) == set(cache.keys())
    assert all(torch.equal(single[name], cache[name][0]) for name in cache)
    close(unembedded(adder, single.decompose_resid(apply_ln=True).sum(0)), logits[0])
    assert torch.equal(out, logits)
    raw = adder.run_with_cache(TEXT, return_cache_object=False)[1]
    assert isinstance(raw, dict)
    assert raw.keys() == cache.keys()


@pytest.mark.parametrize("sign", [1, -1], ids=["token", "difference"])
@pytest.mark.parametrize("unit", ["component", "head", "layer"])
def test_direct_attribution_adds_up_to_the_logit(adder, run, unit, sign):
    logits, cache = run
    net = logits[0] - adder.b_U
    for right, wrong in ((3, 7), ("5", "<eos>"), ("+", "0")):
        incorrect = wrong if sign < 0 else None
        result = direct_logit_attribution(adder, TEXT, right, incorrect, unit=unit, pos=None)
        ids = [t if isinstance(t, int) else adder.to_single_token(t) for t in (right, wrong)]
        expected = net[:, ids[0]] - (net[:, ids[1]] if sign < 0 else 0)
        total = result.attribution[-1] if unit == "layer" else result.attribution.sum(0)
        close(total[0], expected)
        assert len(result.labels) == len(result.attribution)
        last = direct_logit_attribution(adder, cache=cache, answer_tokens=right, incorrect_tokens=incorrect, unit=unit)
        close(last.attribution, result.attribution[..., -1])


def test_direct_attribution_takes_one_answer_per_sequence(adder):
    batch = adder.task.encode([(12, 34), (56, 71)])
    answers = torch.tensor([4, 9])
    logits, _ = adder.run_with_cache(batch.tokens)
    result = direct_logit_attribution(adder, batch.tokens, answers, pos=-2)
    expected = (logits[:, -2] - adder.b_U)[torch.arange(2), answers]
    close(result.attribution.sum(0), expected)


def test_the_head_detector_scores_the_pattern(adder, run):
    pattern = torch.stack([run[1]["pattern", layer][0] for layer in (0, 1)])
    n = pattern.shape[-1]
    previous = torch.eye(n).roll(-1, 1).tril()
    found = detect_head(adder, TEXT, "previous_token_head")
    expected = (pattern * previous).sum((-1, -2)) / pattern.sum((-1, -2))
    close(found, expected)
    assert (found > 0).all()
    assert found.unique().numel() == 4
    tokens = adder.to_tokens(TEXT)[0]
    same = (tokens[:, None] == tokens) & ~torch.eye(n, dtype=torch.bool)
    expected = (pattern * same.tril()).sum((-1, -2)) / pattern.sum((-1, -2))
    close(detect_head(adder, TEXT, "duplicate_token_head"), expected)


def test_a_planted_previous_token_head_is_detected(adder):
    tokens = adder.to_tokens(TEXT)
    n = tokens.shape[1]
    previous = torch.eye(n).roll(-1, 1).tril()

    def plant(scores, hook):
        scores[:, 1] = torch.where(previous.bool(), 80.0, -80.0)
        return scores

    with adder.hooks(fwd_hooks=[("blocks.1.attn.hook_attn_scores", plant)]):
        found = detect_head(adder, TEXT, "previous_token_head")
    assert divmod(int(found.argmax()), 2) == (1, 1)
    assert found[1, 1] > 0.95


# Activation patching

CLEAN, CORRUPT = "987+6543", "123+4506"


@pytest.fixture
def pair(adder):
    clean, corrupt = (adder.to_tokens(text)[:, :12] for text in (CLEAN, CORRUPT))
    logits, cache = adder.run_with_cache(clean)
    return clean, corrupt, logits, cache


def metric(logits):
    return (logits[0, -1] * torch.linspace(-1, 2, logits.shape[-1])).sum()


def test_patching_a_residual_stream_moves_only_what_sees_it(adder, pair):
    _, corrupt, logits, cache = pair
    found = patching.get_act_patch_resid_pre(adder, corrupt, cache, metric)
    assert found.shape == (2, corrupt.shape[1])
    everywhere = adder.run_with_hooks(
        corrupt, fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: cache[hook.name].clone())]
    )
    close(metric(everywhere), metric(logits))
    same = (adder.to_tokens(CLEAN)[:, :12] == corrupt)[0]  # patching an equal token changes nothing
    assert same.any()
    close(found[0][same], metric(adder(corrupt)).detach().expand(int(same.sum())))
    for position in range(corrupt.shape[1]):
        mixed = corrupt.clone()
        mixed[0, position] = adder.to_tokens(CLEAN)[0, position]
        close(found[0, position], metric(adder(mixed)).detach())


HEAD_SWEEPS = {"out": "z", "q": "q", "k": "k", "v": "v", "pattern": "pattern"}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("what", HEAD_SWEEPS)
def test_patching_a_head_is_the_edit_by_hand(adder, pair, what, grad):
    _, corrupt, _, cache = pair
    axis = 1 if what == "pattern" else 2
    with torch.set_grad_enabled(grad):
        found = getattr(patching, f"get_act_patch_attn_head_{what}_all_pos")(adder, corrupt, cache, metric)
    assert found.shape == (2, 2)
    for layer in (0, 1):
        for head in (0, 1):

            def swap(x, hook, head=head):
                x = x.clone()
                x.select(axis, head).copy_(cache[hook.name].select(axis, head))
                return x

            name = f"blocks.{layer}.attn.hook_{HEAD_SWEEPS[what]}"
            with torch.no_grad():
                close(found[layer, head], metric(adder.run_with_hooks(corrupt, fwd_hooks=[(name, swap)])))
    assert found.unique().numel() == 4


def test_patching_attention_and_mlp_outputs_runs_at_every_position(adder, pair):
    _, corrupt, _, cache = pair
    with torch.no_grad():
        every = patching.get_act_patch_block_every(adder, corrupt, cache, metric)
    every = torch.as_tensor(every)
    assert every.shape == (3, 2, corrupt.shape[1])
    changed = (every - metric(adder(corrupt)).detach()).abs() > 1e-5
    assert changed.flatten(1).any(1).all()
    assert changed[1:, 1, -1].all()  # the last layer's outputs at the last position reach the logits read there
    assert not changed[1:, 1, :-1].any()  # and its outputs elsewhere do not
