"""The rules and records of Conveyor. Pure: no input, no output, no clock."""
