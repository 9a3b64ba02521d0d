"""What tests of Conveyor, and of programs that use it, build on. Of the product only the command
`simulate` imports any of it."""
