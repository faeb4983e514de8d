"""The way to a server on another machine: logins, tunnel, relay."""
