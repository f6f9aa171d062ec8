"""`resformer trl sft|dpo|grpo|reward|... OPTIONS` runs TRL's training scripts on resformer's checkpoints.

TRL has no option that imports a package. `sft` trains with `SupervisedTrainer`, as `resformer finetune` does: the
model's own forward, our groups of parameters, and the cross-entropy of all labels in evaluations. With `--use_peft` the
connections are trained beside the adapter, unless `--lora_modules_to_save` names what is. Options are those of TRL's
scripts. The script runs in this process: for several devices, `accelerate launch -m resformer trl sft OPTIONS`.
"""

import runpy
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from pkgutil import iter_modules
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from resformer.environment import require
from resformer.modeling.connections import KINDS
from resformer.training.optimizer import is_connection


class FullPrecisionConnections(TrainerCallback):
    """Undoes the rounding of connections to bfloat16 by TRL's trainers, where a 4-bit or 8-bit model has an adapter.

    A coefficient near 1 moves by less in a step than bfloat16 can represent, and would never change.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        for name, wrapper in model.named_modules() if model is not None else ():
            parts = dict(wrapper.named_children())
            if not is_connection(name) or parts.keys() != {"original_module", "modules_to_save"}:  # of PEFT
                continue
            for trained in parts["modules_to_save"].children():
                for parameter, original in zip(
                    trained.parameters(), parts["original_module"].parameters(), strict=True
                ):
                    unchanged = parameter == original.to(parameter.dtype)
                    parameter.data = torch.where(unchanged, original, parameter.to(original.dtype)).detach()


def _with_connections(get_peft_config: Callable[[Any], Any], arguments: Any) -> Any:
    """The adapter that a script's arguments ask for, however they are written; it trains the connections by default."""
    if arguments.lora_modules_to_save is None:
        arguments.lora_modules_to_save = [kind.name for kind in KINDS]
    return get_peft_config(arguments)


def main() -> None:
    """Runs the script that the command line names with the rest of its arguments."""
    require("trl", "train")
    import trl
    from transformers import trainer
    from trl import scripts

    names = {name for _, name, _ in iter_modules(scripts.__path__) if not name.startswith("_")}
    parser = ArgumentParser("resformer trl", description="TRL's training scripts; COMMAND --help lists options.")
    parser.add_argument("command", choices=sorted(names - {"env", "utils", "vllm_serve"}))
    command = parser.parse_args(sys.argv[1:2]).command
    trainer.DEFAULT_CALLBACKS.append(FullPrecisionConnections)
    trl.get_peft_config = partial(_with_connections, trl.get_peft_config)
    if command == "sft":
        from resformer.training.chats import SupervisedTrainer

        trl.SFTTrainer = SupervisedTrainer
    sys.argv = [f"resformer trl {command}", *sys.argv[2:]]
    runpy.run_module(f"trl.scripts.{command}", run_name="__main__")


if __name__ == "__main__":
    main()
