#pragma once
// The config fields without which a checkpoint must be refused: every field that sections 1.1 to
// 1.4 of the specification mark Y, T or C, and those of the quantisation that decide how bytes are
// read. Written down a second time on purpose: the loader must not forget one.

#include <string>
#include <vector>

namespace k3::test {

/// JSON pointers into config.json.
inline const std::vector<std::string>& needed_fields() {
    static const std::vector<std::string> fields = {
        "/architectures",
        "/model_type",
        "/bos_token_id",
        "/eos_token_id",
        "/pad_token_id",
        "/media_placeholder_token_id",
        "/tie_word_embeddings",
        "/text_config/model_type",
        "/text_config/architectures",
        "/text_config/hidden_size",
        "/text_config/num_hidden_layers",
        "/text_config/vocab_size",
        "/text_config/num_attention_heads",
        "/text_config/num_key_value_heads",
        "/text_config/intermediate_size",
        "/text_config/hidden_act",
        "/text_config/activation_situ_beta",
        "/text_config/activation_situ_linear_beta",
        "/text_config/rms_norm_eps",
        "/text_config/attn_res_block_size",
        "/text_config/first_k_dense_replace",
        "/text_config/moe_layer_freq",
        "/text_config/num_experts",
        "/text_config/num_experts_per_token",
        "/text_config/moe_intermediate_size",
        "/text_config/routed_expert_hidden_size",
        "/text_config/latent_moe_use_norm",
        "/text_config/num_shared_experts",
        "/text_config/moe_router_activation_func",
        "/text_config/moe_renormalize",
        "/text_config/routed_scaling_factor",
        "/text_config/topk_method",
        "/text_config/use_grouped_topk",
        "/text_config/num_expert_group",
        "/text_config/topk_group",
        "/text_config/q_lora_rank",
        "/text_config/kv_lora_rank",
        "/text_config/qk_nope_head_dim",
        "/text_config/qk_rope_head_dim",
        "/text_config/v_head_dim",
        "/text_config/mla_use_nope",
        "/text_config/mla_use_output_gate",
        "/text_config/max_position_embeddings",
        "/text_config/num_nextn_predict_layers",
        "/text_config/tie_word_embeddings",
        "/text_config/bos_token_id",
        "/text_config/eos_token_id",
        "/text_config/pad_token_id",
        "/text_config/linear_attn_config/full_attn_layers",
        "/text_config/linear_attn_config/kda_layers",
        "/text_config/linear_attn_config/num_heads",
        "/text_config/linear_attn_config/head_dim",
        "/text_config/linear_attn_config/short_conv_kernel_size",
        "/text_config/linear_attn_config/gate_lower_bound",
        "/text_config/linear_attn_config/use_full_rank_gate",
        "/text_config/quantization_config/quant_method",
        "/text_config/quantization_config/format",
        "/text_config/quantization_config/quantization_status",
        "/text_config/quantization_config/config_groups/group_0/format",
        "/text_config/quantization_config/config_groups/group_0/targets",
        "/text_config/quantization_config/config_groups/group_0/weights/num_bits",
        "/text_config/quantization_config/config_groups/group_0/weights/type",
        "/text_config/quantization_config/config_groups/group_0/weights/group_size",
        "/text_config/quantization_config/config_groups/group_0/weights/strategy",
        "/text_config/quantization_config/config_groups/group_0/weights/symmetric",
        "/text_config/quantization_config/config_groups/group_0/weights/dynamic",
        "/text_config/quantization_config/config_groups/group_0/weights/scale_dtype",
    };
    return fields;
}

}  // namespace k3::test
