"""Bodies of OpenAI's API, as both engines read them."""
