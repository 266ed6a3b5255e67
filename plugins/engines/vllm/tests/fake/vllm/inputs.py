"""vLLM's input with images, as its renderer makes it, with the signature of vLLM 0.32."""


def mm_input(prompt_token_ids, mm_kwargs, mm_hashes, mm_placeholders, *, prompt=None, cache_salt=None):
    return {
        "type": "multimodal",
        "prompt_token_ids": prompt_token_ids,
        "mm_kwargs": mm_kwargs,
        "mm_hashes": mm_hashes,
        "mm_placeholders": mm_placeholders,
        "cache_salt": cache_salt,
    }
