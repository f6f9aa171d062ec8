"""Registration with Transformers' Auto classes, delayed until it is needed.

The configuration is registered as soon as AutoConfig exists, and the models before the first configuration is made,
which is before any Auto class can ask for one. Nothing is imported that the user has not imported.
"""

import wrapt

__all__ = ["register_on_demand"]


def register_on_demand() -> None:
    """Arranges for both registrations, at once where AutoConfig has been imported already."""
    wrapt.register_post_import_hook(_register_configuration, "transformers.models.auto.configuration_auto")
    wrapt.register_post_import_hook(_register_models_before_first_use, "resformer.configuration")


def _register_configuration(configuration_auto: object) -> None:
    from resformer.configuration import ResFormerConfig

    configuration_auto.AutoConfig.register(ResFormerConfig.model_type, ResFormerConfig, exist_ok=True)  # type: ignore[attr-defined]


def _register_models_before_first_use(configuration: object) -> None:
    from resformer.configuration.configuration_resformer import before_first_use

    before_first_use.append(_register_models)


def _register_models() -> None:
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
