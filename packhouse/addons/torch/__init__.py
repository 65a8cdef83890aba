"""Training with packs: models that keep records apart, masks, microbatches, receipts."""
