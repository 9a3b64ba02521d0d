"""Tools for tests of Conveyor, and of programs that use it. No production module imports them."""
