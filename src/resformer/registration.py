"""Registration with Transformers' Auto classes, delayed until it is needed.

The configuration is registered as soon as AutoConfig exists, and the models before the first configuration is made,
which is before any Auto class can ask for one. Nothing is imported that the user has not imported.
"""

from types import ModuleType

import wrapt

__all__ = ["register_models", "register_on_demand"]


def register_on_demand() -> None:
    """Arranges for all registrations, at once where AutoConfig has been imported already."""
    wrapt.register_post_import_hook(_register_configuration, "transformers.models.auto.configuration_auto")
    wrapt.register_post_import_hook(_register_models_before_first_use, "resformer.configuration")
    wrapt.register_post_import_hook(_register_adapter_targets, "peft.utils.constants")


def _register_configuration(configuration_auto: object) -> None:
    from resformer.configuration import ResFormerConfig

    configuration_auto.AutoConfig.register(ResFormerConfig.model_type, ResFormerConfig, exist_ok=True)  # type: ignore[attr-defined]


def _register_models_before_first_use(configuration: object) -> None:
    from resformer.configuration.configuration_resformer import before_first_use

    before_first_use.append(register_models)


def _register_adapter_targets(constants: ModuleType) -> None:
    """PEFT's default target modules, for each kind of adapter, are those of Llama."""
    for mapping in vars(constants).values():
        if isinstance(mapping, dict) and "llama" in mapping:
            mapping.setdefault("resformer", mapping["llama"])


def register_models() -> None:
    """Registers the model classes. vLLM calls it, as a plugin, in every process that it starts."""
    import transformers

    from resformer import modeling
    from resformer.configuration import ResFormerConfig

    for auto_class, model_class in {
        transformers.AutoModel: modeling.ResFormerModel,
        transformers.AutoModelForCausalLM: modeling.ResFormerForCausalLM,
        transformers.AutoModelForSequenceClassification: modeling.ResFormerForSequenceClassification,
        transformers.AutoModelForTokenClassification: modeling.ResFormerForTokenClassification,
        transformers.AutoModelForQuestionAnswering: modeling.ResFormerForQuestionAnswering,
    }.items():
        auto_class.register(ResFormerConfig, model_class, exist_ok=True)
        # TRL, vLLM and `transformers serve` look the name in config.json's `architectures` up here.
        setattr(transformers, model_class.__name__, model_class)
