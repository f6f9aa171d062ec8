"""What differs between the versions of Transformers from 5.9 on."""

from dataclasses import fields

from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

try:
    from transformers.cache_utils import BaseQuantizedLayer
except ImportError:  # its older name
    from transformers.cache_utils import QuantizedLayer as BaseQuantizedLayer

#: What models call their cache, as an argument and in their outputs: before 5.24 `past_key_values`, then `cache`.
CACHE = next(each.name for each in fields(BaseModelOutputWithPast) if each.name in ("cache", "past_key_values"))


def record_rejected_tokens(cache: Cache) -> None:
    """Has layers with a window keep tokens until they are cropped; before 5.16 windows cannot be cropped."""
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()


__all__ = ["CACHE", "BaseQuantizedLayer", "record_rejected_tokens"]
