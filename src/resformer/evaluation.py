"""`resformer eval CHECKPOINT --tasks NAMES OPTIONS` runs lm-evaluation-harness with resformer imported.

The harness has no option that imports a package. Options are those of its `lm_eval run`; for several processes,
`accelerate launch -m resformer.evaluation run OPTIONS`.
"""

import json
import os
import sys

from resformer.environment import require
from resformer.loading import check_source


def main() -> None:
    """`lm_eval` with the command line's arguments, results on stdout."""
    # The harness's bootstrap would fork this process: locks that other threads hold stay locked in the child.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    require("lm_eval", "eval")
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


def evaluate(checkpoint: str, options: list[str]) -> None:
    """Runs `lm_eval run`; only safetensors are read, and no code of the checkpoint is run."""
    require("lm_eval", "eval")
    if "--model" not in options:
        check_source(checkpoint)
        path = os.path.abspath(checkpoint) if os.path.isdir(checkpoint) else checkpoint  # else looked up on the Hub
        arguments = json.dumps({"pretrained": path, "use_safetensors": True})  # names may have commas
        options = ["--model", "hf", "--model_args", arguments, *options]
    sys.argv = ["resformer eval", "run", *options]
    main()


if __name__ == "__main__":
    main()
