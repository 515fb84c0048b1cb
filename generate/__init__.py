"""The engines: how an iteration is computed. Each is an `inference.Generator`.

    loading       the engine that the settings name; imports torch for no other than that needs it
    assembly      model, parts, KV cache and CUDA graphs put together; the warm-up
    auto          what `auto` means for the settings on this machine

Engines:

    cached        one forward pass over the tokens of all rows, on the KV cache
    naive         no KV cache: what all others are compared with
    padded        rows as rectangles (BATON)
    lora          the cached engine with LoRA adapters
    fake          no model: letters at a stated cost

Parts of the cached engine:

    attention, linear, norms    of a layer, by PyTorch or by kernels
    forward, fused, graphs      a pass as few calls: on a CPU, on a GPU, and recorded
    sampling, scoring           from logits to ids, and to log-probabilities
    ngram, draft_model, forced  where draft tokens come from
    buffers, memory             numbers on their way to the device, and too little room there
    kernels/                    C++ and Triton

Files of a model:

    weights, checkpoint         found and checked, without torch; then read
    tokenizer                   text to ids and back
    demo/                       the shipped model
"""
