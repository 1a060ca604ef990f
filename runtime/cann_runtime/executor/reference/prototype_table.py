"""The prototypes of the supported GE ops, as TorchAir's op declarations (REG_OP texts and IrDefs) give them.

One op: its type, inputs, '|', attributes, '|', outputs; lines that are indented continue the one before. '?' marks an
optional input, '*' a dynamic one (key* stands for key0, key1 ...). An attribute is name:Type, with '=' and its default
in JSON where it has one; data types in defaults are codes of ge::DataType. Reading it is in `prototype.py`.
"""

TABLE = """\
Add x1 x2 | | y
AddV2 x1 x2 | | y
Sub x1 x2 | | y
Mul x1 x2 | | y
RealDiv x1 x2 | | y
Div x1 x2 | | y
FloorDiv x1 x2 | | y
FloorMod x1 x2 | | y
TruncateDiv x1 x2 | | y
Mod x1 x2 | | y
Maximum x1 x2 | | y
Minimum x1 x2 | | y
Pow x1 x2 | | y
Muls x | value:Float | y
Adds x | value:Float | y
Axpy x1 x2 | alpha:Float | y
AxpyV2 x1 x2 alpha | | y
Sxpy x1 x2 alpha? | | y
Abs x | | y
Neg x | | y
Sqrt x | | y
Rsqrt x | | y
Exp x | base:Float=-1.0 scale:Float=1.0 shift:Float=0.0 | y
Expm1 x | | y
Log x | base:Float=-1.0 scale:Float=1.0 shift:Float=0.0 | y
Log1p x | | y
Sin x | | y
Cos x | | y
Tanh x | | y
Sigmoid x | | y
Erf x | | y
Relu x | | y
Square x | | y
Reciprocal x | | y
Floor x | | y
Ceil x | | y
Round x | | y
Sign x | | y
Softplus x | | y
Gelu x | | y
GeluV2 x | approximate:String="none" | y
FastGelu x | | y
Swish x | scale:Float=1.0 | y
Cast x | dst_type:Int | y
Bitcast x | type:Type keep_dim:Bool=false | y
ClipByValueV2 x clip_value_min clip_value_max | | y
Addcmul input_data x1 x2 value | | y
Lerp start end weight | | y
IsInf x | | y
Equal x1 x2 | | y
NotEqual x1 x2 | | y
Greater x1 x2 | | y
GreaterEqual x1 x2 | | y
Less x1 x2 | | y
LessEqual x1 x2 | | y
LogicalAnd x1 x2 | | y
LogicalOr x1 x2 | | y
LogicalNot x | | y
BitwiseAnd x1 x2 | | y
BitwiseOr x1 x2 | | y
Invert x | | y
RightShift x y | | z
Select condition x1 x2 | | y
SelectV2 condition then else | | result
MaskedFill x mask value | | y
Identity x | | y
TensorMove x | | y
Assign ref value | validate_shape:Bool=true use_locking:Bool=false | ref
Reshape x shape | axis:Int=0 num_axes:Int=-1 | y
Transpose x perm | | y
Unsqueeze x | axes:ListInt=[] | y
Squeeze x | axis:ListInt=[] | y
ExpandDims x axis | | y
FlattenV2 x | axis:Int=1 end_axis:Int=-1 | y
BroadcastTo x shape | | y
Expand x shape | | y
Tile x multiples | | y
ConcatV2 x* concat_dim | N:Int=1 | y
ConcatD x* | concat_dim:Int N:Int=1 | y
Pack x* | axis:Int=0 N:Int | y
Unpack x | num:Int axis:Int=0 | y*
Split split_dim x | num_split:Int | y*
SplitV x size_splits split_dim | num_split:Int | y*
SplitD x | split_dim:Int num_split:Int | y*
StridedSlice x begin end strides | begin_mask:Int=0 end_mask:Int=0 ellipsis_mask:Int=0 new_axis_mask:Int=0
    shrink_axis_mask:Int=0 | y
StridedSliceV2 x begin end axes? strides? | begin_mask:Int=0 end_mask:Int=0 ellipsis_mask:Int=0 new_axis_mask:Int=0
    shrink_axis_mask:Int=0 | y
Slice x offsets size | | y
SliceD x | offsets:ListInt size:ListInt | y
Shape x | dtype:Int=3 | y
Fill dims value | | y
ZerosLike x | | y
OnesLike x | | y
Range start limit delta | | y
ReverseV2 x axis | | y
PadV3 x paddings constant_values? | mode:String="constant" paddings_contiguous:Bool=true | y
Tril x | diagonal:Int=0 | y
Triu x | diagonal:Int=0 | y
GatherV2 x indices axis | batch_dims:Int=0 is_preprocessed:Bool=false negative_index_support:Bool=false | y
Gather x indices | validate_indices:Bool=true batch_dims:Int=0 is_preprocessed:Bool=false
    negative_index_support:Bool=false | y
GatherElements x index | dim:Int=0 | y
GatherNd x indices | negative_index_support:Bool=false | y
IndexByTensor x indices* | indices_mask:ListInt=[] | y
ScatterNdUpdate var indices updates | use_locking:Bool=false | var
ScatterElements data indices updates | axis:Int=0 reduction:String="none" | y
ScatterUpdate var indices updates | use_locking:Bool=false | var
Scatter var indices updates | reduce:String axis:Int=0 | var
ReduceSum x axes | keep_dims:Bool=false | y
ReduceMax x axes | keep_dims:Bool=false | y
ReduceMin x axes | keep_dims:Bool=false | y
ReduceProd x axes | keep_dims:Bool=false | y
ReduceAny x axes | keep_dims:Bool=false | y
ReduceAll x axes | keep_dims:Bool=false | y
ReduceMean x axes | keep_dims:Bool=false noop_with_empty_axes:Bool=true | y
ReduceMeanWithCast x axes | keep_dims:Bool=false noop_with_empty_axes:Bool=true dtype:Type=28 | y
ArgMaxV2 x dimension | dtype:Type=9 | y
ArgMin x dimension | dtype:Type=9 | y
ArgMaxWithValue x | dimension:Int keep_dims:Bool=false | indice values
ArgMinWithValue x | dimension:Int keep_dims:Bool=false | indice values
TopKV2 x k | sorted:Bool=true dim:Int=-1 largest:Bool=true sort_policy:Int=1 | values indices
Sort x | axis:Int=-1 descending:Bool=false stable:Bool=false | y1 y2
Cumsum x axis | exclusive:Bool=false reverse:Bool=false | y
SoftmaxV2 x | axes:ListInt=[-1] half_to_float:Bool=false | y
LogSoftmaxV2 logits | axes:ListInt=[-1] | logsoftmax
MatMul x1 x2 bias? | transpose_x1:Bool=false transpose_x2:Bool=false | y
MatMulV2 x1 x2 bias? offset_w? | transpose_x1:Bool=false transpose_x2:Bool=false offset_x:Int=0 | y
BatchMatMul x1 x2 | adj_x1:Bool=false adj_x2:Bool=false | y
BatchMatMulV2 x1 x2 bias? offset_w? | adj_x1:Bool=false adj_x2:Bool=false offset_x:Int=0 | y
TransposeBatchMatMul x1 x2 bias? scale? | perm_x1:ListInt=[] perm_x2:ListInt=[] perm_y:ListInt=[]
    enable_hf32:Bool=false batch_split_factor:Int=1 | y
RmsNorm x gamma | epsilon:Float=1e-06 | y rstd
AddRmsNorm x1 x2 gamma | epsilon:Float=1e-06 | y rstd x
AddRmsNormCast x1 x2 gamma | epsilon:Float=1e-06 | y1 y2 rstd x
AddRmsNormDynamicQuant x1 x2 gamma smooth_scale1? smooth_scale2? beta? | epsilon:Float=1e-06 output_mask:ListBool=[]
    dst_type:Int=2 | y1 y2 x scale1 scale2
LayerNormV4 x normalized_shape gamma? beta? | epsilon:Float=1e-05 | y mean rstd
LayerNormV3 x gamma beta | begin_norm_axis:Int=0 begin_params_axis:Int=0 epsilon:Float=1e-05 | y mean rstd
GroupNorm x gamma beta | num_groups:Int data_format:String="NHWC" eps:Float=0.0001 is_training:Bool=true | y mean
    variance
GroupNormV2 x gamma beta | num_groups:Int data_format:String="NHWC" eps:Float=1e-05 is_training:Bool=true | y mean
    rstd
GroupNormSilu x gamma? beta? | num_groups:Int eps:Float=0.0001 | y mean variance
RotaryMul x r1 r2 | | y
RotaryPositionEmbedding x cos sin rotate? | mode:Int=0 | y
ApplyRotaryPosEmb query key cos sin | layout:Int=1 rotary_mode:String="half" | query key
InterleaveRope x cos sin | | y
ScatterPaKvCache key key_cache slot_mapping value value_cache compress_lens? compress_seq_offset? seq_lens? |
    cache_mode:String="Norm" scatter_mode:String="None" strides:ListInt=[1,1] offsets:ListInt=[0,0] | key_cache
    value_cache
KvRmsNormRopeCache kv gamma cos sin index k_cache ckv_cache k_rope_scale? c_kv_scale? k_rope_offset? c_kv_offset? v?
    | epsilon:Float=1e-05 cache_mode:String="Norm" is_output_kv:Bool=false | k_cache ckv_cache k_rope c_kv
FusedInferAttentionScore query key* value* pse_shift? atten_mask? actual_seq_lengths? actual_seq_lengths_kv?
    dequant_scale1? quant_scale1? dequant_scale2? quant_scale2? quant_offset2? antiquant_scale? antiquant_offset?
    block_table? query_padding_size? kv_padding_size? key_antiquant_scale? key_antiquant_offset?
    value_antiquant_scale? value_antiquant_offset? key_shared_prefix? value_shared_prefix? actual_shared_prefix_len?
    query_rope? key_rope? key_rope_antiquant_scale? dequant_scale_query? learnable_sink? q_start_idx? kv_start_idx?
    | num_heads:Int scale:Float=1.0 pre_tokens:Int=2147483647 next_tokens:Int=2147483647 input_layout:String="BSH"
    num_key_value_heads:Int=0 sparse_mode:Int=0 inner_precise:Int=0 block_size:Int=0 antiquant_mode:Int=0
    softmax_lse_flag:Bool=false key_antiquant_mode:Int=0 value_antiquant_mode:Int=0 query_quant_mode:Int=0
    pse_type:Int=0 out_dtype:Int=0 | attention_out softmax_lse
IncreFlashAttention query key* value* pse_shift? atten_mask? actual_seq_lengths? dequant_scale1? quant_scale1?
    dequant_scale2? quant_scale2? quant_offset2? antiquant_scale? antiquant_offset? block_table? kv_padding_size? |
    num_heads:Int scale_value:Float=1.0 input_layout:String="BSH" num_key_value_heads:Int=1 block_size:Int=0
    inner_precise:Int=1 | attention_out
PromptFlashAttention query key value pse_shift? atten_mask? actual_seq_lengths? actual_seq_lengths_kv? deq_scale1?
    quant_scale1? deq_scale2? quant_scale2? quant_offset2? | num_heads:Int scale_value:Float=1.0
    pre_tokens:Int=214748647 next_tokens:Int=0 input_layout:String="BSH" num_key_value_heads:Int=1 sparse_mode:Int=0
    inner_precise:Int=1 | attention_out
FlashAttentionScore query key value real_shift? drop_mask? padding_mask? atten_mask? prefix? actual_seq_qlen?
    actual_seq_kvlen? q_start_idx? kv_start_idx? | scale_value:Float=1.0 keep_prob:Float=1.0
    pre_tockens:Int=2147483647 next_tockens:Int=2147483647 head_num:Int input_layout:String inner_precise:Int=1
    sparse_mode:Int=0 | softmax_max softmax_sum softmax_out attention_out
MlaPrologV3 token_x weight_dq weight_uq_qr weight_uk weight_dkv_kr rmsnorm_gamma_cq rmsnorm_gamma_ckv rope_sin
    rope_cos kv_cache kr_cache cache_index? dequant_scale_x? dequant_scale_w_dq? dequant_scale_w_uq_qr?
    dequant_scale_w_dkv_kr? quant_scale_ckv? quant_scale_ckr? smooth_scales_cq? actual_seq_len? k_nope_clip_alpha? |
    rmsnorm_epsilon_cq:Float=1e-05 rmsnorm_epsilon_ckv:Float=1e-05 cache_mode:String="PA_BSND"
    query_norm_flag:Bool=false weight_quant_mode:Int=0 kv_cache_quant_mode:Int=0 query_quant_mode:Int=0
    ckvkr_repo_mode:Int=0 quant_scale_repo_mode:Int=0 tile_size:Int=128 qc_qr_scale:Float=1.0 kc_scale:Float=1.0 |
    query query_rope kv_cache kr_cache dequant_scale_q_nope query_norm dequant_scale_q_norm
SwiGlu x | dim:Int=-1 | y
MoeGatingTopK x bias? input_ids? tid2eid? | k:Int k_group:Int=1 group_count:Int=1 group_select_mode:Int=0
    renorm:Int=0 norm_type:Int=0 out_flag:Bool=false routed_scaling_factor:Float=1.0 eps:Float=1e-20 | y expert_idx
    y2
MoeGatingTopKSoftmax x finished? | k:Int | y expert_idx row_idx
MoeInitRouting x row_idx expert_idx | active_num:Int | expanded_x expanded_row_idx expanded_expert_idx
MoeInitRoutingV3 x expert_idx scale? offset? | active_num:Int=-1 expert_capacity:Int=-1 expert_num:Int=-1
    drop_pad_mode:Int=0 expert_tokens_num_type:Int=0 expert_tokens_num_flag:Bool=false quant_mode:Int=-1
    active_expert_range:ListInt=[] row_idx_type:Int=0 | expanded_x expanded_row_idx expert_tokens_count_or_cumsum
    expanded_scale
MoeComputeExpertTokens sorted_experts | num_experts:Int | total_rows_before_expert
MoeFinalizeRouting expanded_x x1 x2? bias scales expanded_row_idx expanded_expert_idx | | y
MoeFinalizeRoutingV2 expanded_x expanded_row_idx x1? x2? bias? scales? expert_idx? | drop_pad_mode:Int=0 k:Int=1 | y
MoeReRouting tokens expert_token_num_per_rank per_token_scales? | expert_token_num_type:Int=1 idx_type:Int=0 |
    permute_tokens permute_per_token_scales permute_token_idx expert_token_num
MoeDistributeDispatchV2 x expert_ids scales? x_active_mask? expert_scales? elastic_info? performance_info? |
    group_ep:String ep_world_size:Int ep_rank_id:Int moe_expert_num:Int group_tp:String="" tp_world_size:Int=0
    tp_rank_id:Int=0 expert_shard_type:Int=0 shared_expert_num:Int=1 shared_expert_rank_num:Int=0 quant_mode:Int=0
    global_bs:Int=0 expert_token_nums_type:Int=1 comm_alg:String="" zero_expert_num:Int=0 copy_expert_num:Int=0
    const_expert_num:Int=0 y_dtype:Int=0 | expand_x dynamic_scales expand_idx expert_token_nums ep_recv_count
    tp_recv_count expand_scales
MoeDistributeCombineV2 expand_x expert_ids assist_info_for_combine ep_send_counts expert_scales tp_send_counts?
    x_active_mask? activation_scale? weight_scale? group_list? expand_scales? shared_expert_x? elastic_info? ori_x?
    const_expert_alpha_1? const_expert_alpha_2? const_expert_v? performance_info? | group_ep:String
    ep_world_size:Int ep_rank_id:Int moe_expert_num:Int group_tp:String="" tp_world_size:Int=0 tp_rank_id:Int=0
    expert_shard_type:Int=0 shared_expert_num:Int=1 shared_expert_rank_num:Int=0 global_bs:Int=0 out_dtype:Int=0
    comm_quant_mode:Int=0 group_list_type:Int=0 comm_alg:String="" zero_expert_num:Int=0 copy_expert_num:Int=0
    const_expert_num:Int=0 | x
GroupedMatmul x* weight* bias* scale* offset* antiquant_scale* antiquant_offset* group_list? per_token_scale? |
    split_item:Int=0 dtype:Int=0 transpose_weight:Bool=false transpose_x:Bool=false group_type:Int=-1
    group_list_type:Int=0 act_type:Int=0 tuning_config:ListInt=[0] | y*
GroupedMatmulFinalizeRouting x w scale? bias? pertoken_scale? group_list? shared_input? logit? row_index? offset? |
    dtype:Int=0 shared_input_weight:Float=1.0 shared_input_offset:Int=0 transpose_x:Bool=false
    transpose_w:Bool=false output_bs:Int=0 group_list_type:Int=1 tuning_config:ListInt=[] | y
DynamicQuant x smooth_scales? group_index? | dst_type:Int=2 | y scale
DynamicQuantV2 x smooth_scales? group_index? | dst_type:Int=2 is_symmetrical:Bool=false quant_mode:String="pertoken"
    dst_type_max:Float=0.0 | y scale offset
AscendQuantV2 x scale offset? | sqrt_mode:Bool=false round_mode:String="round" dst_type:Int=2 axis:Int=-1 | y
Quantize x scales zero_points? | dtype:String axis:Int=1 | y
AscendAntiQuantV2 x scale offset? | dst_type:Int=1 sqrt_mode:Bool=false | y
TransQuantParamV2 scale offset? | round_mode:Int=0 | y
QuantBatchMatmulV3 x1 x2 scale offset? bias? pertoken_scale? | dtype:Int transpose_x1:Bool=false
    transpose_x2:Bool=false | y
WeightQuantBatchMatmulV2 x weight antiquant_scale antiquant_offset? quant_scale? quant_offset? bias? |
    transpose_x:Bool=false transpose_weight:Bool=false antiquant_group_size:Int=0 dtype:Int=-1 inner_precise:Int=0 | y
DequantSwigluQuant x weight_scale? activation_scale? bias? quant_scale? quant_offset? group_index? |
    activate_left:Bool=false quant_mode:String="static" dst_type:Int=2 round_mode:String="rint" activate_dim:Int=-1
    swiglu_mode:Int=0 clamp_limit:Float=7.0 glu_alpha:Float=1.702 glu_bias:Float=1.0 | y scale
Conv2D x filter bias? offset_w? | strides:ListInt pads:ListInt dilations:ListInt=[1,1,1,1] groups:Int=1
    data_format:String="NHWC" offset_x:Int=0 | y
Conv3D x filter bias? offset_w? | strides:ListInt pads:ListInt dilations:ListInt=[1,1,1,1,1] groups:Int=1
    data_format:String="NDHWC" offset_x:Int=0 | y
HcomAllReduce x | reduction:String group:String fusion:Int=1 fusion_id:Int=-1 | y
HcomAllGather x | rank_size:Int group:String fusion:Int=0 fusion_id:Int=-1 | y
HcomReduceScatter x | reduction:String fusion:Int=0 fusion_id:Int=-1 group:String rank_size:Int | y
HcomAllToAll x | group:String | y
HcomAllToAllV send_data send_counts send_displacements recv_counts recv_displacements | group:String | recv_data
HcomBroadcast x* | root_rank:Int group:String fusion:Int=0 fusion_id:Int=-1 | y*
MatmulAllReduce x1 x2 bias? x3? antiquant_scale? antiquant_offset? dequant_scale? pertoken_scale?
    comm_quant_scale_1? comm_quant_scale_2? | group:String reduce_op:String="sum" is_trans_a:Bool=false
    is_trans_b:Bool=false comm_turn:Int=0 antiquant_group_size:Int=0 group_size:Int=0 y_dtype:Int=28
    comm_quant_mode:Int=0 comm_mode:String="ai_cpu" | y
"""
