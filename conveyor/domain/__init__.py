"""Pure rules and words of Conveyor: no input, no output, no clock."""
