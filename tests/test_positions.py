"""Position schemes: the papers' known answers, gradients, and what each promises of length."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interp.decisions import reach
from interp.passes import plan_for
from models.attention import Blocks
from models.config import AdderConfig, AttentionConfig, InputError
from models.positions import AlibiBias, Coordinates, CopeBias, FireBias, PositionError, alibi_slopes
from models.recipes import RECIPES
from models.training import Trainer
from models.transformer import HookedAdder


def config(scheme, n_heads=2, **attention):
    attention = AttentionConfig(scheme=scheme, **attention)
    return AdderConfig(attention=attention, n_layers=2, n_heads=n_heads, d_model=16, d_head=8, d_mlp=32)


def standing(n):
    """n tokens in a row, with nothing but positions."""
    row = torch.arange(n)[None]
    return Coordinates(row, row, row, row < 0)


def test_alibi_slopes_are_the_papers():
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(12) == pytest.approx([2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])
    assert alibi_slopes(1) == [2.0**-8]


@given(st.integers(1, 64))
def test_there_is_one_slope_a_head_and_none_twice(heads):
    slopes = alibi_slopes(heads)
    assert len(set(slopes)) == len(slopes) == heads
    assert all(0 < slope < 1 for slope in slopes)


def test_alibi_takes_its_slope_for_every_token_of_distance():
    bias = AlibiBias(config("alibi", n_heads=8))
    found = bias(torch.zeros(1), torch.zeros(1), standing(5), standing(5), torch.zeros(1))
    assert found[0, :, 4, 1].tolist() == [-3 * 2.0**-i for i in range(1, 9)]
    assert not found[0, :, range(5), range(5)].any()


def test_fire_interpolates_between_logarithms():
    bias = FireBias(config("fire"))
    with torch.no_grad():
        bias.c.fill_(1)
        bias.threshold.fill_(4 / bias.max_keys)
        found = bias.interpolated(torch.arange(10)[None], torch.arange(10)[None])[0]
    for (i, j), expected in {(2, 0): 0.6826, (9, 5): 0.6990, (9, 0): 1.0, (7, 7): 0.0}.items():
        assert found[i, j].item() == pytest.approx(expected, abs=5e-5)
    assert found[2, 0].item() == pytest.approx(math.log(3) / math.log(5), abs=1e-5)


def test_fire_with_linear_units_is_its_input():
    """One unit of weight 1 for each head: the bias is the interpolated distance times the head's weight."""
    bias = FireBias(config("fire"))
    with torch.no_grad():
        bias.weight[0], bias.out_weight[:, 0] = 1.0, torch.tensor([2.0, -3.0])
        found = bias(torch.zeros(1), torch.zeros(1), standing(6), standing(6), torch.zeros(1))[0]
        x = bias.interpolated(torch.arange(6)[None], torch.arange(6)[None])[0]
    torch.testing.assert_close(found, torch.stack([2 * x, -3 * x]))


def test_cope_counts_from_the_key_to_the_query_and_is_capped():
    hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)[None, None]
    zeros = torch.zeros(1, 1, 4, 4)
    found = CopeBias(config("cope")).positions(zeros, hidden)[0, 0]
    assert found[3].tolist() == [2, 1.5, 1, 0.5]
    assert found[1].tolist() == [1, 0.5, 0, 0]  # later keys count nothing
    capped = CopeBias(config("cope", cope_positions=2)).positions(zeros, hidden)[0, 0]
    assert capped[3].tolist() == [1, 1, 1, 0.5]
    open_gates = CopeBias(config("cope", cope_positions=4)).positions(zeros + 50, hidden)[0, 0]
    assert open_gates[3].tolist() == [3, 3, 2, 1]


def test_cope_interpolates_its_embeddings():
    bias = CopeBias(config("cope", cope_positions=4))
    q = torch.randn(1, 1, 4, 8)
    hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        bias.embedding.copy_(torch.randn(4, 8))
        found = bias(torch.zeros(1, 1, 4, 4), q, standing(4), standing(4), hidden)[0, 0, 3]
    e = bias.embedding.detach()
    expected = torch.stack([e[2], (e[1] + e[2]) / 2, e[1], (e[0] + e[1]) / 2]) @ q[0, 0, 3]
    torch.testing.assert_close(found, expected)


def test_coupled_digits_share_an_id_in_all_numbers(make_adder):
    model = make_adder("coupling")
    batch = model.task.encode([(123, 45)])  # 3 2 1 + 5 4 = 8 6 1 <eos>
    at = model.coordinates(batch.tokens, batch.mask)
    assert model.scheme.ids(at)[0].tolist() == [1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4]
    assert model.scheme.ids(at, torch.tensor([7]))[0].tolist() == [8, 9, 10, 7, 8, 9, 7, 8, 9, 10, 11]


