"""A private endpoint over the engine: wire types, the engine's process, the routes."""
