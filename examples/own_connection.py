"""A connection of one's own, in any file: what the MLP adds to the stream of a layer, times a learned number.

python examples/own_connection.py
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import initialization as init

import resformer


class Damped(resformer.Connection):
    """x <- x + g f(x)."""

    name, place = "damped", "mlp_added"
    init: float = 0.5  # a field, from scratch
    plain = {"init": 1.0}  # and where it starts as the model without it

    def __init__(self, shape, layer):
        super().__init__(shape, layer)
        self.gain = torch.nn.Parameter(torch.empty(1))

    def reset_parameters(self):
        init.constant_(self.gain, self.init)

    def forward(self, added):
        return added * self.gain.to(added.dtype)


if __name__ == "__main__":
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=99, **sizes)).eval()
    ids = torch.arange(12)[None]
    before = model(ids).logits
    resformer.connect(model, "damped")
    print("logits unchanged:", torch.equal(model(ids).logits, before))
    print(f"parameters added: {sum(p.numel() for n, p in model.named_parameters() if 'damped' in n)}")
