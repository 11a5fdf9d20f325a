"""Make a corpus and two models of random weights for `.ci/stranger`, with the demo's tokenizers."""

import json
from importlib import resources
from pathlib import Path

from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from vocagnolm.demo import world

assets = Path(str(resources.files("vocagnolm"))) / "assets"
for role in ("student", "teacher"):
    tokenizer = AutoTokenizer.from_pretrained(assets / f"demo_{role}")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(role)
    tokenizer.save_pretrained(role)

texts = ["".join(world.render(item)) for item in world.held_out_problems()]
texts = (texts * (200 // len(texts) + 1))[:200]
Path("corpus.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
