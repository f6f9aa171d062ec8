"""Attention concentration, value-state drains, hidden-state peaks and over-smoothing, layer by layer."""

from resformer.analysis.figures import plots
from resformer.analysis.measuring import Analysis, analyze, read_texts, standard_texts
from resformer.analysis.report import Report, findings, write_report

__all__ = ["Analysis", "Report", "analyze", "findings", "plots", "read_texts", "standard_texts", "write_report"]
