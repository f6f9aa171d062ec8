"""Checkpoints of models that are not trained yet, which any training engine can start from."""

from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from resformer.configuration.connection_fields import ConnectionFields
from resformer.convert.connected_families import with_connections
from resformer.files import check_target, replacing
from resformer.training.data import INDEX, DataError, load_documents
from resformer.training.options import NewOptions
from resformer.training.sizes import known_fields, known_size, scratch_config
from resformer.training.tokenizers import load_tokenizer, make_tokenizer, save_tokenizer
from resformer.training.tokenizing import TOKENIZER


def new_checkpoint(options: NewOptions, *, weights: bool = True, dry_run: bool = False) -> Any:
    """Writes config.json, the tokenizer and, with `weights`, random weights in float32; all or nothing."""
    output = Path(options.output)
    inputs = options.sources + ([] if options.tokenizer is None else [options.tokenizer])
    check_target(output, *inputs, made_by="new", force=options.force)
    config, tokenizer = untrained(options, 0.0)
    if not dry_run:
        write_untrained(options, config, tokenizer, weights=weights)
    return config


def untrained(options: NewOptions, held_out: float) -> tuple[Any, PreTrainedTokenizerBase]:
    """The configuration and the tokenizer of a new checkpoint: by default that of the data, if they are tokens."""
    sources = options.sources
    tokenised = [Path(source) / TOKENIZER for source in sources if (Path(source) / INDEX).is_file()]
    size, _ = known_size(options.size, known_fields(options.backbone))
    name = options.tokenizer or str(tokenised[0] if tokenised else size.tokenizer)
    documents = load_documents(sources if name.startswith("bpe:") else (), **options.reading, streaming=True)
    tokenizer = make_tokenizer(name, documents, held_out)
    for folder in tokenised:
        if load_tokenizer(folder, None, "tokenise again").get_vocab() != tokenizer.get_vocab():
            raise DataError(f"{folder.parent}: has the tokens of another tokenizer than {name}; use {folder}.")
    config = scratch_config(options.method, options.size, tokenizer, options.block, options.backbone, **options.fields)
    tokenizer.model_max_length = config.max_position_embeddings
    return config, tokenizer


def write_untrained(
    options: NewOptions, config: Any, tokenizer: PreTrainedTokenizerBase, *, weights: bool = True
) -> None:
    """Writes what `untrained` has made."""
    with replacing(Path(options.output), made_by="new", force=options.force) as folder:
        if weights:
            untrained_model(config, options.seed).save_pretrained(folder)
        else:
            config.architectures, config.dtype = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__], torch.float32
            config.save_pretrained(folder)
        save_tokenizer(tokenizer, folder)


def untrained_model(config: Any, seed: int) -> PreTrainedModel:
    """A model with random weights, its connections at their from-scratch start.

    Tensors that the plain decoder also has start equal for all methods; a narrower one takes the leading part.
    """
    torch.manual_seed(seed)
    plain = with_connections(config) if isinstance(config, ConnectionFields) else config
    weights = AutoModelForCausalLM.from_config(plain).state_dict()
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            source = weights.get(name)
            if source is not None and all(n <= m for n, m in zip(parameter.shape, source.shape, strict=True)):
                parameter.copy_(source[tuple(map(slice, parameter.shape))])
    return model
