"""Adapters of a frozen checkpoint: connections, LoRA, or both. Question c of benchmarks/study.md (2026-11-26).

    python benchmarks/adapters.py adapters

Each finished run is a line of OUTPUT/runs.jsonl, and is not trained again, also where the file comes from another
machine; one that was stopped goes on from its last checkpoint. The default model is the demo's, SmolLM2-135M-Instruct.
"""

import argparse
import ast
import json
import shlex
import shutil
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peft import LoraConfig, inject_adapter_in_model
from transformers import TrainerCallback

from resformer import retrofit
from resformer.environment import describe_environment
from resformer.training.data import STANDARD_HELD_OUT, is_held_out, standard_library
from resformer.training.optimizer import is_connection
from resformer.training.options import BEGUN, FinetuneOptions, refuse_other, unfinished_of
from resformer.training.packing import PackedBlocks
from resformer.training.recipe import build_trainer, finetune_checkpoint
from resformer.training.study.report import add_line, read_record

METHOD, LORA, LONGER = "resformer-gated", "LoRA", "LoRA of equal time"
BOTH = f"{METHOD} and LoRA"
#: 46,080 parameters of SmolLM2: of all ranks and modules the nearest to the 50,141 of METHOD.
RANK = {"r": 2, "lora_alpha": 4, "target_modules": ["v_proj"]}
#: Of the choice of rates, and of the runs that are reported.
RATES, CHOOSING, SEEDS = (1e-3, 3e-3, 1e-2), (200, 24), ((0, 1), 48)
BLOCK, BATCH = 512, (2, 2)  # sequences a pass, passes a step
HELD_OUT = 64  # blocks, on which each run is evaluated at its end


class Clock(TrainerCallback):
    """CPU seconds of the steps of this process: the wall's are those of its neighbours too."""

    def __init__(self) -> None:
        self.seconds, self.steps = 0.0, 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds, self.steps = self.seconds + time.process_time() - self.begun, self.steps + 1


class AddLora(TrainerCallback):
    """Adds LoRA to the model of a trainer, and trains it and the connections alone."""

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        inject_adapter_in_model(LoraConfig(**RANK), model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name or is_connection(name))


def write_questions(folder: Path) -> dict[str, int]:
    """Chats about the standard library's functions, whose answers are their docstrings; returns how many.

    `train.jsonl` has those of the modules that are trained on, `held_out.jsonl` the others.
    """
    chats: dict[str, list[str]] = {"train": [], "held_out": []}
    for row in standard_library():
        part = chats["held_out" if is_held_out(row["group"], STANDARD_HELD_OUT) else "train"]
        for node in ast.walk(ast.parse(row["text"])):
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
            if function and (answer := ast.get_docstring(node)):
                module, arguments = row["group"].removesuffix(".py"), ast.unparse(node.args)
                question = f"What does {node.name}({arguments}) of Python's {module} do?"
                messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                part.append(json.dumps({"messages": messages}) + "\n")
    for name, lines in chats.items():
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {name: len(lines) for name, lines in chats.items()}


class Study:
    """The runs of an output, trained where its record has none."""

    def __init__(self, output: Path, model: str):
        output.mkdir(parents=True, exist_ok=True)
        self.model, self.connected, self.record = model, str(output / METHOD), output / "runs.jsonl"
        self.common: dict[str, Any] = dict(zip(("batch", "accumulate"), BATCH, strict=True))
        self.common |= {"output": str(output / "run"), "data": [str(output / "train.jsonl")], "block": BLOCK}
        self.common |= {"held_out_data": [str(output / "held_out.jsonl")], "held_out_blocks": 8, "truncate": True}
        self.common |= {"trainer": {"eval_steps": 0.25, "save_steps": 0.25}}
        plan = {"checkpoint": Path(model).name, "questions": write_questions(output), "method": METHOD, "lora": RANK}
        trainer, _ = build_trainer(FinetuneOptions(model=model, steps=1, **self.common))
        plan |= {"training_tokens": trainer.blocks.train.one_pass * BLOCK, "sha256": trainer.blocks.digest}
        plan |= {"block": BLOCK, "batch": BATCH[0] * BATCH[1], "bf16": trainer.args.bf16}
        if not Path(self.connected).is_dir():  # as where the record comes from another machine
            retrofit(model, self.connected, METHOD)
        if self.record.is_file():
            return refuse_other(output, read_record(self.record)[0][0], plan, "study")
        command = shlex.join(["python", "benchmarks/adapters.py", *sys.argv[1:]])
        add_line(self.record, {"study": {"command": command, **plan}})
        self._add({"arm": "checkpoint", "trained": 0, **evaluated(trainer)})

    def run(self, arm: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
        """What the record has of a run."""
        key = {"arm": arm, "rate": rate, "seed": seed, "steps": steps}
        if finished := [run for run in read_record(self.record)[0][1] if run.items() >= key.items()]:
            return finished[0]
        options = FinetuneOptions(
            model=self.connected if arm in (METHOD, BOTH) else self.model,
            train="connections" if arm == METHOD else "all",  # of which AddLora freezes the base
            learning_rate=rate,
            connection_learning_rate=rate,
            seed=seed,
            steps=steps,
            resume=(unfinished_of(self.common["output"]) / BEGUN).is_file(),
            force=True,
            **self.common,
        )
        clock = Clock()
        added = [clock] if arm == METHOD else [clock, AddLora()]
        report = finetune_checkpoint(options, finish=lambda trainer: key.update(evaluated(trainer)), callbacks=added)
        key |= {"trained": report.trained_parameters, "peak_memory": report.peak_memory}
        key["curve"] = [asdict(each) for each in report.evaluations]
        self._add(key | {"step_seconds": clock.seconds / clock.steps if clock.steps else None})
        shutil.rmtree(options.output)
        return self.run(arm, rate, seed, steps)

    def _add(self, run: dict[str, Any]) -> None:
        environment = {name: each for name, each in describe_environment().items() if name != "variables"}
        add_line(self.record, {**run, "environment": environment})


def evaluated(trainer: Any) -> dict[str, Any]:
    """The loss of `HELD_OUT` blocks, at an even stride over the held-out text."""
    own = trainer.blocks.held_out
    blocks = PackedBlocks(own.tokens, own.starts, BLOCK, most=HELD_OUT, separate=own.separate, masked=own.masked)
    return {
        "loss": trainer.predict(blocks).metrics["test_loss"],
        "held_out_tokens": round(trainer.labels_of_evaluation),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", help="The folder of another checkpoint.")
    arguments = parser.parse_args()
    if arguments.model is None:
        sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
        from demo import smollm2

        arguments.model = smollm2()
    study, (seeds, steps) = Study(arguments.output, arguments.model), SEEDS
    tried = {arm: [study.run(arm, rate, *CHOOSING) for rate in RATES] for arm in (METHOD, BOTH, LORA)}
    rates = {arm: min(runs, key=lambda run: run["loss"])["rate"] for arm, runs in tried.items()}
    seconds = {
        arm: statistics.median(filter(None, (run["step_seconds"] for run in runs))) for arm, runs in tried.items()
    }
    for seed in seeds:
        for arm, rate in rates.items():
            study.run(arm, rate, seed, steps)
        study.run(LONGER, rates[LORA], seed, round(steps * seconds[BOTH] / seconds[LORA]))


if __name__ == "__main__":
    main()
