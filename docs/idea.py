"""
The idea of this package in one file: a padded batch is computed as one row of distinct tokens.

Run `python docs/idea.py`. A small decoder computes a batch of pairs padded, packed, and packed with shared prefixes;
log-probabilities and gradients are equal, the number of computed tokens is not.

Shapes in names: B rows, L positions, U distinct rows, T packed tokens, K keys, R real tokens, N heads, D head size,
H hidden size, V vocabulary.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F


HEADS, KV_HEADS, HEAD_SIZE, LAYERS, MLP, VOCABULARY = 4, 2, 8, 2, 48, 40
HIDDEN = HEADS * HEAD_SIZE


class Layout(NamedTuple):
    """Index maps between a padded batch and its packed row, and the segments of the row's attention."""

    mask_BL: torch.Tensor
    token_T: torch.Tensor  # ids of the packed row
    position_T: torch.Tensor  # position of each token in its own row: what the rotary angle needs
    place_R: torch.Tensor  # for each real token of the batch, its place in the packed row
    key_index: torch.Tensor  # the keys of all segments one after another, as places in the packed row
    cu_seqlens_q: torch.Tensor  # segment s has the queries cu_seqlens_q[s] : cu_seqlens_q[s + 1] of the row
    cu_seqlens_k: torch.Tensor  # ... and the keys cu_seqlens_k[s] : cu_seqlens_k[s + 1] of key_index


def pack(ids_BL: torch.Tensor, mask_BL: torch.Tensor, share: bool) -> Layout:
    """Number the tokens that are computed. Each row is a segment: its new tokens attend to all of its tokens."""
    B, L = ids_BL.shape
    mask_BL = mask_BL.bool()
    # Move the real tokens to the left, so that the padding side is of no consequence; -1 is no token's id.
    column_BL = mask_BL.cumsum(1) - 1
    row_R = mask_BL.nonzero()[:, 0]
    column_R = column_BL[mask_BL]
    rows_UL = ids_BL.new_full((B, L), -1)
    rows_UL[row_R, column_R] = ids_BL[mask_BL]

    distinct_B = torch.arange(B)
    shared_U = torch.zeros(B, dtype=torch.long)
    if share:
        # In sorted rows, what a row shares with any row before it, it shares with the row just before it: the
        # prefix tree needs no tree. Padding sorts first, so a row comes before the rows that continue it.
        rows_UL, distinct_B = torch.unique(rows_UL, dim=0, return_inverse=True)
        equal = (rows_UL[1:] == rows_UL[:-1]).long().cumprod(1).sum(1)
        shared_U = F.pad(equal, (1, 0))

    real_UL = rows_UL >= 0
    new_UL = real_UL & (torch.arange(L) >= shared_U[:, None])
    # New tokens are numbered row by row. A shared token has the number of the last new token above it in its column:
    # numbers grow downwards, so this is a cumulative maximum.
    number_UL = torch.where(new_UL, new_UL.flatten().cumsum(0).view_as(new_UL) - 1, -1)
    place_UL = number_UL.cummax(0).values if share else number_UL
    return Layout(
        mask_BL=mask_BL,
        token_T=rows_UL[new_UL],
        position_T=new_UL.nonzero()[:, 1],
        place_R=place_UL[distinct_B[row_R], column_R],
        key_index=place_UL[real_UL],
        cu_seqlens_q=F.pad(new_UL.sum(1).cumsum(0), (1, 0)),
        cu_seqlens_k=F.pad(real_UL.sum(1).cumsum(0), (1, 0)),
    )


