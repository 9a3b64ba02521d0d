"""What a message means, one kind a file."""
