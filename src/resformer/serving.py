"""`python -m resformer.serving MODEL` is `transformers serve MODEL` for resformer's checkpoints too.

The server can import no package by itself. Options are those of `transformers serve`.
"""

import sys


def main() -> None:
    """Runs the server with the command line's arguments."""
    from transformers.cli import transformers as command

    from resformer.registration import register_models

    register_models()  # before the server starts threads, which would not wait for each other's first configuration
    sys.argv = ["transformers", "serve", *sys.argv[1:]]
    command.main()


if __name__ == "__main__":
    main()
