"""Training: data, fine-tuning with the stock Trainer, comparison of methods, optimizer groups."""
