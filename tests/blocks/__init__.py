"""How `tests/test_blocks.py` finds the code blocks of the pages, and what it runs them in."""
