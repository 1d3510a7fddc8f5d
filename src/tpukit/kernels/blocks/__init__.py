"""How arrays are cut into blocks: tiles, padding, what VMEM holds, tuned sizes."""
