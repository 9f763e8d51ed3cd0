"""Small models of every architecture of transformers, with random weights, and inputs for them."""

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import cycle, islice
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

TOKENS, WORDS, SPECIAL, MOST = 24, 128, 96, 130_000_000
CLASSES = [  # in the order of preference
    f"MODEL_{kind}MAPPING_NAMES"
    for kind in (
        "FOR_SEQ_TO_SEQ_CAUSAL_LM_",
        "FOR_SPEECH_SEQ_2_SEQ_",
        "FOR_IMAGE_TEXT_TO_TEXT_",
        "FOR_CAUSAL_LM_",
        "",
    )
]
# What the value of a whole number becomes, by the name of the attribute; the first match counts.
BACKBONE = {  # in place of timm's
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 32, 64],
    "depths": [1] * 4, "layer_type": "basic", "out_features": [f"stage{i}" for i in (1, 2, 3, 4)],
}  # fmt: skip
SIZES: list[tuple[str, int | None]] = [
    (r"n_group$|num_group$|topk_group$", 1),
    (r"mamba_(n|num)_heads", 8),
    (r"rotary_dim", 8),
    (r"kernel|stride|channels|_size_ratio|merge_size|groups?$|n_codebooks|^seed$", None),
    (r"vocab_size", WORDS),
    (r"(kv|key_value)_heads|num_kv|index_n_heads", 2),
    (r"head_dim|d_head|^d_kv$|head_size|kv_channels", 16),
    (r"heads?(_per_layer)?$", 4),
    (r"experts_per_tok|top_k|moe_k$|topk_group|moe_topk", 2),
    (r"experts?(_num)?$|zero_expert", 4),
    (r"layers?(_per_stack)?$|^depth$|_depth$|num_blocks?$", 2),
    (r"max_.*positions?|max_.*length|max_.*embeddings|^n_positions$|^n_ctx$|^seq_len", 256),
    (r"topk_blocks|index_kpool", 2),
    (r"sliding_window|chunk_size|block_size|local_attention$|index_topk", 8),
    (r"rank$", 16),
    (r"image_size|img_size|^input_size$|window_size", 32),
    (r"patch_size", 8),
    (r"num_frames|frames_per_clip", 4),
    (r"hidden_size|d_model|n_embd|dim$|width|d_ff$|ffn|intermediate|inner|n_embed|hidden", 64),
    (r"embed|size$", 64),
]
# Changes for the architectures that the rules alone do not make.
CHANGES: dict[str, dict[str, Any]] = {
    "gemma4_text": {"num_kv_shared_layers": 2},
    "gemma3": {"mm_tokens_per_image": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8},
    "owlvit_text_model": {"max_position_embeddings": 32},
    "owlv2_text_model": {"max_position_embeddings": 32},
    "step3p5": {"sliding_window": 8},
    "yolos": {"image_size": [32, 48]},
    "mimi": {"upsample_groups": 64},
    "bamba": {"attn_layer_indices": [1]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "esm": {"vocab_size": WORDS},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
}  # fmt: skip


def small(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the arguments of a config of `cls` that makes a small model."""
    full = cls()
    values = {name: vars(full).get(name) for name in inspect.signature(cls).parameters}
    kinds = values.get("layer_types") or values.get("layers_block_type") or ()
    count = 2 * max(1, len(set(kinds)))
    layers = values.get("num_hidden_layers")
    changes: dict[str, Any] = {}
    special = iter(range(SPECIAL, WORDS))
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig) and value.model_type == "timm_backbone":
            changes[name] = BACKBONE
        elif isinstance(value, PreTrainedConfig):
            changes[name] = small(type(value)) | {"model_type": value.model_type}
        elif value is None and name in ("num_experts_per_tok", "head_dim"):
            changes[name] = 16 if name == "head_dim" else 2
        elif isinstance(value, bool) or value is None:
            continue
        elif re.search(r"_token_id$|_token_index$|_id$", name) and isinstance(value, int):
            changes[name] = min(value, 2) if value < 3 else next(special)
        elif name == "eos_token_id" and isinstance(value, list):
            changes[name] = 2
        elif "drop" in name and isinstance(value, float):
            changes[name] = 0.0
        elif name.startswith("rope_") and isinstance(value, dict) and value:
            changes[name] = _rope(value)
        elif isinstance(value, int):
            size = next((size for pattern, size in SIZES if re.search(pattern, name)), None)
            if size == 2 and value == layers:
                size = count
            if size is not None and value > size:
                changes[name] = size
        elif isinstance(value, list) and value and len(value) == layers:
            first = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
            chosen = list(islice(cycle(first), count)) if first else list(range(count))
            changes[name] = [value[i] for i in chosen]
    if changes.get("num_key_value_heads") and values["num_key_value_heads"] == values.get(
        "num_attention_heads"
    ):
        changes["num_key_value_heads"] = changes.get("num_attention_heads")
    return changes | CHANGES.get(cls.model_type, {})


def _rope(given: dict[str, Any]) -> dict[str, Any]:
    """Return parameters of rotary positions for heads of 16."""
    if any(isinstance(value, dict) for value in given.values()):
        return {k: _rope(v) if isinstance(v, dict) else v for k, v in given.items()}
    half = int(16 * given.get("partial_rotary_factor", 1.0)) // 2
    return given | {"mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}


def class_of(kind: str) -> type[PreTrainedModel]:
    """Return the class of a model type: the one that generates, where there is one."""
    for mapping in CLASSES:
        names = getattr(modeling_auto, mapping).get(kind)
        for name in [names] if isinstance(names, str) else names or ():
            if (cls := getattr(transformers, name, None)) is not None:
                return cls
    config = CONFIG_MAPPING[kind]
    module = import_module(config.__module__.replace("configuration_", "modeling_"))
    for cls in vars(module).values():
        if inspect.isclass(cls) and issubclass(cls, PreTrainedModel):
            if getattr(cls, "config_class", None) is config and "forward" in vars(cls):
                return cls
    raise LookupError(f"{kind} has no model")


def build(kind: str) -> PreTrainedModel:
    """Return a model with random weights that let attention matter; not too large a one."""
    cls, make = class_of(kind), CONFIG_MAPPING[kind]
    given = small(make)
    with torch.device("meta"):
        try:
            size = sum(p.numel() for p in cls(make(**given)).parameters())
        except (NotImplementedError, RuntimeError):  # something reads its weights
            size = 0
    if size > MOST:
        raise ValueError(f"it has {size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = cls._from_config(make(**given), dtype=torch.float32).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, max(1, parameter[0].numel()) ** -0.5)
    return model


def find(config: PreTrainedConfig, *names: str, default: Any = None) -> Any:
    """Return the first of `names` that the config has, or one of its parts."""
    for name in names:
        for part in parts(config):
            if vars(part).get(name) is not None:
                return vars(part)[name]
    return default


def parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield the config, and the configs in it."""
    yield config
    for name in config.sub_configs:
        if vars(config).get(name) is not None:
            yield from parts(getattr(config, name))


def words(*shape: int, most: int = SPECIAL) -> Tensor:
    """Return tokens that are none of the special ones."""
    return torch.randint(3, most, shape, generator=torch.Generator().manual_seed(1))


def noise(*shape: int) -> Tensor:
    """Return normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def inputs(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Yield sets of arguments that the model may take, the smallest set first."""
    config = model.config
    names = inspect.signature(model.forward).parameters
    side = find(config, "image_size", default=32)
    height, width = (side, side) if isinstance(side, int) else (tuple(side) * 2)[:2]
    channels = find(config, "num_channels", "in_channels", "in_chans", default=3)
    patch = find(config, "patch_size", default=8)
    frames = find(config, "num_frames", "frames_per_clip", default=4)
    mels = find(config, "num_mel_bins", "feature_size", "input_feat_per_channel", default=80)
    time = 2 * find(config, "max_source_positions", default=64)
    area = patch * patch if isinstance(patch, int) else 0
    volume = channels * area * find(config, "temporal_patch_size", default=1)
    most = min(SPECIAL, find(config, "vocab_size", default=SPECIAL))
    known = {
        "input_ids": lambda: words(2, TOKENS, most=most),
        "decoder_input_ids": lambda: words(2, TOKENS - 4),
        "pixel_values": lambda: noise(2, channels, height, width),
        "pixel_values_videos": lambda: noise(2, frames, channels, height, width),
        "input_values": lambda: noise(2, 8000),
        "input_features": lambda: noise(2, mels, time),
        "bbox": lambda: torch.zeros(2, TOKENS, 4, dtype=torch.long),
        "hidden_states": lambda: noise(16, volume),
        "grid_thw": lambda: torch.tensor([[1, 4, 4]]),
        "inputs_embeds": lambda: noise(2, TOKENS, 64),
        "query_embeds": lambda: noise(2, 8, 64),
        "input_features_mask": lambda: torch.ones(2, time, dtype=torch.long),
        "past_values": lambda: noise(
            2, find(config, "context_length"), find(config, "num_input_channels", default=1)
        ),
    }
    required = [
        name
        for name, p in names.items()
        if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD
    ]
    first = {*required, model.main_input_name}
    if config.is_encoder_decoder and "decoder_input_ids" in names:
        first.add("decoder_input_ids")
    if "bbox" in names:
        first.add("bbox")
    for chosen in (first, {*names} - {"inputs_embeds"}, {"inputs_embeds"}):
        found = {name: known[name]() for name in known if name in chosen and name in names}
        yield found
        if "pixel_values" in found:
            yield found | {"pixel_values": noise(2, frames, channels, height, width)}
        if "input_features" in found:
            yield found | {"input_features": noise(2, time, mels)}
        if "input_values" in found:
            yield found | {"input_values": noise(2, find(config, "max_length", default=8), mels)}
            yield found | {"input_values": noise(2, 1, 8000)}


def with_image(model: PreTrainedModel) -> dict[str, Tensor] | None:
    """Return tokens and an image among them, where the model can be asked for its features."""
    names = inspect.signature(model.forward).parameters
    image = find(model.config, "image_token_id", "image_token_index")
    if not hasattr(model, "get_image_features") or image is None or "pixel_values" not in names:
        return None
    (given,) = [g for g in islice(inputs(model), 1, 2)]
    extra = {"pixel_values": given["pixel_values"][:1]}
    if "image_grid_thw" in names:
        patch = find(model.config, "patch_size")
        volume = 3 * find(model.config, "temporal_patch_size", default=1) * patch**2
        extra = {
            "pixel_values": noise(16, volume),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
        }
    found = model.get_image_features(**extra)  # pyright: ignore
    found = found if isinstance(found, (Tensor, list, tuple)) else found.pooler_output
    count = sum(x.shape[:-1].numel() for x in ([found] if isinstance(found, Tensor) else found))
    tokens = words(1, TOKENS + count)
    tokens[:, 2 : 2 + count] = image
    types = (tokens == image).long()
    kinds = {name: types for name in ("token_type_ids", "mm_token_type_ids") if name in names}
    return {"input_ids": tokens} | extra | kinds
