"""Small transformers of diffusers with random weights; its own dense backend is the reference."""

import os
from importlib import import_module
from typing import Any

import pytest
import torch

import masks
from sparseflash import attention, select
from tests.sparseflash.integrations.test_vit import assert_same

os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
dispatch: Any = None
transformers: Any = None
use: Any = None


@pytest.fixture(autouse=True, scope="module")
def libraries():
    """Import diffusers in the process that runs these tests: every one collects them."""
    pytest.importorskip("diffusers", minversion="0.42")
    globals().update(
        dispatch=import_module("diffusers.models.attention_dispatch"),
        transformers=import_module("diffusers.models.transformers"),
        use=import_module("sparseflash.integrations.diffusers").use,
    )


CANVAS, TEXT = (4, 4, 6), 7  # latent tokens: frames, height, width
LATENTS = 96
NEAR = f"neighborhood({CANVAS}, (3, 3, 3))"
TILES = f"sliding_tiles({CANVAS}, (2, 2, 2), (1, 2, 2))"
TILED = masks.tiled(CANVAS, (2, 2, 2))


def wan():
    """Self-attention among the latents, cross-attention to the text."""
    model = transformers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=24, in_channels=4,
        out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    video, text = torch.randn(2, 4, 4, 8, 12), torch.randn(2, TEXT, 16)
    return model, lambda: model(video, torch.tensor([3, 5]), text).sample


def hunyuan():
    """One sequence, the text after the latents and padded."""
    model = transformers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=2, patch_size_t=1, text_embed_dim=16,
        pooled_projection_dim=8, rope_axes_dim=(4, 4, 4), guidance_embeds=False,
    )  # fmt: skip
    video, text, pooled = torch.randn(2, 4, 4, 8, 12), torch.randn(2, TEXT, 16), torch.randn(2, 8)
    real = torch.tensor([[1] * TEXT, [1] * 4 + [0] * 3])
    return model, lambda: model(video, torch.tensor([3, 5]), text, real, pooled).sample


def flux():
    """One sequence, the text before the latents."""
    model = transformers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=12,
        num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 4),
    )  # fmt: skip
    places = torch.zeros(TEXT + LATENTS, 3)
    places[TEXT:] = torch.cartesian_prod(*[torch.arange(extent) for extent in CANVAS])
    given = dict(
        hidden_states=torch.randn(2, LATENTS, 4), encoder_hidden_states=torch.randn(2, TEXT, 16),
        pooled_projections=torch.randn(2, 8), timestep=torch.tensor([0.3, 0.5]),
        txt_ids=places[:TEXT], img_ids=places[TEXT:],
    )  # fmt: skip
    return model, lambda: model(**given).sample


def ltx():
    """Self-attention and cross-attention of one class, without a flag."""
    model = transformers.LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
        cross_attention_dim=32, caption_channels=16,
    )  # fmt: skip
    given = torch.randn(2, LATENTS, 4), torch.randn(2, TEXT, 16), torch.tensor([3.0, 5.0])
    size = dict(zip(("num_frames", "height", "width"), CANVAS, strict=True))
    return model, lambda: model(*given, torch.ones(2, TEXT), **size).sample


def kandinsky():
    """Attention of the text alone before that of the latents."""
    model = transformers.Kandinsky5Transformer3DModel(
        in_visual_dim=4, in_text_dim=16, in_text_dim2=16, time_dim=32, out_visual_dim=4, ff_dim=32,
        model_dim=32, num_text_blocks=1, num_visual_blocks=2, axes_dims=(4, 4, 8),
    )  # fmt: skip
    for parameter in model.parameters():  # some gates are 0
        torch.nn.init.normal_(parameter, std=0.1)
    places = tuple(torch.arange(extent) for extent in CANVAS)
    given = torch.randn(1, 4, 8, 12, 4), torch.randn(1, TEXT, 16), torch.tensor([3.0])
    given = *given, torch.randn(1, 16), places, torch.arange(TEXT)
    return model, lambda: model(*given).sample


MODELS = {wan: {}, hunyuan: {"latents": LATENTS}, flux: {"latents": LATENTS, "text_first": True}}
EVERY = pytest.mark.parametrize("make", MODELS)


