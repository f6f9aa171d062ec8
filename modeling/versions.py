"""What differs between the versions of Transformers from 5.9 on."""

import torch
from transformers.cache_utils import Cache

try:
    from transformers.cache_utils import BaseQuantizedLayer
except ImportError:  # its older name
    from transformers.cache_utils import QuantizedLayer as BaseQuantizedLayer

try:
    from transformers.modeling_utils import slice_logits_to_keep
except ImportError:  # before 5.22

    def slice_logits_to_keep(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
        """Returns the last `logits_to_keep` tokens, all for 0, or those with the numbers in a 1-D tensor."""
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return hidden_states[:, kept]


def record_rejected_tokens(cache: Cache) -> None:
    """Has layers with a window keep tokens until they are cropped; before 5.16 windows cannot be cropped."""
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()


__all__ = ["BaseQuantizedLayer", "record_rejected_tokens", "slice_logits_to_keep"]
