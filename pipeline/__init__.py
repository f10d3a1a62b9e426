"""The application: corpus → generate → logits → distil → calibrate → speculate → report → export."""
