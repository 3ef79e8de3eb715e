# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A state_dict in, a checkpoint out that vLLM, SGLang and transformers load.

    python examples/convert_state_dict.py OUTPUT_DIRECTORY

With torch, `state_dict` is `model.state_dict()` and `config` is `model.config.to_dict()`.
"""

import sys

import numpy as np

import fp4kit

config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
random = np.random.default_rng(0)
state_dict = {
    "model.embed_tokens.weight": random.standard_normal((96, 64), np.float32),
    "model.layers.0.self_attn.q_proj.weight": random.standard_normal((64, 64), np.float32),
    "model.layers.0.self_attn.k_proj.weight": random.standard_normal((32, 64), np.float32),
    "model.layers.0.self_attn.v_proj.weight": random.standard_normal((32, 64), np.float32),
    "model.norm.weight": np.ones(64, np.float32),
}


def main(target: str) -> None:
    """Quantizes the projections and saves everything."""
    projections = [name for name in state_dict if "_proj." in name]
    # Engines compute q, k and v as one product: they share one second-level scale.
    amax = max(float(np.abs(state_dict[name]).max()) for name in projections)
    tensors = dict(state_dict)
    for name in projections:
        tensors[name] = fp4kit.quantize(state_dict[name], "nvfp4", amax=amax)
    fp4kit.save(target, tensors, layout="compressed-tensors", config=config)

    print("faults:", fp4kit.verify(target).faults)
    with fp4kit.open(target) as checkpoint:
        for name, value in checkpoint.items():
            print(name, type(value).__name__, value.shape)


if __name__ == "__main__":
    main(sys.argv[1])
