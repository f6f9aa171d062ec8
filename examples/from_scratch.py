"""Trains a tiny SVFormer from scratch on a text file: `python examples/from_scratch.py notes.txt`.

Without --tokens, the size decides how much is trained: `resformer pretrain --help`.
"""

import subprocess
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import resformer  # noqa: F401  # registers the architecture with the Auto classes

TEXT, *MORE = sys.argv[1:]

command = "resformer pretrain scratch --size tiny --method svformer --tokenizer bytes --sample-by line --held-out 0.05"
subprocess.run([sys.executable, "-m", *command.split(), "--data", TEXT, *MORE], check=True)

model = AutoModelForCausalLM.from_pretrained("scratch")
tokenizer = AutoTokenizer.from_pretrained("scratch")
inputs = tokenizer("Values", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))
