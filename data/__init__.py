"""Code about data: prompts and their splits, responses, cached logits, batches, and folders that are whole or absent."""
