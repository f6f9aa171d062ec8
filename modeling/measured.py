"""Written by tests/any_decoder.py: the model types whose connections were measured."""

MEASURED = frozenset(
    """
    afmoe apertus apertus1p5_text arcee aria_text axk1 axk2 bamba beam bert bert-generation big_bird biogpt bitnet
    bloom camembert codegen cohere cohere2 cohere2_moe cpmant ctrl cwm data2vec-text deepseek_v2 deepseek_v3
    deepseek_v32 deepseek_v4 diffllama doge dots1 electra emu3 ernie ernie4_5 ernie4_5_moe exaone exaone4
    exaone_moe falcon falcon_h1 falcon_mamba flex_olmo flint fuyu gemma gemma2 gemma3_text gemma3n_text gemma4
    gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt-sw3 gpt2
    gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa
    granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax
    inkling2_loop_text inkling2_text inkling_text internlm3 iquestcoder jais2 jamba jetmoe kimi_linear kolibri1
    laguna lara_mini lfm2 lfm2_moe lfm3 llama llama4 llama4_text longcat_flash mamba mamba2 megatron-bert mellum
    mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral mllama
    modernbert-decoder moshi mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt
    persimmon phi phi3 phimoe prophetnet qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text
    qwen3_moe qwen3_next recurrent_gemma rembert roberta roberta-prelayernorm roc_bert roformer rwkv sarvam_mla
    sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 trocr vaultgemma xglm xlm xlm-roberta
    xlm-roberta-xl xlnet youtu zamba zamba2
    """.split()
)
