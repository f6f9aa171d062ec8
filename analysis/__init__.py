"""Attention concentration, value-state drains, hidden-state peaks and over-smoothing, layer by layer."""

from resformer.analysis.figures import plots, report, write_report
from resformer.analysis.measuring import Analysis, analyze, read_texts, standard_texts

__all__ = ["Analysis", "analyze", "plots", "read_texts", "report", "standard_texts", "write_report"]
