"""The commands of `resformer`, one module a subject. Nothing here imports torch or Transformers before one runs."""
