"""The programs: each runs the parts that bootstrap builds until it is stopped."""
