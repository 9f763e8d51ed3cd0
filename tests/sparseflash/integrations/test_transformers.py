"""Small models of transformers with random weights: through sparseflash and by their own."""

import os
from functools import cache
from importlib import import_module
from itertools import product

import pytest
import torch

import masks

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers = pytest.importorskip("transformers", minversion="5.23")
sparse = import_module("sparseflash.integrations.transformers")
make_mask = import_module("sparseflash.integrations.transformers_masks").make_mask

N, WORDS, PADDED = 48, 50, 11
SIZES = dict(
    vocab_size=WORDS, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, pad_token_id=0,
)  # fmt: skip
GROUPED = SIZES | dict(num_key_value_heads=2)
T5 = dict(vocab_size=WORDS, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
T5 |= dict(relative_attention_num_buckets=8, relative_attention_max_distance=20)
T5 |= dict(decoder_start_token_id=0)
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED | dict(sliding_window=9)),
    "gemma3": (
        "Gemma3ForCausalLM", "Gemma3TextConfig",
        GROUPED | dict(head_dim=8, sliding_window=9, query_pre_attn_scalar=3)
        | dict(layer_types=["sliding_attention", "full_attention"]),
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", dict(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4)
        | dict(bos_token_id=1, eos_token_id=2)),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", SIZES | dict(local_attention=10)),
    "bart": (
        "BartForConditionalGeneration", "BartConfig",
        dict(vocab_size=WORDS, d_model=32, encoder_layers=1, decoder_layers=1, pad_token_id=0)
        | dict(encoder_ffn_dim=32, decoder_ffn_dim=32)
        | dict(encoder_attention_heads=4, decoder_attention_heads=4),
    ),
    "gpt_oss": (  # with sinks; its own attention is eager
        "GptOssForCausalLM", "GptOssConfig",
        GROUPED | dict(head_dim=8, sliding_window=9, num_local_experts=2, num_experts_per_tok=1)
        | dict(layer_types=["sliding_attention", "full_attention"]),
    ),
    **{  # with biases of the scores
        kind.lower(): (f"{kind}ForConditionalGeneration", f"{kind}Config", T5)
        for kind in ("T5", "MT5", "UMT5", "LongT5")
    },
    "falcon": ("FalconForCausalLM", "FalconConfig", SIZES | dict(alibi=True)),
    "falcon_7b": ("FalconForCausalLM", "FalconConfig", SIZES),  # rotary
    "bloom": ("BloomForCausalLM", "BloomConfig", SIZES),
    "mpt": ("MptForCausalLM", "MptConfig",
        dict(vocab_size=WORDS, d_model=32, n_layers=2, n_heads=4, max_seq_len=80)),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GROUPED | dict(head_dim=8)),
}  # fmt: skip
OWN = ["llama", "mistral", "gemma3", "gpt2", "bert", "modernbert", "bart", "gpt_oss"]
OWN += ["t5", "mt5", "umt5", "longt5", "falcon", "falcon_7b"]
EAGER = ["gemma2", "bloom", "mpt"]  # their own attention makes NaN of empty rows
SIDES = ["none", "left", "right", "both", "between"]
PAIRS = [(name, SIDES[(2 * i + j) % 5]) for i, name in enumerate(OWN) for j in (0, 1)]
MINE = "butterfly(16) | global(3)"
DECODERS = ["llama", "mistral", "gemma3", "gpt2", "gpt_oss"]


def make(name, **changes):
    """A model with random weights, with attention of its own."""
    cls, config, arguments = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**(arguments | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 1))
    if name == "gpt_oss":  # its experts know no float64
        return model.eval()
    if model._supports_sdpa and not name.startswith(
        ("gemma2", "falcon")
    ):  # Falcon has it, and no switch
        model.set_attn_implementation("sdpa")
    return model.eval().double()


@cache
def words(batch=2, n=N):
    return torch.randint(3, WORDS, (batch, n), generator=torch.Generator().manual_seed(1))


def padding(side):
    real = torch.ones(2, N, dtype=torch.long)
    if side == "left":
        real[1, :PADDED] = 0
    elif side == "right":
        real[1, -PADDED:] = 0
    elif side == "both":
        real[0, :3], real[0, -PADDED:], real[1, :PADDED] = 0, 0, 0
    elif side == "between":
        real[1, 20:25] = 0
    return real


