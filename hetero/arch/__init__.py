"""What a model is, as data: the spec, and how a published configuration becomes one."""
