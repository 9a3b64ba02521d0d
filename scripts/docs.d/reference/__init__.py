"""Writes docs/reference: what the code already knows, as tables to read.

`pages.PAGES` lists the files. A page is a function that returns its blocks; it takes what it shows
from the code itself, so that there is no second copy to keep.
"""