def logits_and_gradients(model, mask=None, **given):
    """Logits of real tokens, and the gradients of all parameters."""
    model.zero_grad()
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = words().flip(1)
    logits = model(words(), attention_mask=mask, **given).logits
    if mask is not None and mask.ndim == 2 and not model.config.is_encoder_decoder:
        logits = logits[mask.bool()]
    return with_gradients(model, logits)


def with_gradients(model, out):
    out.square().sum().backward()
    return out.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def assert_same(found, expected):
    largest = max(y.abs().max().item() for y in expected[1])
    error = 1e-6 if found[0].dtype == torch.float64 else 1e-5  # some norms are float32 in both
    for x, y in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=error * largest)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name, side", [*PAIRS, *product(EAGER, ["none", "right"])])
def test_own_mask_and_padding(name, side):
    model, real = make(name), padding(side)
    expected = logits_and_gradients(model, real)
    assert_same(logits_and_gradients(sparse.use(model), real), expected)


@pytest.mark.parametrize("name", DECODERS)
def test_packed_sequences(name):
    lengths = (7, 30, N - 37)
    places = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    given = {"position_ids": places, "use_cache": False}
    model = make(name)
    expected = logits_and_gradients(model, None, **given)
    assert_same(logits_and_gradients(sparse.use(model), None, **given), expected)
    if name == "gpt_oss":  # its own attention differs as much, because of its experts
        return
    model = sparse.use(model, "local(5) | global(2)")
    packed = model(words(), **given).logits
    start = 0
    for n in lengths:
        alone = model(words()[:, start : start + n], use_cache=False).logits
        torch.testing.assert_close(packed[:, start : start + n], alone, rtol=1e-4, atol=1e-4)
        start += n


@pytest.mark.parametrize(
    "name, mask",
    [
        ("gemma3", None),
        ("gpt_oss", None),
        ("t5", None),
        *((name, MINE) for name in ("gemma3", "gpt2", "gpt_oss", "falcon")),
    ],
)
def test_generation(name, mask):
    model, real = make(name), padding("left")
    options = dict(do_sample=False, max_new_tokens=5, min_new_tokens=5)
    options |= dict(attention_mask=real, pad_token_id=0)
    if mask is None:
        expected = model.generate(words(), **options)
    found = sparse.use(model, mask).generate(words(), **options)
    if mask is not None:  # the whole sequence again for every word
        expected = model.generate(words(), use_cache=False, **options)
    assert torch.equal(found, expected)


