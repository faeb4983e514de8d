"""What client and server both know: messages, names, errors, limits. It imports no other room."""
