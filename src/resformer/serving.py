"""`resformer serve MODEL` is `transformers serve MODEL` for resformer's checkpoints too.

The server can import no package by itself. Options are those of `transformers serve`.
"""

import sys

from resformer.errors import CheckpointError, one_line


def check_model(name: str) -> None:
    """Refuses a folder or Hub id, also `ID@REVISION`, without a config.json: the server would end in a traceback."""
    from transformers import PreTrainedConfig

    model, _, revision = name.partition("@")
    try:
        PreTrainedConfig.get_config_dict(model, revision=revision or None)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{model}: cannot be loaded: {one_line(error)}") from error


def main() -> None:
    """Runs the server with the command line's arguments."""
    from transformers.cli import transformers as command
    from transformers.cli.serving import model_manager

    from resformer.registration import register_models

    register_models()  # before the server starts threads, which would not wait for each other's first configuration
    # It looks up classes in an older object of the module, which lacks those that are made on demand.
    model_manager.transformers = sys.modules["transformers"]
    sys.argv = ["transformers", "serve", *sys.argv[1:]]
    command.app(prog_name="transformers")


if __name__ == "__main__":
    main()
