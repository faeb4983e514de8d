"""The `art-cloud` command. Nothing imports it."""
