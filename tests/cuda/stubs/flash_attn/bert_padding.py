from flash_attn import flash_attn_func

pad_input = unpad_input = flash_attn_func
