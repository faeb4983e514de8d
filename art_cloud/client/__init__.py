"""How a script talks to a server: HTTP with patience, calls that count once."""
