"""Any transformers model whose routed experts go through its experts interface: transformers' own code, our experts."""
