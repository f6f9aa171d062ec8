"""Two more connections of one's own: value embeddings of one table, and residuals of keys. Both start as plain models.

python examples/more_connections.py
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import initialization as init

import resformer
from resformer.modeling.connection import TOKENS
from resformer.modeling.connections.value_embedding import ValueTable


class OneTable(resformer.Connection):
    """V_n <- V_n + g_n E[token] in the upper half of the layers, with one table E for all of them."""

    name, place, plain = "one_table", "raw_values", {}

    def __init__(self, shape, layer):
        super().__init__(shape, layer)
        self.gain = torch.nn.Parameter(torch.empty(1))
        if layer == self.layers(shape)[0]:
            self.table, self.tables = ValueTable(shape), ("table.weight",)  # it has the model's dtype

    def reset_parameters(self):
        init.zeros_(self.gain)

    def forward(self, values, token_ids=None, rows=None):
        rows = self.table(token_ids) if rows is None else rows
        return values + self.gain.to(values.dtype) * rows.to(values.dtype).view_as(values), {"rows": rows}

    @classmethod
    def layers(cls, shape):
        return range(shape.num_hidden_layers // 2, shape.num_hidden_layers)

    @classmethod
    def reads(cls, shape, layer):
        first = cls.layers(shape)[0]
        return {"token_ids": TOKENS} if layer == first else {"rows": ("rows", first)}


class KeyResidual(resformer.Connection):
    """K_n <- K_n + g_n K_0, before norm and rotary embedding; YOCO++ (arXiv 2604.13556) has such residuals."""

    name, place, plain = "key_residual", "raw_keys", {}

    def __init__(self, shape, layer):
        super().__init__(shape, layer)
        self.gain = torch.nn.Parameter(torch.empty(1))

    def reset_parameters(self):
        init.zeros_(self.gain)

    def forward(self, keys, first):
        return keys + self.gain.to(keys.dtype) * first

    @classmethod
    def layers(cls, shape):
        return range(1, shape.num_hidden_layers)

    @classmethod
    def reads(cls, shape, layer):
        return {"first": ("raw_keys", 0)}


if __name__ == "__main__":
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=99, **sizes)).eval()
    ids = torch.arange(12)[None]
    before = model(ids).logits
    resformer.connect(model, ["one_table", "key_residual"])
    print("logits unchanged:", torch.equal(model(ids).logits, before))
    print(f"tables: {sum('table.weight' in name for name, _ in model.named_parameters())}")