def test_words_after_those_in_the_cache_see_the_last_rows():
    model = sparse.use(make("mistral"), "dilated(30, 3) | sinks(4)")
    whole = model(words(), use_cache=False).logits
    for cut in (1, 30, N - 1):
        first = model(words()[:, :cut], use_cache=True)
        second = model(words()[:, cut:], past_key_values=first.past_key_values)
        torch.testing.assert_close(second.logits, whole[:, cut:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name, kind", [("llama", torch.bool), ("gpt2", torch.float64), ("bert", torch.float64)]
)
def test_mask_of_the_user(name, kind):
    text = "butterfly(16) | local(5)"
    mask = masks.parse(text) if name == "bert" else masks.parse(text) & masks.causal()
    window = masks.local(9)
    given, less = (_pairs(x, kind) for x in (mask, mask & window))
    model = make(name)
    expected, expected_less = (logits_and_gradients(model, pairs) for pairs in (given, less))
    assert_same(logits_and_gradients(sparse.use(model), given), expected)
    assert_same(logits_and_gradients(sparse.use(model, text)), expected)
    assert_same(logits_and_gradients(sparse.use(model, window), given), expected_less)


def _pairs(mask, kind):
    """(2, 1, N, N): booleans, or scores to add."""
    pairs = torch.from_numpy(mask.build(N).to_dense()).expand(2, 1, -1, -1)
    if kind == torch.bool:
        return pairs
    return torch.zeros(pairs.shape, dtype=kind).masked_fill(~pairs, torch.finfo(kind).min)


def test_mask_of_the_user_begins_after_the_padding():
    model = sparse.use(make("llama"), "butterfly(16) | global(3)")
    padded = model(words(), attention_mask=padding("left")).logits[1, PADDED:]
    alone = model(words()[1:, PADDED:]).logits[0]
    torch.testing.assert_close(padded, alone, rtol=1e-4, atol=1e-4)


def test_a_mask_for_each_layer_and_head():
    mask = "layers(heads(local(3), dense(), global(2), butterfly(16)), dilated(20, 4))"
    model = sparse.use(make("llama"), mask)
    found = logits_and_gradients(model)
    pairs = [masks.parse(mask).layer(layer) & masks.causal() for layer in (0, 1)]
    by_sdpa(model, [m.build(N, heads=4) for m in pairs])
    assert_same(found, logits_and_gradients(model))


def by_sdpa(model, blocks):
    """Let every layer attend by sdpa, with the block mask of its number or the only one."""
    pairs = [torch.from_numpy(mask.to_dense()) for mask in blocks]

    def attend(module, q, k, v, mask, **given):
        own = [m for m in model.modules() if type(m) is type(module)]  # of the layers in order
        mine = pairs[own.index(module) if len(pairs) > 1 else 0]
        if mask is not None:  # with biases
            mine = mask.masked_fill(~mine, torch.finfo(mask.dtype).min)
        return transformers.AttentionInterface()["sdpa"](module, q, k, v, mine, **given)

    transformers.AttentionInterface.register("by_sdpa", attend)
    model.set_attn_implementation("by_sdpa")


SWIN = dict(
    image_size=32, patch_size=2, embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=4
)
BEIT = dict(image_size=32, use_relative_position_bias=True)
BEIT |= dict(use_shared_relative_position_bias=True)


@pytest.mark.parametrize(
    "name, sizes, text, tokens",
    [  # a class token and 4 x 4 patches; 4 frames of 2 x 2 patches, for which it makes no mask
        ("ViT", {"image_size": 32}, "neighborhood((4, 4), 3) >> shift(1) | global(1)", 17),
        ("VideoMAE", {"image_size": 16, "num_frames": 8}, "neighborhood((4, 2, 2), (3, 1, 2))", 16),
        ("Beit", BEIT, "neighborhood((4, 4), 3) >> shift(1) | global(1)", 17),
        ("Swin", SWIN, "neighborhood((4, 4), 3)", 16),  # in a window
    ],
)
def test_images_and_videos(name, sizes, text, tokens):
    sizes = sizes if name == "Swin" else SIZES | {"patch_size": 8} | sizes
    torch.manual_seed(0)
    model = getattr(transformers, name + "Model")(getattr(transformers, name + "Config")(**sizes))
    for table in (p for key, p in model.named_parameters() if "bias_table" in key):
        torch.nn.init.normal_(table)
    images = torch.randn(2, 8, 3, 16, 16) if name == "VideoMAE" else torch.randn(2, 3, 32, 32)

    def results():
        model.zero_grad()
        return with_gradients(model, model(images)[0])

    model.eval().set_attn_implementation("sdpa")
    own = results()
    sparse.use(model)
    assert_same(results(), own)
    sparse.use(model, text)
    found = results()
    assert not torch.allclose(found[0], own[0], rtol=1e-3, atol=1e-3)
    by_sdpa(model, [masks.parse(text).build(tokens)])
    assert_same(found, results())


@pytest.mark.parametrize("name", ["t5", "umt5", "bloom", "mpt", "falcon"])
def test_a_mask_beside_a_bias(name, monkeypatch):
    """Their own attention gets the pairs by the mask that transformers makes, and comes back."""
    text, real = "butterfly(8) | local(2)", padding("right")
    pairs = torch.from_numpy(masks.parse(text).build(N).to_dense())
    model, other = make(name), make(name)
    part = model
    if name.endswith("t5"):
        part, other = model.get_encoder(), other.get_encoder()

    def results(model):
        model.zero_grad()
        return with_gradients(model, model(words(), attention_mask=real)[0][real.bool()])

    found = results(sparse.use(part, text))
    kind, known = other.config._attn_implementation, transformers.AttentionMaskInterface()
    made, dense = known[kind], results(other)

    def smaller(**given):
        mask = made(**given | dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False))
        return (
            mask & pairs
            if kind == "sdpa"
            else mask.masked_fill(~pairs, torch.finfo(mask.dtype).min)
        )

    part.set_attn_implementation(kind)
    assert_same(results(part), dense)
    monkeypatch.setitem(type(known)._global_mapping, kind, smaller)
    assert_same(found, results(other))


def test_the_gradient_of_a_bias_in_layers_that_are_recomputed():
    model = make("t5", dropout_rate=0.0).train()
    expected = logits_and_gradients(model)
    sparse.use(model).gradient_checkpointing_enable({"use_reentrant": True})
    assert_same(logits_and_gradients(model), expected)


