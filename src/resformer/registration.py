"""Registration with Transformers' Auto classes and PEFT, when these are imported and not before.

`import resformer` imports nothing that the user has not imported. The configuration is registered as soon as AutoConfig
exists. The model classes register themselves when `resformer.modeling` is imported, which the first configuration
leads to.
"""

import importlib.util
import sys
import warnings
from collections.abc import Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def register_on_demand() -> None:
    """Arranges for all registrations, at once where the modules have been imported already."""
    for name, register in _REGISTRATIONS.items():
        if name in sys.modules:
            register(sys.modules[name])
        else:
            sys.meta_path.insert(0, _AfterImport(name))


def register_models() -> None:
    """Registers the model classes. vLLM calls it, as a plugin, in every process that it starts."""
    import resformer.modeling  # noqa: F401


def _register_configuration(configuration_auto: ModuleType) -> None:
    mapping = configuration_auto.CONFIG_MAPPING
    ours = ("resformer", "nanochat_2026")
    others = {  # this package may have been imported before
        model_type: each
        for model_type, each in dict.items(mapping._extra_content)
        if model_type not in ours and not model_type.startswith("resformer_")
    }
    mapping._extra_content = _OnDemand(others | dict.fromkeys(ours))


class _OnDemand(dict[str, Any]):
    """Model type -> configuration class, ours and those of families with connections, made when they are asked for:
    Llama's, which ours is a subclass of, cannot be imported while the Auto classes are."""

    def __contains__(self, model_type: object) -> bool:
        return super().__contains__(model_type) or (
            isinstance(model_type, str)
            and model_type.startswith("resformer_")
            and model_type.removeprefix("resformer_") in _configuration_mapping()
        )

    def __getitem__(self, model_type: str) -> Any:
        found = super().get(model_type)
        if found is None and model_type == "nanochat_2026":
            from resformer.modeling import Nanochat2026Config as found
        elif found is None:
            from resformer.modeling.families import config_class

            family = "llama" if model_type == "resformer" else model_type.removeprefix("resformer_")
            found = self[model_type] = config_class(_configuration_mapping()[family])
        return found

    def values(self) -> Any:
        return [self[model_type] for model_type in self]

    def items(self) -> Any:
        return [(model_type, self[model_type]) for model_type in self]


def _configuration_mapping() -> Any:
    return sys.modules["transformers.models.auto.configuration_auto"].CONFIG_MAPPING


def _register_models_with_configurations(configuration: ModuleType) -> None:
    configuration.ResFormerConfig.on_new = staticmethod(register_models)


def _register_response_templates(serving: ModuleType) -> None:
    """`transformers serve` reads tool calls and reasoning out of a reply by the model's type."""
    templates = getattr(serving, "_RESPONSE_TEMPLATE_FALLBACKS", {})
    for types in [*templates]:
        templates[(*types, *(f"resformer_{each}" for each in types))] = templates.pop(types)


def _register_adapter_targets(constants: ModuleType) -> None:
    """What PEFT knows of a model type, its default target modules and which weights are fused experts, is known of it
    with connections; our own decoder has Llama's."""
    for mapping in vars(constants).values():
        if isinstance(mapping, dict) and not {"llama", "mixtral"}.isdisjoint(mapping):
            mapping |= {f"resformer_{model_type}": known for model_type, known in mapping.items()}
            if "llama" in mapping:
                mapping.setdefault("resformer", mapping["llama"])


def _register_frozen_connections(peft_model: ModuleType) -> None:
    """An adapter says so whose training leaves connections out, or whose model lacks those that it has."""
    begin = peft_model.PeftModel.__init__

    @wraps(begin)
    def init(self: Any, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        if "resformer.modeling" not in sys.modules or not trained:  # else none has connections, or nothing is trained
            return
        from resformer.modeling.connecting import connection_modules

        learned = dict.fromkeys(connection_modules(self), False)
        for name in trained:
            learned |= {kind: True for kind in learned if f".{kind}." in name and "lora_" not in name}
        if frozen := [kind for kind, is_learned in learned.items() if not is_learned]:
            warnings.warn(
                f"The adapter does not train the connections: modules_to_save={frozen} in its configuration does.",
                stacklevel=2,
            )

    peft_model.PeftModel.__init__ = init
    _tell_of_lacking_connections(peft_model.PeftModel)


def _tell_of_lacking_connections(model_class: Any) -> None:
    load = model_class.load_adapter

    @wraps(load)
    def load_adapter(self: Any, *given: Any, **named: Any) -> Any:
        result = load(self, *given, **named)
        if unexpected := getattr(result, "unexpected_keys", None):  # of modules that the model lacks
            from resformer.modeling.connections import KINDS

            parts = {part for key in unexpected for part in key.split(".")}
            if lacking := [kind.name for kind in KINDS if kind.name in parts]:
                warnings.warn(
                    f"The adapter has connections that the model lacks, and they are left out: {lacking}. First "
                    "`resformer.connect` the model, or load the one that the adapter was trained with.",
                    stacklevel=2,
                )
        return result

    model_class.load_adapter = load_adapter


#: Module -> what is called with it after its import.
_REGISTRATIONS = {
    "resformer.configuration.configuration_resformer": _register_models_with_configurations,
    "transformers.models.auto.configuration_auto": _register_configuration,
    "transformers.cli.serving.utils": _register_response_templates,
    "peft.utils.constants": _register_adapter_targets,
    "peft.utils.transformers_weight_conversion": _register_adapter_targets,
    "peft.peft_model": _register_frozen_connections,
    "transformers.integrations.peft": lambda module: _tell_of_lacking_connections(module.PeftAdapterMixin),
}


class _AfterImport(MetaPathFinder):
    """Finds one module as the other finders do, and registers after it has been executed."""

    def __init__(self, module: str):
        self.module = module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _REGISTRATIONS[fullname](module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
