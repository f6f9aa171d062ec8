"""`python -m resformer.serving MODEL` is `transformers serve MODEL` for resformer's checkpoints too.

The server looks a checkpoint's class up by name in the `transformers` module, so `main` adds resformer's classes there.
Options are those of `transformers serve`.
"""

import sys

__all__ = ["main"]


def main() -> None:
    """Puts resformer's model classes where the server looks, and runs it with the command line's arguments."""
    import transformers
    from transformers.cli import transformers as command

    from resformer import modeling

    for name in modeling.__all__:
        if name.startswith("ResFormer"):
            setattr(transformers, name, getattr(modeling, name))
    sys.argv = ["transformers", "serve", *sys.argv[1:]]
    command.main()


if __name__ == "__main__":
    main()
