"""Make a corpus, a student and a teacher: `python stranger_pair.py SHARED`, for `.ci/stranger`.

Staged tokenizers and real text where they are there, else the demo's; models with random weights.
"""

import json
import sys
from importlib import resources
from pathlib import Path

from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from vocagnolm.demo import world

shared = Path(sys.argv[1])
staged = {"student": "tokenizers/tinyllama", "teacher": "tokenizers/qwen2.5"}
assets = Path(str(resources.files("vocagnolm"))) / "assets"
text = shared / "data" / "corpora" / "openlogic.jsonl"

for role, place in staged.items():
    directory = shared / place if (shared / place).is_dir() else assets / f"demo_{role}"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=2048, **size, **heads, **ends
    )
    LlamaForCausalLM(config).save_pretrained(role)
    tokenizer.save_pretrained(role)

if text.is_file():
    lines = text.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"][:2000] for line in lines][:200]
else:
    texts = ["".join(world.render(item)) for item in world.held_out_problems()]
texts = (texts * (200 // len(texts) + 1))[:200]
Path("corpus.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
