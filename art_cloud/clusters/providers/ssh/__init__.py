"""Linux machines that the user can log in to."""
