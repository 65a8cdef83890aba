"""Train with packs: keep records apart in models, and create masks, microbatches and receipts."""
