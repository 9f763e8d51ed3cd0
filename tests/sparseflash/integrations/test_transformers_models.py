"""Models of transformers that pick keys, compute with their masks or use a static cache."""

import pytest
import torch

import masks
from sparseflash import attention
from tests.sparseflash.integrations.test_transformers import (
    T5,
    WORDS,
    N,
    assert_same,
    by_sdpa,
    padding,
    sparse,
    transformers,
    with_gradients,
    words,
)

SIZES = dict(
    vocab_size=WORDS, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
)  # fmt: skip
LATENT = SIZES | dict(
    num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
    v_head_dim=16, index_n_heads=2, index_head_dim=16, index_topk=5, n_routed_experts=4, n_group=1,
    topk_group=1, num_experts_per_tok=1, moe_intermediate_size=32, mlp_layer_types=["dense"] * 2,
)  # fmt: skip
MODELS = {
    "llama": SIZES,
    "mistral": SIZES | dict(sliding_window=9),
    "gemma3_text": SIZES
    | dict(head_dim=16, sliding_window=9, layer_types=["sliding_attention", "full_attention"]),
    "deepseek_v32": LATENT,
    "glm_moe_dsa": LATENT,
    "minimax_m3_vl_text": SIZES
    | dict(head_dim=32, index_n_heads=2, index_head_dim=16, index_block_size=8)
    | dict(index_topk_blocks=2, num_local_experts=2, num_experts_per_tok=1)
    | dict(layer_types=["minimax_m3_sparse"] * 2, mlp_layer_types=["dense"] * 2),
    "deepseek_v4": SIZES
    | dict(num_key_value_heads=1, head_dim=16, moe_intermediate_size=32, n_routed_experts=4)
    | dict(num_experts_per_tok=2, q_lora_rank=32, qk_rope_head_dim=8, sliding_window=8)
    | dict(layer_types=["compressed_sparse_attention"] * 2),
    "gemma4_text": SIZES
    | dict(num_hidden_layers=4, sliding_window=8, vocab_size_per_layer_input=WORDS)
    | dict(hidden_size_per_layer_input=16, num_kv_shared_layers=2)
    | dict(layer_types=["sliding_attention", "full_attention"] * 2),
    "bloom": SIZES,
    "mpt": dict(vocab_size=WORDS, d_model=64, n_layers=2, n_heads=4, max_seq_len=64),
}
PICKING = ["deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text", "deepseek_v4"]
SIDES = "left", "right", "right", "left"
MINE = "butterfly(4) | global(2)"
ALIBI = ["bloom", "mpt"]
STATIC = ["mistral", "gemma3_text", "deepseek_v32", "minimax_m3_vl_text", "gemma4_text", *ALIBI]


def make(kind, attention="eager", config=None):
    """A model with random weights."""
    config = config or transformers.CONFIG_MAPPING[kind](**MODELS[kind])
    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
    return model


def generate(model, **options):
    # the indexer of MiniMax reads hidden states of padding, which say nothing
    side = "none" if "minimax" in model.config.model_type else "left"
    options |= dict(attention_mask=padding(side), pad_token_id=0, do_sample=False)
    return model.generate(words(), max_new_tokens=6, min_new_tokens=6, **options)


@pytest.mark.parametrize("kind, side", zip(PICKING, SIDES, strict=True))
def test_models_that_pick_keys(kind, side):
    model, given = make(kind), dict(attention_mask=padding(side), use_cache=False)
    real = given["attention_mask"].bool()
    expected = with_gradients(model, model(words(), **given).logits[real])
    model.zero_grad()
    sparse.use(model)
    assert_same(with_gradients(model, model(words(), **given).logits[real]), expected)


@pytest.mark.parametrize("kind", [*PICKING, "gemma4_text", *ALIBI])
def test_generation(kind):
    model = make(kind)
    expected = generate(model)
    assert torch.equal(generate(sparse.use(model)), expected)


