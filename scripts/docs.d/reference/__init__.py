"""Writes docs/reference: tables made from the code.

`pages.PAGES` lists the files. A page is a function that returns its blocks; it reads its facts from
the code itself, so that there is no second copy to keep.
"""
