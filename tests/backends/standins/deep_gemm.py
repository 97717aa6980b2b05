"""A stand-in for DeepGEMM on SM90, and for its FP8 and FP4 products on SM100, in plain torch.

Its functions have the real ones' signatures. They check what the real ones check or take for granted, compute from
what was laid out, in float32, and leave NaN in every row that nobody owns.
"""

import torch
from torch import Tensor

ALIGNMENT = 128
calls: list[str] = []


def get_mk_alignment_for_contiguous_layout() -> int:
    return ALIGNMENT


def m_grouped_bf16_gemm_nt_contiguous(
    a,
    b,
    d,
    grouped_layout,
    compiled_dims="nk",
    use_psum_layout=False,
    ensure_zero_padding=True,
    expected_m_for_psum_layout=None,
):
    calls.append("bf16")
    assert a.dtype == b.dtype == torch.bfloat16
    assert not use_psum_layout, "here the expert of each row is read"
    _require_matrix(a)
    assert b.stride(0) == b.shape[1] * b.shape[2]
    assert 1 in b.stride()[1:]
    assert b.data_ptr() % 16 == 0
    assert a.shape[1] % 64 == 0
    assert (b.shape[1] if b.stride(2) != 1 else b.shape[2]) * b.element_size() % 16 == 0
    _multiply(a.float(), lambda expert: b[expert].float(), d, grouped_layout)


