"""Modal: a sandbox, or a server that scales to zero."""