def test_a_bias_of_the_user():
    model, bias = make("llama"), torch.randn(2, 1, N, N, dtype=torch.float64)
    bias = bias.masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf)
    expected = logits_and_gradients(model, bias)
    assert_same(logits_and_gradients(sparse.use(model), bias), expected)


def test_a_module_without_a_mask_says_whether_it_is_causal():
    module, attend = torch.nn.Module(), transformers.AttentionInterface()
    q, k, v = torch.randn(3, 1, 2, 8, 16).unbind()
    for module.is_causal, queries in product([True, False], [1, 8]):
        given = module, q[:, :, -queries:], k, v, None
        found, expected = (attend[name](*given)[0] for name in ("sparse", "sdpa"))
        torch.testing.assert_close(found, expected)


def test_functions_that_transformers_does_not_make_are_evaluated():
    create = transformers.masking_utils.create_causal_mask
    config = sparse.use(make("llama"), "dilated(30, 3)").config
    pairs = create(
        config, torch.zeros(2, N, 32), padding("left"), None,
        or_mask_function=lambda b, h, q, k: (q < 20) & (k < 20),
    ).asked.mask(masks.parse("dilated(30, 3)")).build(N).to_dense()  # fmt: skip
    q, k = torch.arange(N)[:, None], torch.arange(N)
    own = (k <= q) | ((q < 20) & (k < 20))
    apart = ((q - k) % 3 == 0) & ((q - k).abs() <= 30)
    expected = (own & apart).expand(2, 1, N, N).clone()
    expected[1, :, :PADDED], expected[1, :, :, :PADDED] = False, False
    assert torch.equal(torch.from_numpy(pairs), expected)


def test_functions_that_transformers_makes_are_read():
    module, sizes = transformers.masking_utils, dict(batch_size=1, q_length=N, kv_length=N)
    chunked = module.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64))
    for function, text in {
        module.causal_mask_function: "causal()",
        module.bidirectional_mask_function: "dense()",
        module.sliding_window_causal_mask_function(9): "sliding(9)",
        module.sliding_window_causal_mask_function(0): "~dense()",
        module.sliding_window_bidirectional_mask_function(9): "local(9)",
        chunked: "causal() & block_diagonal(8)",
    }.items():
        mask = make_mask(None, mask_function=function, **sizes).asked.mask()
        assert mask.spelled and mask.build(N) == masks.parse(text).build(N)


def test_dropout_is_drawn_by_torch_and_in_training_only():
    model = sparse.use(make("llama", attention_dropout=0.5))
    expected = model(words()).logits
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(model.train()(words()).logits)
    assert torch.equal(drawn[0], drawn[1]) and not torch.allclose(drawn[0], drawn[2])
    assert not torch.allclose(drawn[0], expected)
    torch.testing.assert_close(model.eval()(words()).logits, expected)


def test_the_mask_is_saved_with_the_model(tmp_path):
    model = sparse.use(make("llama"), masks.causal() & masks.local(5))
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="sparse")
    assert loaded.config.sparse_mask == "causal() & local(5)"
    torch.testing.assert_close(loaded(words()).logits, model(words()).logits)
    assert not hasattr(sparse.use(loaded).config, "sparse_mask")


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: sparse.use(make("llama"))(words(), output_attentions=True), "output_att.*eager"),
        (lambda: sparse.use(make("bart"), "local(5)"), "several sequences.*model.encoder"),
        (lambda: sparse.use(make("bert", is_decoder=True, add_cross_attention=True), "local(5)"),
            "several sequences"),
        (lambda: sparse.use(make("llama"), masks.mask_from(torch.ones(N, N).bool().numpy())),
            "masks.parse can read"),
        (lambda: sparse.use(make("llama"), "lokal(5)"), "did you mean local"),
        (lambda: sparse.use(make("t5").get_encoder())(
            words(), attention_mask=-torch.rand(2, 1, N, N).double()), "attention_mask.*sdpa"),
        (lambda: sparse.use(make("llama"))(words(), attention_mask=torch.ones(2, N, N)),
            rf"attention_mask has shape \(2, {N}, {N}\); pass \(batch, tokens\)"),
    ],
    ids=["weights", "encoder_decoder", "cross_attention", "no_text",
        "no_mask", "bias", "three_extents"],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