@pytest.fixture
def natively(monkeypatch):
    """Like `use`: lets diffusers' own backend see the pairs of masks in its self-attention."""
    registry, native = dispatch._AttentionBackendRegistry, dispatch.AttentionBackendName.NATIVE
    own = registry._backends[native]

    def use_pairs(model, *layers, after=0):
        left = [torch.from_numpy(masks.parse(m).build(LATENTS).to_dense()[0, 0]) for m in layers]

        def attend(query, key, value, attn_mask=None, **given):
            n = query.shape[1]
            if n == key.shape[1] and n >= LATENTS:
                allowed = torch.ones(n, n, dtype=torch.bool)
                allowed[after : after + LATENTS, after : after + LATENTS] = left[0]
                attn_mask = allowed if attn_mask is None else allowed & attn_mask
                left.append(left.pop(0))
            return own(query, key, value, attn_mask=attn_mask, **given)

        monkeypatch.setitem(registry._backends, native, attend)
        model.reset_attention_backend()
        return model

    return use_pairs


def results(model, call):
    model.zero_grad()
    out = call()
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def made(make):
    torch.manual_seed(0)
    return make()


@EVERY
def test_dense(make):
    model, call = made(make)
    expected = results(model, call)
    assert_same(results(use(model), call), expected)


@pytest.mark.parametrize("mask, order", [(NEAR, None), (TILES, TILED)])
@EVERY
def test_masks_of_videos(make, mask, order, natively):
    model, call = made(make)
    found = results(use(model, mask, order=order, **MODELS[make]), call)
    after = TEXT if make is flux else 0
    assert_same(found, results(natively(model, mask, after=after), call))


@EVERY
def test_a_selector_that_takes_all_it_may_is_the_mask_it_is_within(make, natively):
    model, call = made(make)
    text = 0 if make is wan else TEXT
    within = masks.parse(TILES) >> TILED >> masks.shift(text)
    chosen = select.top_k(1.0, block_size=16, within=within)
    found = results(use(model, chosen, order=TILED, **MODELS[make]), call)
    assert_same(found, results(natively(model, TILES, after=text if make is flux else 0), call))


def test_a_selector_chooses_by_the_queries_and_keys_of_a_call():
    selector = select.top_k(2, block_size=16)
    model, _ = made(wan)
    backend = use(model, selector, order=TILED).blocks[0].attn1.processor._attention_backend
    order, inverse = map(torch.tensor, (TILED.order(LATENTS), TILED.inverse(LATENTS)))
    for q, k, v in torch.randn(2, 3, 2, LATENTS, 2, 16):
        tiles = [x[:, order].transpose(1, 2) for x in (q, k, v)]
        expected = attention(*tiles, selector(*tiles[:2])).transpose(1, 2)[:, inverse]
        found = dispatch.dispatch_attention_fn(q, k, v, backend=backend)
        torch.testing.assert_close(found, expected)


def test_generation_with_another_mask_after_some_steps(natively):
    scheduler = import_module("diffusers").FlowMatchEulerDiscreteScheduler
    model, _ = made(wan)
    noise, text = torch.randn(1, 4, 4, 8, 12), torch.randn(1, TEXT, 16)

    def denoise(switch):
        steps, x = scheduler(), noise
        steps.set_timesteps(3)
        with torch.inference_mode():
            for number, t in enumerate(steps.timesteps):
                switch(number)
                x = steps.step(model(x, t[None], text).sample, t, x).prev_sample
        return x.clone()

    dense = denoise(lambda number: None)
    torch.testing.assert_close(denoise(lambda number: use(model)), dense)
    order = masks.tiled(CANVAS, (4, 2, 3))  # of no other test
    found = denoise(lambda number: use(model, NEAR if number else None, order=order))
    assert (found - dense).abs().max() > 1e-3
    model(noise, torch.tensor([3]), text).sample.sum().backward()  # after inference
    model.reset_attention_backend()
    expected = denoise(lambda number: natively(model, NEAR) if number == 1 else None)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("make", [wan, ltx, kandinsky, "wan with one processor"])
