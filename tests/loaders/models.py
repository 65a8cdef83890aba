"""Tiny random models, created from a config without any network access."""

from typing import Any

import torch

VOCABULARY = 97
WINDOWED = {"gemma2", "gemma3_text", "mistral", "mixtral", "phi3", "qwen2"}


def tiny_model(
    family: str, attention: str, *, scale: float = 0.2, vocabulary: int = VOCABULARY
) -> Any:
    """A causal model of hidden size 64 with logits up to about 6, or 0.3 with scale 0.02."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    settings = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": scale,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family not in ("phi", "phi3"):
        settings["head_dim"] = 16
    if family in WINDOWED:
        settings["sliding_window"] = 8
    if "moe" in family or family == "mixtral":
        settings |= {
            "num_experts": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        }
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)
