"""Registration with Transformers' Auto classes and PEFT, when these are imported and not before.

`import resformer` imports nothing that the user has not imported. The configuration is registered as soon as AutoConfig
exists. The model classes register themselves when `resformer.modeling` is imported, which the first configuration does.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


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
    from resformer.configuration import ResFormerConfig

    configuration_auto.AutoConfig.register(ResFormerConfig.model_type, ResFormerConfig, exist_ok=True)


def _register_adapter_targets(constants: ModuleType) -> None:
    """PEFT's default target modules, for each kind of adapter, are those of Llama."""
    for mapping in vars(constants).values():
        if isinstance(mapping, dict) and "llama" in mapping:
            mapping.setdefault("resformer", mapping["llama"])


#: Module -> what is called with it after its import.
_REGISTRATIONS = {
    "transformers.models.auto.configuration_auto": _register_configuration,
    "peft.utils.constants": _register_adapter_targets,
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
