"""What a run needs before its first step: tokens, a model, and the memory for both."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from experiments.common.devices import device_name
from experiments.lm.attention import resolve
from experiments.lm.model import LanguageModel
from experiments.lm.settings import Settings
from experiments.lm.tokens import Codec, Corpus, load_corpus, refuse_vocabulary
from experiments.lm.windows import NEXT, MaskedTokens, Objective, next_token, refuse_short
from experiments.training.device import lacks_memory
from experiments.training.distributed import Group


def read_corpus(settings: Settings, group: Group) -> Corpus:
    """The tokens of a run, checked. The first process makes them; the others wait."""
    if not group.leads:
        group.wait()
    corpus = load_corpus(
        settings.data, settings.tokenizer, settings.cache_dir,
        pattern=settings.pattern, most=settings.max_mib and settings.max_mib * 2**20,
    )  # fmt: skip
    if group.leads:
        group.wait()
    size = settings.vocab or settings.sizes.vocab
    if not corpus.vocab and not size:
        raise ValueError(f"data={settings.data} has ids without a tokenizer: give vocab=50257")
    if settings.vocab or not corpus.vocab:
        option = f"vocab={size}" if settings.vocab else f"of model={settings.model}"
        refuse_vocabulary(corpus, size, option)
    refuse_short(corpus.train, settings.context, 1, f"{corpus.name}, for training,")
    refuse_short(corpus.val, settings.context, 1, f"{corpus.name}, for validation,")
    if settings.val_tokens < settings.context:
        raise ValueError(
            f"val_tokens={settings.val_tokens}: give {settings.context} (context) or more"
        )
    return corpus


def make_model(settings: Settings, corpus: Corpus | Codec) -> tuple[LanguageModel, Objective]:
    """The model of a run with fresh weights, on the CPU, and its objective."""
    sizes = settings.sizes
    ids = corpus.vocab or settings.vocab or sizes.vocab
    masked = settings.objective != NEXT
    model = LanguageModel(
        sizes,
        ids + masked,  # and the id that stands for a hidden token
        settings.context,
        settings.provider,
        resolve(settings.mask, causal=not masked),
        dropout=settings.dropout,
        end=corpus.end if settings.packed else None,
        positions=settings.positions,
    )
    return model, MaskedTokens(settings.mask_share, ids) if masked else next_token


@contextmanager
def explained_memory(settings: Settings) -> Iterator[None]:
    """Turns a lack of memory into a ValueError with the remedy."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        size = settings.micro_batch or settings.batch
        remedy = f"give micro_batch={size // 2}" if size > 1 else "give a shorter context"
        raise ValueError(
            f"{size} windows of context={settings.context} at a time, with {settings.provider} "
            f"attention, are too much for the memory of {device_name(settings.device)}: {remedy}"
        ) from error
