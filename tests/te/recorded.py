"""TransformerEngine 2.20.2 as far as we call it: signatures and classes, computing as ``compute.py`` says.

From ``transformer_engine/pytorch``: ``cpp_extensions/gemm.py``, ``cpp_extensions/fused_attn.py``, ``quantization.py``,
``tensor/*.py``, ``attention/dot_product_attention/utils.py``; and ``common/recipe``. ``make test-te`` compares them
with the real ones.
"""

import inspect
from enum import IntEnum
from types import SimpleNamespace

from te import compute


class DType(IntEnum):
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8


class FusedAttnBackend(IntEnum):
    No_Backend = -1
    F16_arbitrary_seqlen = 1
    FP8 = 2


class Float8TensorStorage:
    def __init__(
        self,
        *,
        data,
        fp8_scale_inv,
        fp8_dtype,
        fake_dtype=None,
        data_transpose=None,
        quantizer=None,
        transpose_invalid=None,
    ):
        self._data, self._transpose, self._scale_inv = data, data_transpose, fp8_scale_inv
        self._fp8_dtype, self._dtype, self._quantizer = fp8_dtype, fake_dtype, quantizer

    @property
    def shape(self):
        return self._data.shape

    def update_usage(self, rowwise_usage=None, columnwise_usage=None):
        if compute.ONE_COPY_SERVES:
            return
        if columnwise_usage and self._transpose is None:
            self._transpose = self._data.t().contiguous()
        if rowwise_usage is False:
            self._data = None

    def dequantize(self, *, dtype=None):
        return compute.values(self).to(dtype or self._dtype)


class Quantizer:
    def __init__(self, *, rowwise, columnwise):
        self.rowwise_usage, self.columnwise_usage, self.internal = rowwise, columnwise, False

    def set_usage(self, *, rowwise=None, columnwise=None):
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def copy(self):
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __call__(self, tensor):
        return compute.quantise(self, tensor, Float8TensorStorage)


class Float8Quantizer(Quantizer):
    def __init__(self, scale, amax, fp8_dtype, *, rowwise=True, columnwise=True):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.scale, self.amax, self.dtype = scale, amax, fp8_dtype


