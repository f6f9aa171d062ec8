"""Comparison studies: methods trained under one budget, their statistics, tables and plots."""
