"""Text: tokens to safe text and back, templates, parsing."""
