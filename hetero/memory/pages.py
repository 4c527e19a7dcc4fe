"""KV pages as numbers: who holds which page, and which prefix a page holds; knows no tensor."""