class Float8CurrentScalingQuantizer(Quantizer):
    def __init__(
        self,
        fp8_dtype,
        device,
        *,
        rowwise=True,
        columnwise=True,
        use_existing_amax=False,
        with_amax_reduction=False,
        amax_reduction_group=None,
        force_pow_2_scales=False,
        amax_epsilon=0.0,
        scale=None,
        amax=None,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = fp8_dtype


class Float8BlockQuantizer(Quantizer):
    def __init__(
        self,
        fp8_dtype,
        *,
        rowwise,
        columnwise,
        amax_epsilon=0.0,
        force_pow_2_scales=True,
        block_scaling_dim=2,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype, self.block_scaling_dim = fp8_dtype, block_scaling_dim


class MXFP8Quantizer(Quantizer):
    def __init__(self, fp8_dtype, *, rowwise=True, columnwise=True, with_2d_quantization=False):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = fp8_dtype


class Format:
    E4M3, HYBRID = "E4M3", "HYBRID"


class _Recipe:
    def __init__(self, fp8_format):
        self.hybrid = fp8_format == Format.HYBRID


class Float8CurrentScaling(_Recipe):
    fp8_gemm_fprop = SimpleNamespace(use_split_accumulator=False)
    fp8_gemm_dgrad = fp8_gemm_wgrad = SimpleNamespace(use_split_accumulator=True)


class Float8BlockScaling(_Recipe):
    fp8_gemm_fprop = fp8_gemm_dgrad = fp8_gemm_wgrad = SimpleNamespace(use_split_accumulator=True)


class MXFP8BlockScaling(_Recipe):
    pass


class RecipeState:
    @staticmethod
    def create(recipe, *, mode, num_quantizers=1, device=None, roles=None):
        kind = type(recipe).__name__
        dtype = DType.kFloat8E5M2 if mode == "backward" and recipe.hybrid else DType.kFloat8E4M3

        def make(index):
            both = dict(rowwise=True, columnwise=True)
            if kind == "Float8CurrentScaling":
                return Float8CurrentScalingQuantizer(dtype, device, **both)
            if kind == "MXFP8BlockScaling":
                return MXFP8Quantizer(dtype, **both)
            weight = mode == "forward" and index % 3 == 1
            return Float8BlockQuantizer(dtype, block_scaling_dim=2 if weight else 1, **both)

        return SimpleNamespace(make_quantizers=lambda: [make(i) for i in range(num_quantizers)])


def general_gemm(
    A,
    B,
    out_dtype=None,
    quantization_params=None,
    gelu=False,
    gelu_in=None,
    alpha=1.0,
    beta=None,
    accumulate=False,
    layout="TN",
    out=None,
    bias=None,
    use_split_accumulator=False,
    grad=False,
    ub=None,
    ub_type=None,
    extra_output=None,
    bulk_overlap=False,
): ...


def fused_attn_fwd(
    is_training,
    max_seqlen_q,
    max_seqlen_kv,
    cu_seqlens_q,
    cu_seqlens_kv,
    q,
    k,
    v,
    fake_dtype,
    fused_attention_backend,
    attn_bias=None,
    cu_seqlens_q_padded=None,
    cu_seqlens_kv_padded=None,
    page_table_k=None,
    page_table_v=None,
    s_quantizer=None,
    o_quantizer=None,
    attn_scale=None,
    dropout=0.0,
    fast_zero_fill=True,
    qkv_layout="sbh3d",
    o_format="sbhd",
    qkv_scale_inv_format=None,
    attn_bias_type="no_bias",
    attn_mask_type="padding",
    softmax_type="vanilla",
    window_size=(-1, -1),
    bottom_right_diagonal=None,
    rng_gen=None,
    softmax_offset=None,
    return_max_logit=False,
    cuda_graph=False,
): ...


def fused_attn_bwd(
    max_seqlen_q,
    max_seqlen_kv,
    cu_seqlens_q,
    cu_seqlens_kv,
    q,
    k,
    v,
    o,
    d_o,
    fake_dtype,
    aux_ctx_tensors,
    fused_attention_backend,
    cu_seqlens_q_padded=None,
    cu_seqlens_kv_padded=None,
    s_quantizer=None,
    dp_quantizer=None,
    dqkv_quantizer=None,
    attn_scale=None,
    dropout=0.0,
    fast_zero_fill=True,
    qkv_layout="sbh3d",
    o_format="sbhd",
    do_format="sbhd",
    dqkv_layout="sbh3d",
    qkv_scale_inv_format=None,
    do_scale_inv_format=None,
    attn_bias_type="no_bias",
    attn_mask_type="padding",
    softmax_type="vanilla",
    window_size=(-1, -1),
    bottom_right_diagonal=None,
    deterministic=False,
    cuda_graph=False,
): ...


def combine_and_quantize(
    qkv_layout,
    q,
    k,
    v,
    qkv_quantizer,
    used_in_forward=True,
    used_in_backward=False,
    keep_same_data_and_scale_inv_format=False,
    combined_qkv=None,
    combined_kv=None,
): ...


def mxfp8_quantize_fast_path(tensor_quantizer_pairs, src_format): ...


P = "transformer_engine.pytorch"
ATTENTION = f"{P}.attention.dot_product_attention.utils"


def _available(return_reason=False):
    return (True, "") if return_reason else True


MODULES = {
    "transformer_engine": dict(__version__="2.20.2"),
    P: dict(is_fp8_available=_available, is_mxfp8_available=_available, is_fp8_block_scaling_available=_available),
    "transformer_engine.common.recipe": dict(
        Format=Format,
        Float8CurrentScaling=Float8CurrentScaling,
        Float8BlockScaling=Float8BlockScaling,
        MXFP8BlockScaling=MXFP8BlockScaling,
    ),
    f"{P}.constants": dict(DType=DType),
    f"{P}.quantization": dict(RecipeState=RecipeState),
    f"{P}.cpp_extensions": dict(general_gemm=general_gemm),
    f"{P}.cpp_extensions.fused_attn": dict(
        fused_attn_fwd=fused_attn_fwd, fused_attn_bwd=fused_attn_bwd, FusedAttnBackend=FusedAttnBackend
    ),
    f"{P}.tensor.float8_tensor": dict(
        Float8Quantizer=Float8Quantizer, Float8CurrentScalingQuantizer=Float8CurrentScalingQuantizer
    ),
    f"{P}.tensor.float8_blockwise_tensor": dict(Float8BlockQuantizer=Float8BlockQuantizer),
    f"{P}.tensor.mxfp8_tensor": dict(MXFP8Quantizer=MXFP8Quantizer),
    f"{P}.tensor.storage.float8_tensor_storage": dict(Float8TensorStorage=Float8TensorStorage),
    ATTENTION: dict(combine_and_quantize=combine_and_quantize, mxfp8_quantize_fast_path=mxfp8_quantize_fast_path),
}
FUNCTIONS = {
    f"{P}.cpp_extensions": ("general_gemm",),
    f"{P}.cpp_extensions.fused_attn": ("fused_attn_fwd", "fused_attn_bwd"),
    ATTENTION: ("combine_and_quantize", "mxfp8_quantize_fast_path"),
}


def bound(function):
    """Takes exactly what ``function`` takes, and computes as ``compute`` says."""
    signature, calculate = inspect.signature(function), getattr(compute, function.__name__)

    def call(*args, **kwargs):
        return calculate(signature.bind(*args, **kwargs).arguments)

    call.__signature__ = signature
    return call
