"""The routes, and who may call them: OpenAI's, our own, sessions."""
