"""What an agent did, how it is run many times at once, and what of it is trained on."""
