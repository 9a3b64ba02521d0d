"""What tests of Conveyor, and of programs that use it, build on. The product imports none of it."""
