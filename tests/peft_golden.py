"""Logits of `transformers`' DeepSeek-V4 with an adapter that the PEFT library reads: an optional check, with

    pip install torch transformers peft
    python tests/peft_golden.py BASE ADAPTER golden.npz [--merge]
    python -m trainer convert merge BASE ADAPTER MERGED && python -m trainer verify MERGED golden.npz

`--merge` folds the adapter in by PEFT's own arithmetic before running.
"""

import sys

import numpy as np
import torch
from peft import PeftModel
from transformers import DeepseekV4ForCausalLM


def main(base, adapter, out, merge):
    model = DeepseekV4ForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 160)))
    with torch.no_grad():
        before = model(ids).logits
        model = PeftModel.from_pretrained(model, adapter)
        model = model.merge_and_unload() if merge else model
        logits = model.eval()(ids).logits
    print(f"the adapter moves logits by {float((logits - before).abs().max()):.3g}")
    np.savez(out, input_ids=ids.numpy(), logits=logits.numpy())


if __name__ == "__main__":
    main(*sys.argv[1:4], merge="--merge" in sys.argv)
