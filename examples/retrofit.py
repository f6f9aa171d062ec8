"""Adds value residuals and depth averages to a checkpoint, exactly: `python examples/retrofit.py [CHECKPOINT]`."""

import sys

from transformers import AutoModelForCausalLM

import resformer

SOURCE = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M"

report = resformer.retrofit(SOURCE, "retrofit", "resformer-denseformer", force=True)
print(f"{sum(report.added.values()):,} parameters added; logits {report.logits}")

model = AutoModelForCausalLM.from_pretrained("retrofit")
print(model.model.value_mixing_matrix())  # M: layer n attends to sum_m M[n, m] V_m
print(model.model.depth_mixing_matrix())  # D: block n + 1 reads sum_j D[n, j] X_j

resformer.revert("retrofit", "reverted", force=True)  # possible until the connections are trained
print(resformer.verify(SOURCE, "reverted").same)