def test_a_mask_joined_to_the_choice_of_a_model():
    model = sparse.use(make("minimax_m3_vl_text"), "local(6) | global(1)")
    found = model(words()).logits
    pairs = masks.parse("(local(6) | global(1)) & causal()").build(N).to_dense()
    given = torch.from_numpy(pairs).expand(2, 1, N, N)
    model.set_attn_implementation("sdpa")
    expected = model(words(), attention_mask=given).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "kind, mask", [*((kind, None) for kind in STATIC[1:]), ("gemma4_text", MINE)]
)
def test_a_static_cache(kind, mask):
    model = make(kind)
    if mask is None:
        expected = generate(model, cache_implementation="static")
    else:
        expected = generate(sparse.use(model, mask))
    assert torch.equal(generate(sparse.use(model, mask), cache_implementation="static"), expected)


def test_a_bias_by_distance_with_a_4d_mask_and_a_static_cache():
    """The cache has more room than keys, and the mask is of all of it."""
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)).eval()
    given = dict(encoder_outputs=model.get_encoder()(words()), use_cache=True)
    expected = model(**given, decoder_input_ids=words()).logits
    kept = transformers.StaticCache(model.config, max_cache_len=N + 9), transformers.DynamicCache()
    given["past_key_values"] = transformers.EncoderDecoderCache(*kept)
    sparse.use(model)
    allowed = torch.ones(N, N + 9, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    for part in torch.arange(N).split([30, 1, N - 31]):
        given["decoder_attention_mask"] = allowed[:, :, part]
        found = model(**given, decoder_input_ids=words()[:, part]).logits
        torch.testing.assert_close(found, expected[:, part], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_generation():
    config = transformers.MistralConfig(**MODELS["mistral"] | dict(num_hidden_layers=1))
    model = sparse.use(make("mistral", config=config), MINE)
    options = transformers.CompileConfig(backend="eager", mode=None)
    options._compile_all_devices = True  # as on a GPU
    found = generate(model, cache_implementation="static", compile_config=options)
    assert torch.equal(found, generate(model))


def test_images_before_text():
    text = dict(model_type="gemma", head_dim=16, **SIZES)
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    sizes |= dict(image_size=32, patch_size=8, projection_dim=64)
    config = transformers.PaliGemmaConfig(
        text_config=text,
        vision_config=dict(model_type="siglip_vision_model", **sizes),
        image_token_index=WORDS - 1, projection_dim=64, hidden_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.PaliGemmaForConditionalGeneration(config).eval()
    tokens = words().clone()
    tokens[:, :16], tokens[:, 16:] = WORDS - 1, tokens[:, 16:].clamp(max=WORDS - 2)
    given = dict(input_ids=tokens, pixel_values=torch.randn(2, 3, 32, 32))
    training = given | dict(token_type_ids=(torch.arange(N) > 21).long().expand(2, -1))
    model.set_attn_implementation("eager")
    expected = model(**training, labels=tokens).loss, model.generate(**given, max_new_tokens=4)
    sparse.use(model)
    torch.testing.assert_close(model(**training, labels=tokens).loss, expected[0])
    assert torch.equal(model.generate(**given, max_new_tokens=4), expected[1])


@pytest.mark.parametrize("numbered, cache", [(False, True), (True, False)])
def test_sequences_that_cu_seq_lens_describe(numbered, cache):
    model = sparse.use(make("mistral"), "local(5) | global(2)")
    tokens = words(1)
    parts = [tokens[:, :15], tokens[:, 15:]]
    collate = transformers.DataCollatorWithFlattening(
        return_tensors="pt", return_flash_attn_kwargs=True, return_position_ids=numbered
    )
    batch = collate([{"input_ids": part[0].tolist()} for part in parts])
    batch.pop("labels")
    if not numbered:  # rotary positions go on; attention is the same
        expected = model(tokens[:, 15:], position_ids=torch.arange(15, N)[None]).logits
    else:
        expected = model(tokens[:, 15:]).logits
    found = model(**batch, use_cache=cache).logits[:, 15:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q is given.*padding"):
        model(**batch, attention_mask=padding("left")[1:])
    with pytest.raises(ValueError, match=rf"cu_seq_lens_k \[0, 16, {N}\]"):
        model(**batch | dict(cu_seq_lens_k=torch.tensor([0, 16, N])))


def test_models_of_one_config_have_masks_of_their_own():
    config = transformers.LlamaConfig(**MODELS["llama"])
    a, b = (make("llama", "sdpa", config=config) for _ in range(2))
    dense = b(words()).logits
    found = sparse.use(a, "local(2)")(words()).logits
    assert torch.equal(b(words()).logits, dense) and not torch.allclose(found, dense)
    sparse.use(b, "dense()")
    assert torch.equal(a(words()).logits, found) and a.config.sparse_mask == "local(2)"
    assert not hasattr(config, "sparse_mask")


def test_a_part_of_a_model():
    sizes = dict(vocab_size=WORDS, d_model=32, encoder_layers=2, decoder_layers=1)
    sizes |= dict(encoder_ffn_dim=32, decoder_ffn_dim=32)
    sizes |= dict(encoder_attention_heads=2, decoder_attention_heads=2)
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    text = "layers(local(8), global(2))"  # its attention modules have no number of their own
    sparse.use(model)
    found = sparse.use(model.get_encoder(), text)(words())[0]
    assert not torch.allclose(found, sparse.use(model.get_encoder())(words())[0])
    layers = [masks.parse(text).layer(number) for number in (0, 1)]
    by_sdpa(model.get_encoder(), [mask.build(N) for mask in layers])
    torch.testing.assert_close(found, model.get_encoder()(words())[0])


@pytest.mark.parametrize("name", ["T5", "UMT5"])
def test_a_mask_reaches_layers_whose_config_is_a_copy(name, tmp_path):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**T5)
    model = getattr(transformers, f"{name}EncoderModel")(config).eval()
    found = sparse.use(model, "local(2)")(words())[0]
    pairs = torch.from_numpy(masks.parse("local(2)").build(N).to_dense()).expand(2, -1, -1, -1)
    torch.testing.assert_close(found, sparse.use(model)(words(), attention_mask=pairs)[0])
    sparse.use(model, "local(2)").save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="sparse")
    torch.testing.assert_close(loaded(words())[0], found)


def test_a_mask_beside_queries_of_a_4d_mask_that_are_no_whole_sequence():
    model = sparse.use(make("llama"), "local(3)")
    first = model(words()[:, :40], use_cache=True).past_key_values
    pairs = torch.ones(2, 1, N - 40, N, dtype=torch.bool)
    with pytest.raises(ValueError, match=rf"8 queries and {N} keys.*local\(3\).*attention_mask"):
        model(words()[:, 40:], attention_mask=pairs, past_key_values=first)


def call(attention_mask=None, **given):
    module = torch.nn.Module()
    q, k, v = torch.randn(3, 1, 2, 8, 16).unbind()
    return transformers.AttentionInterface()["sparse"](module, q, k, v, attention_mask, **given)


def test_a_tensor_of_another_shape_is_refused_by_name():
    for shape in (1, 1, 1, 9), (1, 1, 9, 8), (2, 1, 8, 8), (1, 1, 1, 8, 8):
        bias = torch.ones(shape)
        hidden = [bias.bool()] if shape[0] == 1 else []  # else attention compares the batches
        for name in "attention_mask", "position_bias":
            for given in [bias, *hidden][: None if name == "attention_mask" else 1]:
                with pytest.raises(ValueError, match=rf"{name} has shape.*, 8, 8\)"):
                    call(**{name: given})


def test_documents_in_a_module_without_a_mask():
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    torch.manual_seed(0)
    found = call(cu_seq_lens_q=ends, cu_seq_lens_k=ends)[0]
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 8, 16).unbind()
    expected = attention(q, k, v, masks.documents((3, 5)) & masks.causal())
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_an_unknown_tensor_is_refused_by_name():
    numbers = torch.arange(8)[None]
    for name in ("sinks", "block_bias", "attention_scores", "output_attentions"):
        with pytest.raises(ValueError, match=rf"{name} is a Tensor of torch.float32"):
            call(**{name: torch.zeros(1, 2, 8, 8)})
        call(**{name: None}, position_ids=numbers, input_ids=numbers, sliding_window=4)


def test_a_model_with_eager_attention_alone():
    """Its mask has one row, for all queries, and eager attention ignores what is_causal says."""
    sizes = dict(hidden_size=64, num_hidden_layers=2)
    text = sizes | dict(vocab_size=WORDS, num_attention_heads=4, intermediate_size=32)
    config = transformers.BridgeTowerConfig(
        text_config=text, vision_config=sizes | dict(patch_size=8, image_size=32),
        num_attention_heads=4, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BridgeTowerModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    given = dict(input_ids=words(), pixel_values=torch.randn(2, 3, 32, 32))
    given["attention_mask"] = padding("right")
    expected = model(**given)
    found = sparse.use(model)(**given)
    for name in ("text_features", "image_features", "pooler_output"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-3)


def test_a_model_that_computes_with_its_mask():
    config = sparse.use(make("llama")).config
    create = transformers.masking_utils.create_causal_mask
    mask = create(config, torch.zeros(2, N, 32), padding("left"), None)
    assert (mask.ndim, mask.dtype, mask.shape) == (4, torch.float32, (2, 1, N, N))
    config._attn_implementation = "eager"
    eager = create(config, torch.zeros(2, N, 32), padding("left"), None)
    assert torch.equal(torch.cat([mask, mask + 1], -1), torch.cat([eager, eager + 1], -1))
    assert torch.equal(mask[:, 0, 3:5] == 0, eager[:, 0, 3:5] == 0)
    assert torch.equal(mask[..., 3:20].cos(), eager[..., 3:20].cos())
    assert torch.equal((mask < -1).logical_not(), eager == 0)
    bias = torch.randn(2, 4, N, N)
    hidden = bias.masked_fill(eager != 0, torch.finfo(torch.float32).min)
    assert torch.equal((mask + bias).softmax(-1), hidden.softmax(-1))
    assert repr(mask + bias) == f"ModelMask(2, 4, {N}, {N})"
    config._attn_implementation = "sparse"
    both = transformers.masking_utils.create_bidirectional_mask  # evaluated by torch.vmap
    mask = both(config, torch.zeros(1, 8, 32), None, and_mask_function=lambda b, h, q, k: q < k + 3)
    assert torch.equal((mask == 0)[0, 0], torch.ones(8, 8).tril(2).T.bool())
    config = sparse.use(make("llama"), "local(3)").config
    mask = create(config, torch.zeros(2, N, 32), None, None)
    with pytest.raises(ValueError, match=rf"aten.cat.*\(2, 1, {N}, {N}\).*local\(3\)"):
        torch.cat([mask, mask], -1)


def test_masks_that_no_layer_with_attention_takes_are_refused():
    kinds = dict(layer_types=["conv", "full_attention"] * 2, num_hidden_layers=4)
    config = transformers.Lfm2Config(**SIZES | kinds, block_auto_adjust_ff_dim=False)
    model = transformers.Lfm2ForCausalLM(config)  # its attention is that of layers 1 and 3
    with pytest.raises(ValueError, match=r"layers \[1, 3\] of 4, .* takes local\(2\)"):
        sparse.use(model, "layers(local(2), dense())")
    sparse.use(model, "layers(local(2), dense(), dense(), local(2))")(words())
    sizes = dict(vocab_size=WORDS, num_hidden_layers=2, num_attention_heads=2)
    model = transformers.AlbertModel(
        transformers.AlbertConfig(**sizes, embedding_size=16, hidden_size=32, intermediate_size=32)
    )
    with pytest.raises(ValueError, match=r"layers \[0\] of 2, .* takes dense\(\)"):
        sparse.use(model, "layers(local(2), dense())")


@pytest.mark.parametrize("kind", ["mamba", "fnet"])
def test_a_model_without_attention_is_refused(kind):
    sizes = dict(vocab_size=WORDS, hidden_size=32, num_hidden_layers=1)
    config = transformers.CONFIG_MAPPING[kind](**sizes)
    model = transformers.AutoModel.from_config(config)
    with pytest.raises(ValueError, match=f"{type(model).__name__} has no attention"):
        sparse.use(model, "local(2)")
    assert not hasattr(config, "sparse_mask") and model.config is config
