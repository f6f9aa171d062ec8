"""Attention concentration, value-state drains, hidden-state peaks and over-smoothing, layer by layer.

texts       cuts files into the texts that the models read
attention   an attention function that adds up token importance and never holds a tokens x tokens matrix
measuring   `analyze`: a model and texts in, an `Analysis` out
figures     the plots
report      writes analysis.json, PNG figures and, with `page`, one HTML page
"""

from resformer.analysis.figures import plots
from resformer.analysis.measuring import Analysis, analyze
from resformer.analysis.report import Report, findings, write_report
from resformer.analysis.texts import read_texts, standard_texts

__all__ = ["Analysis", "Report", "analyze", "findings", "plots", "read_texts", "standard_texts", "write_report"]
