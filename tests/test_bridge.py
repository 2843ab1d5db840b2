"""Language models through transformers' attention interface, against their own attention and TransformerBridge."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from families import FAMILIES, VOCABULARY, tiny, word_tokenizer
from safetensors.torch import load_file, save_file

import interp.bridge as bridge
from interp.bridge import attention, load_language_model, self_test
from models.config import InputError

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def ids(batch=2, length=30, seed=0):
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def patterns(model, tokens, mask=None, **options):
    """Logits, and weights ``[layer, batch, head, query, key]``."""
    kept = {}

    def keep(block, scores, sink, weights):
        full = torch.zeros(*weights.shape[:3], tokens.shape[1])
        full[..., block.key] = weights
        kept.setdefault(block.layer, []).append(full)

    logits = model.run(tokens, mask, watches=[keep], **options)
    return logits, torch.stack([torch.cat(kept[layer], dim=2) for layer in sorted(kept)])


def own(model, tokens):
    with torch.no_grad(), attention(model.model, "eager"):
        out = model.model(input_ids=tokens, use_cache=False, output_attentions=True)
    return out.logits, torch.stack(out.attentions)


@EVERY_FAMILY
def test_logits_and_weights_are_the_models_own(family):
    model, tokens = tiny(family), ids()
    found, expected = patterns(model, tokens), own(model, tokens)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert found[1].shape == (2, 2, 4, 30, 30)
    self_test(model)


@EVERY_FAMILY
@pytest.mark.parametrize("block", [1, 7, 64])
def test_blocks_give_the_same_numbers(family, block):
    model, tokens = tiny(family), ids()
    for a, b in zip(patterns(model, tokens, block=block), patterns(model, tokens, block=30), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@EVERY_FAMILY
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_and_what_stands_there_change_nothing(family, side):
    model, tokens = tiny(family), ids(batch=1, length=20)
    alone_logits, alone = patterns(model, tokens)
    for filler in (0, 7):
        pad = torch.full((1, 11), filler)
        parts = (pad, tokens) if side == "left" else (tokens, pad)
        mask = torch.cat([torch.full_like(part, part is tokens, dtype=torch.bool) for part in parts], dim=1)
        both = torch.cat([torch.cat(parts, dim=1), ids(batch=1, length=31, seed=5)])
        logits, found = patterns(model, both, torch.cat([mask, torch.ones_like(mask)]))
        real = mask[0]
        torch.testing.assert_close(logits[0, real], alone_logits[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[:, 0][:, :, real][..., real], alone[:, 0], rtol=1e-4, atol=1e-5)
        assert (found[:, 0][:, :, real][..., ~real] == 0).all()


def test_a_learned_sink_takes_what_the_keys_leave():
    model, tokens = tiny("gpt_oss"), ids()
    sums = []

    def keep(block, scores, sink, weights):
        share = (sink - torch.logaddexp(scores.logsumexp(-1), sink)).exp()
        sums.append((weights.sum(-1) + share - 1).abs().max())

    model.run(tokens, watches=[keep])
    assert max(sums) < 1e-5


@pytest.mark.parametrize("family", ["mistral", "gpt_oss"])
def test_a_sliding_window_leaves_the_first_keys_out(family):
    _, found = patterns(tiny(family), ids())
    layers = [layer for layer in range(2) if (found[layer, :, :, -1, :21] == 0).all()]
    assert layers == ([0, 1] if family == "mistral" else [0])


def test_the_implementation_and_the_mode_are_put_back():
    model = tiny("llama")
    model.model.train()
    try:
        model.run(ids())
        assert model.model.training
        with pytest.raises(ZeroDivisionError):
            model.run(ids(), watches=[lambda *_: 1 / 0])
        assert model.model.training
        assert model.model.config._attn_implementation == "eager"
    finally:
        model.model.eval()


# Edits


def observed(model, tokens, *edits):
    return patterns(model, tokens, edits=edits)[1]


def test_far_and_window_remove_what_they_say():
    model, tokens = tiny("llama"), ids()
    apart = torch.arange(30)[:, None] - torch.arange(30)
    found = observed(model, tokens, bridge.far(5))
    assert (found[..., apart > 5] == 0).all()
    torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:-1]))
    streaming = observed(model, tokens, bridge.first_and_window(1, 3))
    assert set(torch.nonzero(streaming[0, 0, 0, 9])[:, 0].tolist()) == {0, 7, 8, 9}
    for a, b in zip(patterns(model, tokens, edits=[bridge.far(40)]), patterns(model, tokens), strict=True):
        assert torch.equal(a, b)  # a window as long as the sequence


def test_scales_and_sinks():
    model, tokens = tiny("gpt_oss"), ids()

    def first_layer(*edits):
        kept = []
        model.run(tokens, edits=edits, watches=[lambda block, scores, sink, weights: kept.append((scores, sink))])
        return kept[0]

    scores, sink = first_layer()
    allowed = torch.isfinite(scores)
    seen = allowed.sum(-1)  # [batch, head, query]; nine at most, for a window
    for edit, factor in (
        (bridge.temperature(2.0), torch.full(seen.shape, 0.5)),
        (bridge.scalable_softmax(0.4), 0.4 * seen.log()),
    ):
        after, scaled_sink = first_layer(edit)
        torch.testing.assert_close(after[allowed], (scores * factor[..., None])[allowed], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(scaled_sink, sink * factor, rtol=1e-5, atol=1e-6)
    _, boosted = first_layer(bridge.sink_boost("log", 4))
    torch.testing.assert_close(boosted, sink + (seen / 4).clamp(min=1).log())
    assert seen.max() == 9
    with pytest.raises(InputError, match="needs learned sinks"):
        tiny("llama").run(tokens, edits=[bridge.sink_boost(1.0, 10)])


def test_edits_stay_in_their_heads_and_open_nothing():
    model, tokens = tiny("qwen3"), ids()
    before = observed(model, tokens)
    after = observed(model, tokens, bridge.in_heads(bridge.temperature(0.1), [(0, 2)], 4))
    same = [head for head in range(4) if torch.equal(before[0, :, head], after[0, :, head])]
    assert same == [0, 1, 3]
    opened = observed(model, tokens, lambda scores, sink, block: (torch.zeros_like(scores), sink))
    assert (opened[..., torch.ones(30, 30).triu(1).bool()] == 0).all()


def test_the_first_tokens_weight_under_even_attention():
    expected = {9: 0.3143, 10: 0.2929, 64: 0.0741}
    for length, value in expected.items():
        assert bridge.uniform_first_token(length) == pytest.approx(value, abs=5e-5)
    model = tiny("llama")
    flat = observed(model, ids(1, 30), lambda scores, sink, block: (scores * 0, sink))
    assert flat[0, 0, 0, :, 0].mean().item() == pytest.approx(bridge.uniform_first_token(30))


# What is refused


@pytest.mark.parametrize(
    ("tokens", "mask", "word"),
    [
        (ids(1, 97), None, "has 96 positions, got 97"),
        (torch.tensor([[1, VOCABULARY]]), None, "from 0 to 49"),
        (torch.tensor([[-1, 3]]), None, "from 0 to 49"),
        (torch.tensor([[0.5]]), None, "integer ids"),
        (torch.zeros(1, 0, dtype=torch.long), None, "integer ids"),
        (ids(1, 5), torch.ones(1, 4), "tokens' shape"),
        (ids(1, 5), torch.zeros(1, 5), "no real token"),
    ],
)
def test_unusable_inputs_are_refused(tokens, mask, word):
    with pytest.raises(InputError, match=word):
        tiny("llama").run(tokens, mask)


def test_a_model_whose_attention_is_not_ours_is_refused(monkeypatch):
    wrong = bridge._attend

    def halved(module, query, *rest, scaling=None, **options):
        return wrong(module, query, *rest, scaling=0.5 * (scaling or 1.0), **options)

    monkeypatch.setattr(bridge, "_attend", halved)
    with pytest.raises(InputError, match="is not audited: its logits and ours differ"):
        self_test(tiny("llama"))


def test_edits_that_do_not_reach_the_weights_are_refused(monkeypatch):
    first, kept = bridge.softmax, {}

    def stale(scores, sink=None):
        """The weights of the first scores of their shape, whatever became of them since."""
        return kept.setdefault(scores.shape, first(scores))

    monkeypatch.setattr(bridge, "_compare", lambda model, tokens: bridge._moves(model, tokens))
    monkeypatch.setattr(bridge, "softmax", stale)
    tiny("llama").run(torch.randint(0, VOCABULARY, (1, bridge.TEST_TOKENS)))
    with pytest.raises(InputError, match="equal scores did not give equal weights"):
        self_test(tiny("llama"))


def test_a_model_that_ignores_its_attention_is_refused():
    model = load_copy("llama")
    with torch.no_grad():
        model.model.model.layers[0].self_attn.o_proj.weight.zero_()
    with pytest.raises(InputError, match="do not depend on the weights of its first layer"):
        self_test(model)


def load_copy(family):
    return bridge.LanguageModel(family, copy.deepcopy(tiny(family).model))


@EVERY_FAMILY
def test_logits_of_the_positions_asked_are_those_of_all(family):
    model, tokens, asked = tiny(family), ids(), torch.tensor([3, 4, 28])
    torch.testing.assert_close(model.run(tokens, asked=asked), model.run(tokens)[:, asked], rtol=1e-5, atol=1e-5)


def test_models_are_read_from_directories_without_tokenizers(tmp_path):
    model = tiny("llama")
    model.model.save_pretrained(tmp_path / "saved")
    read = load_language_model(tmp_path / "saved")
    assert torch.equal(read.run(ids()), model.run(ids()))
    assert read.tokenizer is None
    assert (read.n_layers, read.n_heads, read.n_key_heads, read.limit) == (2, 4, 2, 96)
    assert [read.key_head(head) for head in range(4)] == [0, 0, 1, 1]


def test_what_is_no_model_is_refused_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    pickled = tmp_path / "pickled"
    tiny("llama").model.config.save_pretrained(pickled)
    torch.save(tiny("llama").model.state_dict(), pickled / "pytorch_model.bin")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    for path in (tmp_path / "none", tmp_path / "empty", pickled, broken, "./nowhere", "just-a-word"):
        with pytest.raises(InputError) as error:
            load_language_model(path)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 600


def spoilt(tmp_path, change=None, **config):
    """A saved tiny Llama whose weights or configuration were changed."""
    tiny("llama").model.save_pretrained(tmp_path)
    if change is not None:
        weights = load_file(tmp_path / "model.safetensors")
        change(weights)
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | config))
    return tmp_path


def _poison(weights):
    weights["model.embed_tokens.weight"][3, 0] = torch.nan


@pytest.mark.parametrize(
    ("change", "config", "word"),
    [
        (lambda w: w.pop("model.layers.1.self_attn.q_proj.weight"), {}, "1 weights are missing, model.layers.1"),
        (lambda w: w.pop("lm_head.weight"), {}, "missing, lm_head"),
        (lambda w: w.clear() or w.update(foo=torch.ones(1)), {}, "missing"),
        (lambda w: w.update(foo=torch.ones(1)), {}, "1 weights are unexpected, foo"),
        (_poison, {}, "embed_tokens.weight has weights that are not finite"),
        (None, {"num_hidden_layers": 1}, "unexpected"),
        (None, {"num_hidden_layers": 3}, "missing"),
        (None, {"num_hidden_layers": 10**6}, "num_hidden_layers=1000000, which must be from 1 to 1000"),
        (None, {"num_hidden_layers": 0}, "num_hidden_layers=0"),
        (None, {"max_position_embeddings": -5}, "max_position_embeddings=-5"),
        (None, {"hidden_size": 10**9}, "hidden_size=1000000000"),
        (None, {"hidden_size": 0}, "hidden_size=0"),
        (None, {"quantization_config": {"quant_method": "zzz"}}, "quantized"),
        (None, {"hidden_act": "nope"}, "cannot be read"),
        (None, {"architectures": ["LlamaModel"], "model_type": "bert"}, r"weights are|cannot be read"),
    ],
)
def test_damaged_models_are_refused_in_one_line(tmp_path, capfd, change, config, word):
    folder = spoilt(tmp_path, change, **config)
    capfd.readouterr()
    with pytest.raises(InputError, match=word) as error:
        load_language_model(folder)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_a_classifier_is_no_language_model(tmp_path):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    LlamaForSequenceClassification(LlamaConfig(**FAMILIES["llama"][1])).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="give a causal language model"):
        load_language_model(tmp_path)


def test_pickled_weights_are_not_reached_through_an_index_or_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("something was unpickled"))
    folder = spoilt(tmp_path / "saved")
    for names in ({"lm_head.weight": "pytorch_model.bin"}, {"lm_head.weight": "../x.safetensors"}, ["x"]):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        with pytest.raises(InputError, match="index"):
            load_language_model(folder)
    with pytest.raises(InputError, match="no such directory; give a model's directory"):
        load_language_model(folder / "config.json")


def test_a_mistyped_path_is_not_taken_for_a_hub_id(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no such directory"):
        load_language_model("models/lama")


def test_a_failing_forward_pass_is_refused(monkeypatch):
    model = tiny("olmo2")
    monkeypatch.setattr(model.model, "forward", lambda **_: 1 / 0)
    with pytest.raises(InputError, match=r"its forward pass fails \(ZeroDivisionError"):
        self_test(model)


@EVERY_FAMILY
def test_every_family_is_read_back(family, tmp_path):
    tiny(family).model.save_pretrained(tmp_path)
    read = load_language_model(tmp_path)
    assert torch.equal(read.run(ids()), tiny(family).run(ids()))


@EVERY_FAMILY
def test_transformer_bridge_sees_the_same_attention(family, tmp_path, monkeypatch):
    """The other route: full matrices through TransformerLens's hooks, from a directory, with nothing looked up."""
    from transformer_lens.model_bridge import TransformerBridge

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, tokens = tiny(family), ids()
    model.model.save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    lens = TransformerBridge.boot_transformers(str(tmp_path), device="cpu")
    logits, cache = lens.run_with_cache(tokens)
    found_logits, found = patterns(model, tokens)
    torch.testing.assert_close(logits, found_logits, rtol=1e-5, atol=1e-5)
    for layer in range(2):
        torch.testing.assert_close(cache[f"blocks.{layer}.attn.hook_pattern"], found[layer], rtol=1e-5, atol=1e-5)