def m_grouped_fp8_gemm_nt_contiguous(
    a,
    b,
    d,
    grouped_layout,
    recipe=None,
    recipe_a=None,
    recipe_b=None,
    compiled_dims="nk",
    disable_ue8m0_cast=False,
    use_psum_layout=False,
    ensure_zero_padding=True,
    expected_m_for_psum_layout=None,
):
    calls.append("fp8")
    (rows, row_scale), (matrices, scale) = a, b
    assert rows.dtype == torch.float8_e4m3fn
    assert not use_psum_layout
    (M, K), (E, N, _) = rows.shape, matrices.shape
    _require_matrix(rows)
    assert matrices.is_contiguous()
    assert matrices.data_ptr() % 16 == 0
    assert K % 128 == 0
    # columns of the activations' scales are contiguous, and M is a multiple of 16 bytes: else the library copies them
    assert row_scale.stride() == (1, M)
    assert M % 4 == 0
    if row_scale.dtype == torch.int32:
        values = rows.float() * _unpacked(row_scale, K // 128).repeat_interleave(128, dim=1)
        _multiply(values, _matrix_on_sm100(matrices, scale, K, recipe_a, recipe_b), d, grouped_layout)
        return
    assert matrices.dtype == torch.float8_e4m3fn
    assert row_scale.dtype == scale.dtype == torch.float32
    assert row_scale.shape == (M, K // 128)
    assert scale.shape == (E, -(-N // 128), K // 128)
    assert scale.is_contiguous()
    values = rows.float() * row_scale.repeat_interleave(128, dim=1)

    def matrix(expert: int) -> Tensor:
        blocks = scale[expert].repeat_interleave(128, dim=0)[:N].repeat_interleave(128, dim=1)
        return matrices[expert].float() * blocks

    _multiply(values, matrix, d, grouped_layout)


def _matrix_on_sm100(matrices: Tensor, scale: Tensor, K: int, recipe_a, recipe_b):
    """(expert) -> its matrix, from scales of four exponents a number, whose rows are contiguous."""
    fp4 = matrices.dtype == torch.int8
    assert fp4 or matrices.dtype == torch.float8_e4m3fn
    assert (recipe_a, recipe_b) == (((1, 128), (1, 32)) if fp4 else (None, None))
    (E, N, _), group = matrices.shape, 32 if fp4 else 128
    assert scale.dtype == torch.int32
    assert scale.shape == (E, N, -(-K // (4 * group)))
    assert scale.stride()[1:] == (1, N)
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def matrix(expert: int) -> Tensor:
        data = matrices[expert]
        if fp4:
            nibbles = torch.stack([data & 15, (data >> 4) & 15], dim=2).flatten(1)
            numbers = sizes[(nibbles & 7).long()] * (1 - 2 * (nibbles >> 3).float())
        else:
            numbers = data.float()
        return numbers * _unpacked(scale[expert], K // group).repeat_interleave(group, dim=1)

    return matrix


def _unpacked(packed: Tensor, groups: int) -> Tensor:
    """int32 (R, G/4) to the powers of two (R, G)."""
    exponents = torch.stack([(packed >> shift) & 255 for shift in (0, 8, 16, 24)], dim=2).flatten(1)[:, :groups]
    return torch.exp2(exponents.float() - 127)


def transform_sf_into_required_layout(sf, mn, k, recipe, num_groups=None, is_sfa=None, disable_ue8m0_cast=False):
    high, wide = recipe[-2:]
    assert recipe in ((1, 128, 128), (1, 32))
    assert sf.dtype == torch.float32
    assert sf.shape == (num_groups, -(-mn // high), -(-k // wide))
    exponents = sf.view(torch.int32) >> 23
    assert torch.equal(exponents << 23, sf.view(torch.int32)), "powers of two"
    rows = exponents.to(torch.uint8).repeat_interleave(high, dim=1)[:, :mn]
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[2] % 4))
    packed = rows.contiguous().view(torch.int32)
    columns = torch.empty(num_groups, packed.shape[2], mn, dtype=torch.int32).transpose(1, 2)
    return columns.copy_(packed)


def _require_matrix(rows: Tensor) -> None:
    assert rows.dim() == 2
    assert rows.is_contiguous()
    assert rows.data_ptr() % 16 == 0
    assert rows.shape[1] * rows.element_size() % 16 == 0


def _multiply(values: Tensor, matrix, d: Tensor, layout: Tensor) -> None:
    M = values.shape[0]
    assert d.dtype == torch.bfloat16
    assert d.is_contiguous()
    assert d.shape[1] * d.element_size() % 16 == 0
    assert layout.dtype == torch.int32
    assert layout.shape == (M,)
    assert layout.is_contiguous()
    assert M % ALIGNMENT == 0
    d.fill_(float("nan"))
    for first in range(0, M, ALIGNMENT):
        experts = layout[first : first + ALIGNMENT].tolist()
        owned = sum(expert >= 0 for expert in experts)
        # a block of rows is one expert's, and those of nobody come last in it
        assert set(experts[:owned]) <= {experts[0]}
        assert set(experts[owned:]) <= {-1}
        if owned:
            rows = values[first : first + owned]
            d[first : first + owned] = (rows @ matrix(experts[0]).t()).to(d.dtype)


class Buffer:
    """What `get_symm_buffer_for_mega_moe` gives on SM90; memory that nobody filled is NaN or no expert."""

    def __init__(self, num_experts, num_tokens, num_topk, hidden, intermediate_hidden):
        self.num_experts, self.num_topk = num_experts, num_topk
        self.num_max_tokens_per_rank = num_tokens
        self.hidden, self.intermediate_hidden = hidden, intermediate_hidden
        self.x = torch.full((num_tokens, hidden), 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
        self.x_sf = torch.full((num_tokens, hidden // 128), float("nan"))
        self.topk_idx = torch.full((num_tokens, num_topk), 2**40)
        self.topk_weights = torch.full((num_tokens, num_topk), float("nan"))
        self.destroyed = False

    def destroy(self):
        self.destroyed = True


def get_symm_buffer_for_mega_moe(
    group,
    num_experts,
    num_max_tokens_per_rank,
    num_topk,
    hidden,
    intermediate_hidden,
    use_fp8_dispatch=None,
    mma_type="fp8xfp4",
    activation="swiglu",
):
    calls.append(f"buffer {num_max_tokens_per_rank}")
    aligned = -(-num_max_tokens_per_rank // 384) * 384
    return Buffer(num_experts, aligned, num_topk, hidden, intermediate_hidden)


def transform_weights_for_mega_moe_sm90(l1_weights, l2_weights):
    data, scale = l1_weights
    E, N, H = data.shape
    gate, up = data.view(torch.uint8).view(E, 2, N // 16, 8, H).unbind(1)
    turns = torch.stack([gate, up], dim=2).reshape(E, N, H).view(data.dtype)
    return (turns, scale), l2_weights


def fp8_mega_moe(
    y,
    l1_weights,
    l2_weights,
    sym_buffer,
    cumulative_local_expert_recv_stats=None,
    recipe=(128, 128, 128),
    activation="swiglu",
    activation_clamp=None,
    fast_math=True,
):
    calls.append("mega")
    (up, up_scale), (down, down_scale), buffer = l1_weights, l2_weights, sym_buffer
    (T, H), (E, N, _), I = y.shape, up.shape, down.shape[2]
    assert y.dtype == torch.bfloat16
    assert y.is_contiguous()
    assert len(y) <= buffer.num_max_tokens_per_rank
    assert (buffer.num_experts, buffer.hidden, buffer.intermediate_hidden) == (E, H, I)
    assert N == 2 * I
    # rows of scales are copied 16 bytes at a time
    assert H % 512 == 0
    assert I % 256 == 0
    assert up_scale.shape == (E, N // 128, H // 128)
    assert down_scale.shape == (E, H // 128, I // 128)
    for tensor in (up, up_scale, down, down_scale):
        assert tensor.is_contiguous()
        assert tensor.dtype in (torch.float8_e4m3fn, torch.float32)
    ids, weights = buffer.topk_idx[:T], buffer.topk_weights[:T]
    assert bool(((ids >= -1) & (ids < E)).all())
    assert buffer.topk_weights.dtype == torch.float32
    x = buffer.x[:T].float() * buffer.x_sf[:T].repeat_interleave(128, dim=1)

    def blocks(scale: Tensor) -> Tensor:
        return scale.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)

    out = torch.zeros(T, H)
    for token, slot in (ids >= 0).nonzero().tolist():
        expert = int(ids[token, slot])
        # gate and up by turns of eight rows, and scales as they were
        turns = up[expert].float().view(-1, 2, 8, H)
        first = torch.cat([turns[:, 0].reshape(I, H), turns[:, 1].reshape(I, H)]) * blocks(up_scale[expert])
        gate, upper = (x[token] @ first.t()).chunk(2)
        if activation_clamp is not None:
            gate, upper = gate.clamp(max=activation_clamp), upper.clamp(-activation_clamp, activation_clamp)
        inner = (torch.nn.functional.silu(gate) * upper).view(-1, 128)
        size = inner.abs().amax(1, keepdim=True) / 448
        rounded = (inner / size.where(size > 0, 1)).to(torch.float8_e4m3fn).float() * size
        rows = rounded.flatten() @ (down[expert].float() * blocks(down_scale[expert])).t()
        out[token] += rows * weights[token, slot]
    y.copy_(out)
