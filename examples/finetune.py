"""Trains a retrofit with Transformers' Trainer: `python examples/finetune.py notes.txt`, after `examples/retrofit.py`.

The connections have a learning rate of their own.
"""

import sys

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

from resformer import ConnectionTrainer

TEXT = sys.argv[1]

model = AutoModelForCausalLM.from_pretrained("retrofit")
tokenizer = AutoTokenizer.from_pretrained("retrofit")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
lines = load_dataset("text", data_files=TEXT)["train"]
dataset = lines.map(lambda row: tokenizer(row["text"], truncation=True, max_length=256), remove_columns="text")

trainer = ConnectionTrainer(
    model=model,
    args=TrainingArguments("finetuned", max_steps=10, learning_rate=5e-5, report_to="none"),
    train_dataset=dataset,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    connection_learning_rate=3e-4,
)
trainer.train()
trainer.save_model()
tokenizer.save_pretrained("finetuned")
print(model.model.value_mixing_matrix()[:, 0])  # what each layer takes of the values of layer 0
