"""The files of a checkpoint, by name. Copying, bundling and pushing take these and no others: no code, no pickles."""

import re

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
#: Connections alone, as `save_connections` writes them.
CONNECTIONS = "connections.safetensors"
#: The model card.
CARD = "README.md"
#: The conversion record, in a converted checkpoint.
RECORD = "resformer_conversion.json"
#: In every output folder: the command that wrote it, and the size and first bytes of its files.
LISTING = ".resformer-files.json"
#: The only folders whose files are a part of a checkpoint.
FOLDERS = ("chat_templates", "additional_chat_templates", "runs")

#: The licence, and settings of what prepares images and sounds: training copies them.
BESIDE_TRAINED = re.compile(
    r"((video_)?pre)?processor_config\.json"
    r"|(?i:(LICEN[SC]E|NOTICE|COPYING|USE[_-]POLICY|ACCEPTABLE_USE)[\w-]*(\.(txt|md|rst|pdf))?)"
)
#: These, the tokenizer, chat templates and generation settings: every conversion copies them.
SIDE_FILES = re.compile(
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.json|vocab\.txt"
    r"|tokenizer\.[\d.]+\.json|bpe\.codes|dict\.txt|(source|target)\.spm|prophetnet\.tokenizer"
    r"|(emoji|vocab-src|vocab-tgt|target_vocab|entity_vocab|byte_maps|word_(shape|pronunciation)|normalizer)\.json"
    r"|merges\.txt|[\w.-]*\.model|[\w.-]*\.tiktoken|tekken\.json|chat_template\.(jinja|json)|generation_config\.json"
    r"|(chat_templates|additional_chat_templates)/[^/]+\.jinja"
    rf"|{BESIDE_TRAINED.pattern}"
)
#: Any of these makes a tokenizer.
TOKENIZERS = re.compile(r"tokenizer\.json|vocab\.(json|txt)|[\w.-]*\.(model|tiktoken)|tekken\.json")
TOKENIZER_CONFIG = "tokenizer_config.json"
#: Side files that hold settings, and so may name code.
SETTINGS = (
    *(TOKENIZER_CONFIG, "special_tokens_map.json", "generation_config.json", "chat_template.json"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
)
#: The card, the record, results, pictures and TensorBoard's files, which the Hub shows, describe these very weights:
#: bundles and pushes take them too.
DESCRIPTIONS = re.compile(
    rf"{re.escape(CARD)}|{re.escape(RECORD)}|(metrics|log|eval)\.json|[\w.-]+\.(png|jpe?g|gif|webp|svg)"
    r"|runs/events\.out\.tfevents\.[\w.-]+"
)
#: Transformers loads these beside, or instead of, the weights of a push, which deletes them.
LOADED_INSTEAD = re.compile(rf"model(-\d+-of-\d+)?\.safetensors|{re.escape(INDEX)}|adapter_config\.json")
#: Often links to a store that several folders share. Following them is safe: weights are checked tensor by tensor, and
#: only known keys of config.json are read.
OFTEN_LINKED = re.compile(rf".*\.safetensors|{re.escape(CONFIG)}|{re.escape(INDEX)}")


def standard_names(count: int) -> list[str]:
    """What Transformers calls `count` shards."""
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
