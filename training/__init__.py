"""Training: the corpus that every machine has, optimizer groups, and fine-tuning with the stock Trainer."""
