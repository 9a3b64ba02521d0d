"""Calls to AWS: one thin seam that every adapter of the production binding goes through."""
