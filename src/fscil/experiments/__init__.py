"""Runs, grids of runs, tables and figures."""