def unpack(x_TH: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Lay the packed row out as the padded batch. The gradient of this gather adds up what copies of a token get."""
    x_BLH = x_TH.new_zeros(*layout.mask_BL.shape, x_TH.shape[-1])
    x_BLH[layout.mask_BL] = x_TH[layout.place_R]
    return x_BLH


def varlen_attention(q_TND, k_TND, v_TND, layout: Layout) -> torch.Tensor:
    """What a varlen kernel computes, one segment after another: causal, aligned at the bottom right."""
    k_KND, v_KND = k_TND[layout.key_index], v_TND[layout.key_index]
    borders_q, borders_k = layout.cu_seqlens_q.tolist(), layout.cu_seqlens_k.tolist()
    outputs = []
    for q0, q1, k0, k1 in zip(borders_q, borders_q[1:], borders_k, borders_k[1:], strict=False):
        # The last query is the last key: with fewer queries than keys, query i sees the shared keys and i + 1 more.
        causal = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(diagonal=(k1 - k0) - (q1 - q0))
        q, k, v = (x.transpose(0, 1)[None] for x in (q_TND[q0:q1], k_KND[k0:k1], v_KND[k0:k1]))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=causal, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def padded_attention(q, k, v, mask_BL: torch.Tensor) -> torch.Tensor:
    """The usual attention of a padded batch, on `(B * L, N, D)`."""
    B, L = mask_BL.shape
    q, k, v = (x.view(B, L, -1, HEAD_SIZE).transpose(1, 2) for x in (q, k, v))
    # A padded query sees itself, lest its softmax be empty.
    seen = (torch.ones(L, L, dtype=torch.bool).tril() & mask_BL[:, None].bool()) | torch.eye(L, dtype=torch.bool)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], enable_gqa=True)
    return out.transpose(1, 2).reshape(B * L, HEADS, HEAD_SIZE)


def rotate(x_TND: torch.Tensor, position_T: torch.Tensor) -> torch.Tensor:
    """Rotary embedding."""
    frequency = 1 / 10000 ** (torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
    angle = (position_T[:, None] * frequency).repeat(1, 2)[:, None].to(x_TND.dtype)
    first, second = x_TND.chunk(2, -1)
    return x_TND * angle.cos() + torch.cat([-second, first], -1) * angle.sin()


def decoder(weights, token_T, position_T, attention) -> torch.Tensor:
    """A Llama. All but attention and the rotary angle works on single tokens, so only these two need the layout."""

    def norm(x, name):
        return F.rms_norm(x, (HIDDEN,), weights[f"{name}.weight"], eps=1e-6)

    x_TH = weights["model.embed_tokens.weight"][token_T]
    for n in range(LAYERS):
        layer = f"model.layers.{n}"

        def linear(x, name, layer=layer):
            return x @ weights[f"{layer}.{name}.weight"].T

        y = norm(x_TH, f"{layer}.input_layernorm")
        q, k, v = (linear(y, f"self_attn.{p}_proj").view(len(y), -1, HEAD_SIZE) for p in "qkv")
        out = attention(rotate(q, position_T), rotate(k, position_T), v)
        x_TH = x_TH + linear(out.flatten(1), "self_attn.o_proj")
        y = norm(x_TH, f"{layer}.post_attention_layernorm")
        x_TH = x_TH + linear(F.silu(linear(y, "mlp.gate_proj")) * linear(y, "mlp.up_proj"), "mlp.down_proj")
    return norm(x_TH, "model.norm")


def new_weights() -> dict[str, torch.Tensor]:
    """Random float64 weights, under the names of `LlamaForCausalLM`."""
    kv = KV_HEADS * HEAD_SIZE
    shapes = {"model.embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN), "model.norm": (HIDDEN,)}
    for n in range(LAYERS):
        layer = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN)}
        layer |= {"self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN)}
        layer |= {"mlp.gate_proj": (MLP, HIDDEN), "mlp.up_proj": (MLP, HIDDEN), "mlp.down_proj": (HIDDEN, MLP)}
        layer |= {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
        shapes |= {f"model.layers.{n}.{name}": shape for name, shape in layer.items()}
    draw = torch.Generator().manual_seed(0)
    return {
        f"{name}.weight": (torch.randn(shape, generator=draw, dtype=torch.float64) * 0.3).requires_grad_()
        for name, shape in shapes.items()
    }


def pairs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, mask and completion mask: three pairs, the chosen rows first; a pair has a prompt in common."""
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCABULARY, (n,), generator=draw) for n in (12, 7, 9)]
    rows = [(p, torch.randint(VOCABULARY, (n,), generator=draw)) for n0 in (3, 6) for n, p in enumerate(prompts, n0)]
    L = max(len(p) + len(c) for p, c in rows)
    ids_BL, mask_BL, completion_BL = (torch.zeros(len(rows), L, dtype=torch.long) for _ in range(3))
    for b, (prompt, completion) in enumerate(rows):
        n = len(prompt) + len(completion)
        ids_BL[b, :n] = torch.cat([prompt, completion])
        mask_BL[b, :n] = 1
        completion_BL[b, len(prompt) : n] = 1
    return ids_BL, mask_BL, completion_BL


def logps_of(logits_BLV, ids_BL, completion_BL) -> torch.Tensor:
    """Log-probability of each row's completion: position l predicts token l + 1."""
    logps = logits_BLV[:, :-1].log_softmax(-1).gather(-1, ids_BL[:, 1:, None])[..., 0]
    return (logps * completion_BL[:, 1:]).sum(1)


def dpo_loss(logps_B: torch.Tensor, beta: float = 0.1) -> torch.Tensor:
    """DPO's loss; the reference model, a constant, is left out."""
    chosen, rejected = logps_B.chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


def compute(weights, ids_BL, mask_BL, completion_BL, layout: Layout | None):
    """Log-probabilities, gradients, and the number of tokens that entered the decoder; padded without a layout."""
    if layout is None:
        position_BL = (mask_BL.cumsum(1) - 1).clamp(min=0)

        def attend(q, k, v):
            return padded_attention(q, k, v, mask_BL)

        x_TH = decoder(weights, ids_BL.flatten(), position_BL.flatten(), attend)
        x_BLH = x_TH.view(*ids_BL.shape, HIDDEN)
    else:

        def attend(q, k, v):
            return varlen_attention(q, k, v, layout)

        x_TH = decoder(weights, layout.token_T, layout.position_T, attend)
        x_BLH = unpack(x_TH, layout)
    logps_B = logps_of(x_BLH @ weights["lm_head.weight"].T, ids_BL, completion_BL)
    gradients = torch.autograd.grad(dpo_loss(logps_B), list(weights.values()))
    return logps_B.detach(), dict(zip(weights, gradients, strict=True)), len(x_TH)


def main() -> int:
    """Print the table; 0 if the three computations are equal."""
    weights, batch = new_weights(), pairs()
    layouts = {"padded": None, "packed": pack(*batch[:2], share=False), "shared": pack(*batch[:2], share=True)}
    exact, exact_gradients, _ = compute(weights, *batch, None)
    equal = True
    print(f"{'':8}{'tokens':>8}{'log-probs differ by':>22}{'gradients differ by':>22}")
    for name, layout in layouts.items():
        logps, gradients, tokens = compute(weights, *batch, layout)
        off = float((logps - exact).abs().max())
        off_gradients = max(float((gradients[n] - exact_gradients[n]).abs().max()) for n in weights)
        print(f"{name:8}{tokens:8}{off:22.1e}{off_gradients:22.1e}")
        equal = equal and off < 1e-10 and off_gradients < 1e-10  # float64: rounding is about 1e-14
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