def test_a_first_id_moves_what_is_added_and_nothing_else(make_adder):
    model = make_adder("coupling")
    batch = model.task.encode([(123, 45), (7, 99)])
    with torch.no_grad():
        starts = torch.tensor([5, 0])
        moved, cache = model.run_with_cache(batch.tokens, batch.mask, first_id=starts)
        plain = model(batch.tokens, batch.mask)
    torch.testing.assert_close(moved[1], plain[1])
    assert not torch.allclose(moved[0], plain[0])
    ids = model.scheme.ids(model.coordinates(batch.tokens, batch.mask), starts)
    torch.testing.assert_close(cache["hook_pos_embed"], model.W_pos[ids])
    parts, labels = cache.decompose_resid(return_labels=True)
    assert labels[:2] == ["embed", "pos_embed"]
    torch.testing.assert_close(parts.sum(0), cache["blocks.1.hook_resid_post"], atol=1e-4, rtol=1e-4)


def test_a_number_longer_than_there_are_ids_is_refused_before_anything_is_run():
    model = HookedAdder(config("coupling", coupled_positions=20))
    for problem in ((10**17 - 1, 1), (10**16, 5)):  # 17 digits and a carry take all 20
        assert model(model.task.encode([problem]).tokens).isfinite().all()
    with pytest.raises(PositionError, match="20 position ids, enough for sums of numbers of 17 tokens") as refused:
        model(model.task.encode([(10**18 - 1, 1)]).tokens)
    assert isinstance(refused.value, InputError)
    assert "\n" not in str(refused.value)
    done = []
    with pytest.raises(PositionError):
        reach(model, [5, 60], 2, progress=done.append)
    assert not done


def test_ids_must_do_for_the_training_lengths():
    with pytest.raises(ValueError, match="coupled_positions must be at least 13"):
        config("coupling", coupled_positions=12)


def test_first_ids_are_a_function_of_seed_and_step_and_leave_room(tmp_path):
    recipe = RECIPES["1digit-coupling"].model_copy(update={"batch": 64, "micro_batches": 1})
    trainers = [Trainer(recipe, seed, tmp_path / str(i)) for i, seed in enumerate((3, 3, 4))]
    seen = [[], [], []]
    for trainer, kept in zip(trainers, seen, strict=True):
        trainer.model.register_forward_pre_hook(lambda m, a, k, kept=kept: kept.append((a, k)), with_kwargs=True)
        trainer._train_step(0)
    starts = [kept[0][1]["first_id"] for kept in seen]
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])
    tokens, mask = seen[0][0][0]
    ids = trainers[0].model.scheme.ids(trainers[0].model.coordinates(tokens, mask), starts[0])
    assert 150 < ids.max() < 203
    assert starts[0].max() > 150
    assert starts[0].min() < 50


@pytest.mark.parametrize("scheme", ["fire", "cope", "coupling"])
def test_every_weight_of_a_scheme_gets_a_gradient(make_adder, scheme):
    model = make_adder(scheme)
    batch = model.task.encode([(987, 45), (6, 12345)])
    loss = model(batch.tokens, batch.mask, return_type="loss")
    names = [n for n, _ in model.named_parameters() if ".bias." in n or "pos_embed" in n]
    gradients = torch.autograd.grad(loss, [dict(model.named_parameters())[n] for n in names])
    assert names
    for name, gradient in zip(names, gradients, strict=True):
        assert gradient.isfinite().all()
        # one constant a head moves no weight but the sink's
        assert gradient.any() or name.endswith("out_offset"), name


@pytest.mark.parametrize("scheme", ["fire", "cope"])
def test_gradients_are_those_of_finite_differences(scheme):
    torch.manual_seed(0)
    bias = (FireBias if scheme == "fire" else CopeBias)(config(scheme, cope_positions=3)).double()
    for weight in bias.parameters():
        weight.data = torch.rand_like(weight) + 0.1
    hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)[None, None]
    scores, q = (torch.randn(1, 2, 4, n, dtype=torch.float64, requires_grad=True) for n in (4, 8))
    names = [name for name, _ in bias.named_parameters()]

    def of(scores, q, *weights):
        given = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(bias, given, (scores, q, standing(4), standing(4), hidden)).tril()

    assert torch.autograd.gradcheck(of, (scores, q, *bias.parameters()))


def test_no_key_that_cope_counts_is_left_out(make_adder):
    """Counts reach over all keys in between, so that leaving far ones out would change the others' scores."""
    model = make_adder("cope")
    problems = [(10**60 - 1, 10**59 + 7)]
    assert plan_for(model, problems).far_keys == "each"
    batch = model.task.encode(problems)
    with torch.no_grad():
        skipping = model(batch.tokens, batch.mask, blocks=Blocks(16, 16, skip_beyond=8))
        torch.testing.assert_close(skipping, model(batch.tokens, batch.mask), atol=1e-5, rtol=1e-5)


def test_an_edit_of_what_positions_add_takes_effect(make_adder):
    for scheme in ("alibi", "fire", "cope"):
        model = make_adder(scheme)
        batch = model.task.encode([(987, 45)])
        with torch.no_grad():
            plain, cache = model.run_with_cache(batch.tokens)
            without = model.run_with_hooks(
                batch.tokens, fwd_hooks=[(f"blocks.{i}.attn.hook_bias", lambda b, hook: b * 0) for i in (0, 1)]
            )
        assert cache["blocks.0.attn.hook_bias"].shape == cache["blocks.0.attn.hook_attn_scores"].shape
        assert not torch.allclose(plain, without)
