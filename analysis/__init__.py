"""Attention concentration, value-state drains, hidden-state peaks and over-smoothing, layer by layer.

texts       what the models read: files cut into texts
attention   an attention function that sums token importance in passing and never holds tokens x tokens numbers
running     means and variances over texts
measuring   `analyze`: a model and texts in, an `Analysis` out
claims      what the papers say of trained models, judged by number
figures     their plots
report      analysis.json, PNG figures and, by `page`, one HTML page
"""

from resformer.analysis.measuring import Analysis, analyze
from resformer.analysis.report import Report, write_report
from resformer.analysis.texts import read_texts, standard_texts

__all__ = ["Analysis", "Report", "analyze", "read_texts", "standard_texts", "write_report"]
