"""OpenAI's bodies in and out, for every face that speaks them."""
