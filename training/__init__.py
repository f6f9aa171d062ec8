"""Training: data, fine-tuning with the stock Trainer, distillation, comparison of methods, optimizer groups."""
