r"""NeuTRENO, arXiv 2312.00751: every later layer adds a multiple of V_0 minus its values to its attention output.

    U_n = A_n V'_{s(n)} + l (V_0 - V'_{s(n)}),  n >= 1

s(n) is the layer whose values layer n attends to, itself unless values are shared. The term is added before `o_proj`
and needs the current tokens only.
"""

import torch

from resformer.configuration import ResFormerConfig
from resformer.modeling.connection import ConnectionKind


def neutreno_term(
    attention_output: torch.Tensor, first_values: torch.Tensor, values: torch.Tensor, strength: float
) -> torch.Tensor:
    """Returns the attention output plus strength (V_0 - V'), the values repeated for their query heads.

    Args:
        attention_output: A V', `(batch, tokens, query heads, head_dim)`.
        first_values, values: V_0 and V' of the same tokens, `(batch, key/value heads, tokens, head_dim)`.
        strength: l.
    """
    difference = (first_values - values).transpose(1, 2)
    groups = attention_output.shape[2] // difference.shape[2]
    return torch.add(attention_output, difference.repeat_interleave(groups, dim=2), alpha=strength)


def _fixed_effects(config: ResFormerConfig) -> list[str]:
    strength = config.neutreno_lambda
    return [f"`neutreno_lambda`={strength} adds a fixed term to every layer but 0"] if strength else []


def _flops(config: ResFormerConfig) -> int:
    """3 x query heads x head_dim in every layer but 0."""
    queries = config.num_attention_heads * config.head_dim
    return 3 * queries * (config.num_hidden_layers - 1) if config.neutreno_lambda else 0


NEUTRENO = ConnectionKind(("neutreno_lambda",), fixed_effects=_fixed_effects, flops=_flops)
