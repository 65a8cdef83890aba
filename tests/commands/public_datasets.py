"""Rows with the columns and nesting of public datasets, made from questions and answers.

Each entry has a dataset's name on the Hub and a function that makes a row of its shape, one
dataset per shape. The texts are ours.
"""

import json
from typing import Any

Row = dict[str, Any]

SYSTEM = "You are a careful assistant."
THOUGHT = "<think>\nAdd both numbers.\n</think>\n\n"
TOOL = {"name": "add", "description": "Adds.", "parameters": {"n": {"type": "int"}}}


def chat(question: str, answer: str, *, system: str = "") -> list[dict[str, str]]:
    first = [{"role": "system", "content": system}] if system else []
    return [
        *first,
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]


def gpt(question: str, answer: str, user: str = "human", bot: str = "gpt") -> list[dict[str, str]]:
    return [{"from": user, "value": question}, {"from": bot, "value": answer}]


# fmt: off
ROWS = {
    "tatsu-lab/alpaca": lambda q, a: {"instruction": q, "input": "", "output": a,
        "text": f"Below is an instruction.\n\n### Instruction:\n{q}\n\n### Response:\n{a}"},
    "garage-bAInd/Open-Platypus": lambda q, a: {"input": "", "output": a, "instruction": q,
        "data_source": "MATH/PRM-800K"},
    "TIGER-Lab/MathInstruct": lambda q, a: {"source": "data/CoT/x.json", "output": a,
        "instruction": q},
    "databricks/databricks-dolly-15k": lambda q, a: {"instruction": q, "context": "", "response": a,
        "category": "open_qa"},
    "teknium/OpenHermes-2.5": lambda q, a: {"custom_instruction": None, "topic": None,
        "model_name": None, "model": None, "skip_prompt_formatting": False, "category": "orca",
        "conversations": [{**turn, "weight": None} for turn in gpt(q, a)], "views": None,
        "language": None, "id": None, "title": None, "idx": None, "hash": None, "avatarUrl": None,
        "system_prompt": None, "source": "airoboros2.2"},
    "HuggingFaceH4/ultrachat_200k": lambda q, a: {"prompt": q, "prompt_id": "f0e3",
        "messages": chat(q, a)},
    "HuggingFaceH4/ultrafeedback_binarized": lambda q, a: {"prompt": q, "prompt_id": "f0e3",
        "chosen": chat(q, a), "rejected": chat(q, "I do not know."), "messages": chat(q, a),
        "score_chosen": 8.5, "score_rejected": 7.0},
    "argilla/ultrafeedback-binarized-preferences-cleaned": lambda q, a: {"source": "evol_instruct",
        "prompt": q, "chosen": chat(q, a), "chosen-rating": 5.0, "chosen-model": "x",
        "rejected": chat(q, "I do not know."), "rejected-rating": 3.75, "rejected-model": "y"},
    "HuggingFaceTB/smoltalk": lambda q, a: {"messages": chat(q, a), "source": "smol-magpie-ultra"},
    "HuggingFaceTB/smoltalk2": lambda q, a: {"messages": chat(q, a),
        "chat_template_kwargs": {"custom_instructions": "", "enable_thinking": False,
        "python_tools": [], "xml_tools": []}, "source": "x_no_think"},
    "Magpie-Align/Magpie-Pro-300K-Filtered": lambda q, a: {"conversation_id": "x", "instruction": q,
        "response": a, "conversations": gpt(q, a), "gen_input_configs": {"temperature": 1.0,
        "top_p": 1.0, "input_generator": "x"}, "task_category": "Math",
        "other_task_category": ["Reasoning"], "difficulty": "easy",
        "intent": "The user wants a sum.", "knowledge": "Sums.", "input_quality": "good",
        "llama_guard_2": "safe", "instruct_reward": -4.5, "language": "EN"},
    "open-thoughts/OpenThoughts-114k": lambda q, a: {"system": SYSTEM, "conversations": gpt(q,
        THOUGHT + a, "user", "assistant")},
    "open-thoughts/OpenThoughts-114k (metadata)": lambda q, a: {"problem": q,
        "deepseek_reasoning": "Add both of the numbers.", "deepseek_solution": a,
        "ground_truth_solution": a, "domain": "math", "source": "x", "test_cases": None,
        "starter_code": None},
    "open-thoughts/OpenThoughts3-1.2M": lambda q, a: {"difficulty": None, "source": "x",
        "domain": "math", "conversations": gpt(q, THOUGHT + a)},
    "simplescaling/s1K": lambda q, a: {"solution": "A short answer to it.", "question": q,
        "cot_type": "math", "source_type": "x", "metadata": "{}", "cot": None,
        "thinking_trajectories": ["Add both of the numbers."], "attempt": a},
    "open-r1/Mixture-of-Thoughts": lambda q, a: {"messages": chat(q, THOUGHT + a), "num_tokens": 30,
        "source": "open-r1/OpenR1-Math-220k"},
    "open-r1/OpenR1-Math-220k": lambda q, a: {"problem": q, "solution": "By adding both of them.",
        "answer": "7", "problem_type": "Algebra", "source": "olympiads", "uuid": "x",
        "is_reasoning_complete": [True, True], "generations": [THOUGHT + a,
        THOUGHT + "Something else."], "correctness_math_verify": [True, False],
        "finish_reasons": None, "correctness_count": 1, "messages": chat(q, THOUGHT + a)},
    "AI-MO/NuminaMath-CoT": lambda q, a: {"source": "cn_k12", "problem": q, "solution": a,
        "messages": chat(q, a)},
    "AI-MO/NuminaMath-1.5": lambda q, a: {"problem": q, "solution": a, "answer": "7",
        "problem_type": "Algebra", "question_type": "math-word-problem", "source": "olympiads",
        "synthetic": False},
    "nvidia/OpenMathInstruct-2": lambda q, a: {"problem": q, "generated_solution": a,
        "expected_answer": "7", "problem_source": "augmented_math"},
    "nvidia/Llama-Nemotron-Post-Training-Dataset": lambda q, a: {"version": "v1",
        "input": [{"role": "user", "content": q}], "output": THOUGHT + a, "category": "math",
        "license": "cc-by-4.0", "reasoning": "on", "generator": "DeepSeek-R1",
        "used_in_training": "yes", "system_prompt": "detailed thinking on"},
    "openai/gsm8k": lambda q, a: {"question": q, "answer": a},
    "hkust-nlp/dart-math-hard": lambda q, a: {"query": q, "response": a},
    "m-a-p/CodeFeedback-Filtered-Instruction": lambda q, a: {"query": q, "answer": a,
        "resource": "evol-instruct", "lang": "python"},
    "CohereForAI/aya_dataset": lambda q, a: {"inputs": q, "targets": a, "language": "English",
        "language_code": "eng", "annotation_type": "original-annotations", "user_id": "f0ff"},
    "lmsys/lmsys-chat-1m": lambda q, a: {"conversation_id": "x", "model": "vicuna-13b",
        "conversation": chat(q, a), "turn": 1, "language": "English",
        "openai_moderation": [{"categories": {"hate": False}, "flagged": False}],
        "redacted": False},
    "allenai/WildChat-1M": lambda q, a: {"conversation_hash": "x", "model": "gpt-4",
        "conversation": [{**turn, "country": "Norway", "language": "English", "redacted": False,
        "toxic": False} for turn in chat(q, a)], "turn": 1, "language": "English", "toxic": False},
    "facebook/natural_reasoning": lambda q, a: {"question": q, "reference_answer": "7",
        "responses": [{"response_model": "x", "response": a}]},
    "Salesforce/xlam-function-calling-60k": lambda q, a: {"id": 0, "query": q,
        "answers": json.dumps([{"name": "add", "arguments": {"say": a}}]),
        "tools": json.dumps([TOOL])},
    "NousResearch/hermes-function-calling-v1": lambda q, a: {"id": "x",
        "conversations": [{"from": "system", "value": SYSTEM}, *gpt(q, a)],
        "tools": json.dumps([{"type": "function", "function": TOOL}]), "category": "IoT",
        "subcategory": "x", "task": "x"},
    "glaiveai/glaive-function-calling-v2": lambda q, a:
        {"system": "SYSTEM: You are a helpful assistant with no functions.",
        "chat": f"USER: {q}\n\n\nASSISTANT: {a} <|endoftext|>\n\n\n"},
}
# fmt: on
