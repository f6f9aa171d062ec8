"""Fine-tuning with the stock Trainer, measured."""

import math
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from types import TracebackType

import psutil
import torch
from datasets import Dataset
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments, default_data_collator

from resformer.training.optimizer import parameter_groups

__all__ = ["FinetuneResult", "PeakMemory", "finetune", "processor_has_bf16"]


@dataclass(frozen=True)
class FinetuneResult:
    """One run."""

    name: str
    perplexity_before: float  # per token, on the held-out blocks
    perplexity_after: float
    steps: int
    training_tokens: int
    seconds: float  # of training, evaluation left out
    peak_memory: int  # bytes: resident in all while training, or allocated on the accelerator


class PeakMemory:
    """The largest memory in use within a `with` block, in bytes: resident, or on the accelerator if there is one."""

    def __init__(self, interval: float = 0.05):
        self.peak = 0
        self._interval = interval
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "PeakMemory":
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        else:
            self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if torch.cuda.is_available():
            self.peak = torch.cuda.max_memory_allocated()
        else:
            self._done.set()
            self._sampler.join()

    def _sample(self) -> None:
        process = psutil.Process()
        while True:
            self.peak = max(self.peak, process.memory_info().rss)
            if self._done.wait(self._interval):
                return


def processor_has_bf16() -> bool:
    """Whether bfloat16 matrix products are in hardware, on the accelerator or else on the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))


def finetune(
    model: PreTrainedModel,
    train: Dataset,
    evaluation: Dataset,
    *,
    name: str,
    steps: int,
    batch: int,
    learning_rate: float = 5e-5,
    connection_learning_rate: float = 3e-4,
    seed: int = 0,
) -> FinetuneResult:
    """Trains `model` in place for `steps` steps and measures its held-out perplexity before and after.

    AdamW at a constant rate after a short warm-up, gradients clipped at 1, under bf16 autocast where the processor has
    it. The order of the data depends on `seed` alone, so two models see the same batches.
    """
    groups = parameter_groups(
        model, learning_rate=learning_rate, connection_learning_rate=connection_learning_rate, weight_decay=0.1
    )
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            max_steps=steps,
            per_device_train_batch_size=batch,
            per_device_eval_batch_size=batch,
            learning_rate=learning_rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=max(1, steps // 10),
            use_cpu=not torch.accelerator.is_available(),
            bf16=processor_has_bf16(),
            prediction_loss_only=True,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=not sys.stderr.isatty(),
            seed=seed,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=train,
            eval_dataset=evaluation,
            data_collator=default_data_collator,
            optimizers=(torch.optim.AdamW(groups, betas=(0.9, 0.95)), None),
        )
        trainer.remove_callback(PrinterCallback)  # what is told off a terminal is the caller's affair
        before = math.exp(trainer.evaluate()["eval_loss"])
        with PeakMemory() as memory:
            start = time.perf_counter()
            trainer.train()
            seconds = time.perf_counter() - start
        after = math.exp(trainer.evaluate()["eval_loss"])
        trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # or its forward would stay under autocast
    return FinetuneResult(
        name=name,
        perplexity_before=before,
        perplexity_after=after,
        steps=steps,
        training_tokens=steps * batch * len(train[0]["input_ids"]),
        seconds=seconds,
        peak_memory=memory.peak,
    )