def test_a_mask_for_each_layer(make, natively):
    model, call = made(wan if isinstance(make, str) else make)
    if isinstance(make, str):
        model.set_attn_processor(type(model.blocks[0].attn1.processor)())
    dense = call()
    found = results(use(model, f"layers({NEAR}, {TILES})"), call)
    assert not torch.allclose(found[0], dense, rtol=1e-3, atol=1e-4)
    assert_same(found, results(natively(model, NEAR, TILES), call))


def test_layers_that_say_so_are_cross_attention_at_any_length():
    model, _ = made(wan)
    video, text = torch.randn(1, 4, 4, 8, 12), torch.randn(1, LATENTS, 16)
    use(model, NEAR)
    found = model(video, torch.tensor([3]), text).sample
    for layer in model.blocks:
        layer.attn2.processor._attention_backend = None
    torch.testing.assert_close(found, model(video, torch.tensor([3]), text).sample)


def test_models_keep_masks_of_their_own_apart():
    (first, call), (second, _) = made(wan), made(wan)
    expected = results(use(first, NEAR), call)[0]
    use(second, TILES)
    torch.testing.assert_close(results(first, call)[0], expected)
    same = [select.top_k(2) for _ in range(2)]  # with the same text
    backends = [use(first, x).blocks[0].attn1.processor._attention_backend for x in same]
    assert backends[0] != backends[1]


def test_causality_padding_and_dropout_of_a_call():
    model, _ = made(wan)
    backend = use(model).blocks[0].attn1.processor._attention_backend
    q, k, v = torch.randn(3, 2, 20, 4, 8).unbind()
    run = dispatch.dispatch_attention_fn
    for given in (
        {"is_causal": True},
        {"scale": 0.7},
        {"attn_mask": torch.arange(20) < torch.tensor([[20], [9]])},
        {"attn_mask": (torch.arange(20) % 3 > 0).expand(2, 1, 1, 20)},
        {"attn_mask": (torch.arange(20) > 8).expand(2, 1, 1, 20) * -10_000.0},
        {"attn_mask": torch.rand(2, 4, 20, 20) > 0.5},
    ):
        expected = given
        if given.get("attn_mask") is not None and given["attn_mask"].ndim == 2:
            expected = {"attn_mask": given["attn_mask"][:, None, None]}
        torch.testing.assert_close(run(q, k, v, **given, backend=backend), run(q, k, v, **expected))
    grouped = run(q, k[:, :, :2], v[:, :, :2], enable_gqa=True, backend=backend)
    torch.testing.assert_close(grouped, run(q, k[:, :, :2], v[:, :, :2], enable_gqa=True))
    dropped = run(q, k, v, dropout_p=0.5, backend=backend)
    assert (dropped - run(q, k, v)).abs().max() > 0.1
    with pytest.raises(ValueError, match="attention_mask is a bias"):
        run(q, k, v, attn_mask=torch.randn(20, 20)[None, None], backend=backend)
    with pytest.raises(ValueError, match="context parallel"):
        run(q, k, v, backend=backend, parallel_config=object())


def test_what_does_not_fit_is_refused():
    model, call = made(wan)
    with pytest.raises(ValueError, match="latents is 100, and there are 96 tokens"):
        results(use(model, NEAR, latents=100), call)
    with pytest.raises(ValueError, match="mask is a BlockMask; pass the Mask"):
        use(made(wan)[0], masks.causal().build(96))
    with pytest.raises(ValueError, match="no layer that goes through"):
        use(torch.nn.Linear(3, 3), NEAR)
    linear = transformers.SanaVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=1,
        num_cross_attention_heads=2, cross_attention_head_dim=12, cross_attention_dim=24,
    )  # fmt: skip
    with pytest.raises(ValueError, match="no layer of self-attention that goes through"):
        use(linear, NEAR)
    model = transformers.PRXTransformer2DModel(
        in_channels=4, context_in_dim=16, hidden_size=32, num_heads=2, depth=1, axes_dim=[8, 8]
    )
    given = torch.randn(1, 4, 16, 24), torch.tensor([0.5]), torch.randn(1, TEXT, 16)
    use(model)(*given)
    with pytest.raises(ValueError, match=r"does not attend by the mask local\(3\)"):
        use(model, "local(3)")(*given)  # its keys are those of the text, too
