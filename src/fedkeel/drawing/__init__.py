"""Figures, described once: what a page draws with Vega, and what a file for a paper is made of."""
