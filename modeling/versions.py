"""What differs between the versions of Transformers from 5.9 on."""

from transformers.cache_utils import Cache

try:
    from transformers.cache_utils import BaseQuantizedLayer
except ImportError:  # its older name
    from transformers.cache_utils import QuantizedLayer as BaseQuantizedLayer


def record_rejected_tokens(cache: Cache) -> None:
    """Has layers with a window keep tokens until they are cropped; before 5.16 windows cannot be cropped."""
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()


__all__ = ["BaseQuantizedLayer", "record_rejected_tokens"]
