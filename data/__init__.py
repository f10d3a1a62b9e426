"""Code about data: prompts and their splits, responses, cached logits, batches, folders that are whole or absent."""
