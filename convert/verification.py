"""Proof of a conversion: the two models' logits on fixed prompts."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

__all__ = ["LogitsComparison", "compare_logits"]


@dataclass(frozen=True)
class LogitsComparison:
    """How far the logits of one model are from another's, over `tokens` positions."""

    tokens: int
    identical: bool  # bit for bit
    max_difference: float
    mean_kl: float  # KL(source || converted) per token, in nats
    top1_agreement: float  # 0 to 1

    def __str__(self) -> str:
        if self.identical:
            return f"identical to the bit on {self.tokens} tokens"
        return (
            f"differ on {self.tokens} tokens: max {self.max_difference:.3g}, KL {self.mean_kl:.3g} nats, "
            f"top-1 agreement {self.top1_agreement:.1%}"
        )


@torch.no_grad()
def compare_logits(source: PreTrainedModel, converted: PreTrainedModel, tokens: int = 128) -> LogitsComparison:
    """Runs both models on the same `tokens` tokens: random ids from a fixed seed, in two rows."""
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(source.config.vocab_size, (2, tokens // 2), generator=generator)
    logits = []
    for model in (source, converted):
        was_training = model.training
        logits.append(model.eval()(input_ids=input_ids.to(model.device), use_cache=False).logits.cpu())
        model.train(was_training)
    expected, found = logits
    expected_log, found_log = (values.double().log_softmax(-1) for values in logits)
    return LogitsComparison(
        tokens=input_ids.numel(),
        identical=torch.equal(expected, found),
        max_difference=(expected - found).abs().max().item(),
        mean_kl=(expected_log.exp() * (expected_log - found_log)).sum(-1).mean().item(),
        top1_agreement=(expected.argmax(-1) == found.argmax(-1)).double().mean().item(),
    )
