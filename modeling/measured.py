"""Written by tests/any_decoder.py: the model types whose connections were measured."""

MEASURED = frozenset(
    """
    afmoe apertus apertus1p5_text arcee aria aria_text axk1 axk2 aya_vision bailing_hybrid bamba beam bert
    bert-generation big_bird biogpt bitnet bloom camembert codegen cohere cohere2 cohere2_moe cohere2_vision
    cohere_compass cohere_compass_text cosmos3_edge cosmos3_omni cpmant ctrl cwm data2vec-text dbrx deepseek_v2
    deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl deepseek_vl_hybrid diffllama doge dory dots1 dots3_note_text
    electra emu3 ernie ernie4_5 ernie4_5_moe exaone exaone4 exaone4_5 exaone_moe falcon falcon_h1 falcon_mamba
    flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified
    gemma4_unified_text glm glm4 glm46v glm4_moe glm4_moe_lite glm4v glm4v_moe glm5_next glm_moe_dsa glm_ocr glmga
    got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_docling
    granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 hy_v4 hyperclovax hyperclovax_vision_v2 idefics2 idefics3 inkling2 inkling2_loop
    inkling2_loop_text inkling2_text inkling_mm_model inkling_text internlm3 internvl iquestcoder jais2 jamba
    jetmoe kimi_k25 kimi_linear kolibri1 kosmos-2.5 laguna lara_mini lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl
    lighton_ocr llama llama4 llama4_text llava llava_next llava_next_video llava_onevision longcat_flash mamba
    mamba2 megatron-bert mellum mimo_v2_flash minicpm3 minicpm_ocr minicpmv4_6 minicpmv4_7 minimax minimax_m2
    minimax_m3_vl minimax_m3_vl_text ministral ministral3 mistral mistral3 mistral4 mistral_large4 mixtral mllama
    modernbert-decoder moshi moss_transcribe_diarize mpt muse_glimmer nanochat nanochat_2026 nemotron nemotron_h
    olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt ovis2 paddleocr_vl paligemma persimmon phi phi3 phimoe
    pp_chart2table prophetnet qianfan_ocr qwen2 qwen2_5_omni_thinker qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_5
    qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe
    qwen4_exp qwen4_exp_text recurrent_gemma rembert roberta roberta-prelayernorm roc_bert roformer rwkv
    sarvam_mla sarvam_moe seed_oss smollm3 smolvlm solar_open stablelm starcoder2 step3p7 trocr vaultgemma
    video_llama_3 video_llava vipllava xglm xlm xlm-roberta xlm-roberta-xl xlnet xlstm youtu zamba zamba2 zaya
    """.split()
)
