"""Pages for people with a browser: made by the server, complete without script."""
